"""Single messages of JetStream streams: written until they are acknowledged, and where asked for under a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import nats.errors
import nats.js.errors

from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import Unavailable

_T = TypeVar("_T")
_WRONG_SEQUENCE: Final = (10071, 10164)
_AGAIN_S: Final = 0.2
_TRY_S: Final = 2.0
WRITE_S: Final = 15.0
"""Longest wait for an answer: a cluster's servers may be electing a leader."""


class Changed(Exception):
    """The condition of a write does not hold. Also where the write has been stored and its acknowledgement was lost."""


class Stored:
    """Writes and reads. Everything raises ``Unavailable`` when JetStream does not answer within WRITE_S."""

    def __init__(
        self,
        bus: Bus,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._pause = pause

    async def write(
        self,
        subject: str,
        entry: Any,
        *,
        keep_s: float | None = None,
        expected: int | None = None,
        fence: tuple[str, int] | None = None,
    ) -> int:
        """Write ``entry``, to stand for ``keep_s`` seconds; its sequence.

        ``expected``: the sequence of the last message of this subject (0: there is none); ``fence``: another subject of
        the stream, and that of its last message. Raises ``Changed`` where it is another one.
        """
        headers: dict[str, str] = {}
        if keep_s is not None:
            headers["Nats-TTL"] = str(max(1, int(keep_s)))
        if expected is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
        if fence is not None:
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = fence[0]
            headers["Nats-Expected-Last-Subject-Sequence"] = str(fence[1])
        return await self._publish(subject, codec.pack(entry), headers)

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        async def publish() -> int:
            stored = await self._bus.jetstream.publish(subject, data, headers=headers, timeout=_TRY_S)
            return stored.seq

        return await self._patiently(publish, "written")

    async def last(self, stream: str, subject: str, *, led: bool = True) -> tuple[int, bytes] | None:
        """Sequence and data of the last message of ``subject``, as the stream's leader has it. Not ``led``: as any
        server with a copy has it; what that one lacks may be stored all the same."""

        async def read() -> tuple[int, bytes] | None:
            try:
                message = await self._bus.jetstream.get_last_msg(stream, subject, direct=not led)
            except nats.js.errors.NotFoundError:
                return None
            return message.seq or 0, message.data or b""

        return await self._patiently(read, "read")

    async def _patiently(self, ask: Callable[[], Awaitable[_T]], done: str) -> _T:
        """What JetStream answers to ``ask``, by which the journal would be ``done``."""
        deadline = self._clock() + WRITE_S
        while True:
            try:
                async with asyncio.timeout(_TRY_S):
                    return await ask()
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_SEQUENCE:
                    raise Changed from error
                problem = error.description or type(error).__name__
            except (nats.errors.Error, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            if self._clock() > deadline:
                raise Unavailable(f"the call's journal cannot be {done}: {problem}; call again")
            await self._pause(_AGAIN_S)

"""Single messages of JetStream streams: written until they are acknowledged, and where asked for under a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import nats.errors
import nats.js.errors

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.streams import STORE_FAILED, WRONG_SEQUENCE
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import StoreFull, Unavailable

_T = TypeVar("_T")
_AGAIN_S: Final = 0.2
_TRY_S: Final = 2.0


class Changed(Exception):
    """The condition of a write does not hold. Also where the write has been stored and its acknowledgement was lost."""


@dataclass(frozen=True)
class Last:
    """A condition: the last message of ``subject`` is the ``sequence``-th of ``stream`` (0: there is none)."""

    stream: str
    subject: str
    sequence: int


class Stored:
    """Writes and reads. Everything raises ``Unavailable`` when JetStream does not answer within ELECTION_S: its servers
    may be electing a leader. What was written then may be stored all the same, also later."""

    def __init__(
        self,
        bus: Bus,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._pause = pause

    async def write(self, subject: str, entry: Any, *, keep_s: float | None = None, where: Last | None = None) -> int:
        """Write ``entry``, to stand for ``keep_s`` seconds; its sequence. ``where``: a condition, of ``subject`` itself
        or of another one in its stream. Raises ``Changed`` where it does not hold, ``StoreFull`` at once where the
        stream holds all that it may."""
        headers: dict[str, str] = {}
        if keep_s is not None:
            headers["Nats-TTL"] = str(max(1, int(keep_s)))
        if where is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(where.sequence)
            if where.subject != subject:
                headers["Nats-Expected-Last-Subject-Sequence-Subject"] = where.subject
        return await self._publish(subject, codec.pack(entry), headers, where)

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str], where: Last | None) -> int:
        async def publish() -> int:
            try:
                stored = await self._bus.jetstream.publish(subject, data, headers=headers, timeout=_TRY_S)
            except nats.js.errors.APIError as error:
                if error.err_code == STORE_FAILED and "maximum" in (error.description or ""):
                    raise StoreFull(f"{subject} is not stored: {error.description}; call again later") from error
                if where is None or error.err_code not in WRONG_SEQUENCE or await self._holds(where):
                    raise
                raise Changed from error
            return stored.seq

        return await self._patiently(publish, "written")

    async def _holds(self, where: Last) -> bool:
        """A cluster also refuses a write while another one on the same condition is on its way, such as the try before,
        which nobody waits for any more; without a majority of servers that takes as long as it lasts."""
        there = await self._ask_last(where.stream, where.subject, led=True)
        return (there[0] if there is not None else 0) == where.sequence

    async def last(self, stream: str, subject: str, *, led: bool = True) -> tuple[int, bytes] | None:
        """Sequence and data of the last message of ``subject``, as the stream's leader has it. Not ``led``: as any
        server with a copy has it; what that one lacks may be stored all the same."""

        async def read() -> tuple[int, bytes] | None:
            return await self._ask_last(stream, subject, led)

        return await self._patiently(read, "read")

    async def _ask_last(self, stream: str, subject: str, led: bool) -> tuple[int, bytes] | None:
        try:
            message = await self._bus.jetstream.get_last_msg(stream, subject, direct=not led)
        except nats.js.errors.NotFoundError:
            return None
        return message.seq or 0, message.data or b""

    async def size(self, stream: str) -> tuple[int, int]:
        """Bytes that it holds, and that it may hold (0 or less: any number)."""

        async def read() -> tuple[int, int]:
            info = await self._bus.jetstream.stream_info(stream)
            return info.state.bytes, info.config.max_bytes or 0

        return await self._patiently(read, "read")

    async def _patiently(self, ask: Callable[[], Awaitable[_T]], done: str) -> _T:
        """What JetStream answers to ``ask``, by which the journal would be ``done``."""
        deadline = self._clock() + ELECTION_S
        while True:
            try:
                async with asyncio.timeout(_TRY_S):
                    return await ask()
            except nats.js.errors.APIError as error:
                problem = error.description or type(error).__name__
            except (nats.errors.Error, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            if self._clock() > deadline:
                raise Unavailable(f"the call's journal cannot be {done}: {problem}; call again")
            await self._pause(_AGAIN_S)

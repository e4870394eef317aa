"""The journals of calls in JetStream: entries are acknowledged, and read in order from any gateway."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, cast

import nats.errors
import nats.js.errors

from sllm_gateway.follow import messages
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.watch import snapshot
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.calls import JOURNAL_TTL_S, KNOWN_S, CallOrder, Entry, Journaled, KeyClaim
from sllm_runtime.protocol.errors import CallNotFound, InvalidArgument, Unavailable
from sllm_runtime.protocol.subjects import (
    CALLS_STREAM,
    JOURNAL_STREAM,
    call_entries,
    call_entry,
    key_claim,
)

STREAMS: Final = (JOURNAL_STREAM, CALLS_STREAM)
_WRONG_SEQUENCE: Final = (10071, 10164)
_AGAIN_S: Final = 0.2
_TRY_S: Final = 2.0
WRITE_S: Final = 15.0
"""Longest wait for a write: a cluster's servers may be electing a leader."""
CLAIMED_S: Final = 60.0
"""A key is taken for so long before its call is known: then its gateway has died between the two."""


def digest(*parts: bytes) -> bytes:
    """BLAKE2b over parts that cannot run into each other."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()


class Journal:
    """All journals. Everything raises ``Unavailable`` when JetStream does not answer within WRITE_S."""

    def __init__(
        self,
        bus: Bus,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._pause = pause

    # --- writing ----------------------------------------------------------------------------------
    async def write(self, stream: str, call: str, name: str, entry: Entry, keep_s: float) -> None:
        """Write ``entry`` under ``name``; it stands for ``keep_s`` seconds. Written again it changes nothing."""
        await self._publish(call_entry(stream, call, name), codec.pack(entry), {"Nats-TTL": _ttl(keep_s)})

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        deadline = self._clock() + WRITE_S
        while True:
            try:
                await self._bus.jetstream.publish(subject, data, headers=headers, timeout=_TRY_S)
                return
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_SEQUENCE:
                    raise
                problem = error.description or type(error).__name__
            except nats.errors.Error as error:
                problem = str(error) or type(error).__name__
            if self._clock() > deadline:
                raise Unavailable(f"the call's journal cannot be written: {problem}; call again")
            await self._pause(_AGAIN_S)

    # --- keys -------------------------------------------------------------------------------------
    async def claim(self, key: str, mine: KeyClaim) -> KeyClaim:
        """Whose key it is: ``mine``, or of the call that has it already. Raises ``InvalidArgument`` where that one was
        asked for something else."""
        headers = {"Nats-Expected-Last-Subject-Sequence": "0", "Nats-TTL": _ttl(CLAIMED_S)}
        for _ in range(2):
            try:
                await self._publish(key_claim(key), codec.pack(mine), headers)
                return mine
            except nats.js.errors.APIError:
                there = await self._last(CALLS_STREAM, key_claim(key))
            if there is None:  # its time ended just now
                continue
            found = codec.unpack(KeyClaim, there)
            if found.body != mine.body:
                raise InvalidArgument(
                    "this Idempotency-Key was used for another request; use a new key", field="Idempotency-Key"
                )
            return found
        raise Unavailable("the Idempotency-Key cannot be claimed now; call again")

    async def hold(self, key: str, claim: KeyClaim, keep_s: float) -> None:
        """The key stands for ``claim`` for so long from now."""
        await self._publish(key_claim(key), codec.pack(claim), {"Nats-TTL": _ttl(keep_s)})

    # --- reading ----------------------------------------------------------------------------------
    async def find(self, call: str) -> tuple[str, CallOrder]:
        """The stream that has it, and what was asked. Raises ``CallNotFound``."""
        for stream in STREAMS:
            data = await self._last(stream, call_entry(stream, call, "order"))
            if data is not None:
                return stream, codec.unpack(CallOrder, data)
        raise CallNotFound(
            f"no call {call} is kept: it is unknown, ended long ago, or had neither `Prefer: respond-async` nor an"
            " Idempotency-Key"
        )

    async def _last(self, stream: str, subject: str) -> bytes | None:
        try:
            message = await self._bus.jetstream.get_last_msg(stream, subject, direct=True)
        except nats.js.errors.NotFoundError:
            return None
        except nats.errors.Error as error:
            raise Unavailable(f"the journal cannot be read: {error or type(error).__name__}; try again") from error
        return message.data or b""

    async def entries(self, stream: str, call: str) -> AsyncGenerator[Entry | None, None]:
        """Everything that is and will be written of a call, in order; None once all that was there has come."""
        async with aclosing(messages(self._bus, stream, call_entries(stream, call), None)) as found:
            async for data in found:
                yield None if data is None else entry_of(data)

    async def now(self, stream: str, call: str) -> tuple[Journaled, list[Entry]]:
        """What is written of a call now."""
        journaled, entries = Journaled(), []
        async with aclosing(self.entries(stream, call)) as found:
            async for entry in found:
                if entry is None:
                    break
                journaled.take(entry)
                entries.append(entry)
        return journaled, entries

    async def all(self) -> dict[str, Journaled]:
        """Every call that is known, without bodies and answers, by id."""
        calls: dict[str, Journaled] = {}
        for stream in STREAMS:
            for name in ("order", "began", "ended", "kept"):
                found = await snapshot(self._bus, stream, call_entries(stream, "*", name))
                for subject, data in found.items():
                    call = subject.split(".")[2]
                    calls.setdefault(call, Journaled()).take(entry_of(data))
        return {call: journaled for call, journaled in calls.items() if journaled.order is not None}


def entry_of(data: bytes) -> Entry:
    """One entry. Raises ``ProtocolError``."""
    return cast(Entry, codec.unpack(cast(Any, Entry), data))


def kept_s(timeout_s: float) -> float:
    """How long entries of a call that may run for ``timeout_s`` more are kept, whenever it ends."""
    return timeout_s + JOURNAL_TTL_S + CLAIMED_S


def known_s(timeout_s: float) -> float:
    """How long it is known."""
    return kept_s(timeout_s) + KNOWN_S


def _ttl(seconds: float) -> str:
    return str(max(1, int(seconds)))

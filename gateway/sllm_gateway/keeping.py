"""Calls that are kept, towards their callers: begun with ``Prefer: respond-async`` or an ``Idempotency-Key``, read from
their journal by whoever names them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from sllm_gateway.asgi import Headers, Receive, Scope, Send, answer, exactness, header
from sllm_gateway.call import Order
from sllm_gateway.detached import Detached, stream_of
from sllm_gateway.events import EventWriter
from sllm_gateway.journal import CLAIMED_S, Journal, digest, expired
from sllm_gateway.outputs import Stream
from sllm_gateway.recent import Recent
from sllm_gateway.replay import After, body_of
from sllm_gateway.replay import stream_of as encoder_of
from sllm_gateway.table import RouteTable
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.calls import READING_S, CallOrder, Journaled, KeyClaim, Reading
from sllm_runtime.protocol.errors import (
    CallNotFound,
    Cancelled,
    Conflict,
    InvalidArgument,
    InvalidRequest,
    JournalExpired,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.frames import End, Frame
from sllm_runtime.protocol.http import CALL_ID
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.states import CallState

_KEY: Final = re.compile(rb"[\x20-\x7e]{1,255}")
_AGAIN_S: Final = 0.1
_SELDOM: Final = 5
"""Of a call that runs it is asked every so many times what it waits for."""
_JSON: Final = (b"content-type", b"application/json")


@dataclass(frozen=True)
class Wish:
    """How a caller wants a call to be kept."""

    durable: bool
    key: str
    """Digest of route and key; empty: none was given."""


def wish_of(scope: Scope) -> Wish | None:
    """None: it is a call like any other. Raises ``InvalidRequest`` for a key that is none."""
    prefers = b",".join(value for name, value in scope["headers"] if name == b"prefer").lower()
    durable = b"respond-async" in (word.partition(b";")[0].strip() for word in prefers.split(b","))
    key = header(scope, b"idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest("an Idempotency-Key has 1 to 255 printable ASCII characters", field="Idempotency-Key")
    if key is None and not durable:
        return None
    return Wish(durable, digest(scope["path"].encode(), key).hex() if key is not None else "")


class Keeping:
    """Begins kept calls, and answers from journals."""

    def __init__(
        self,
        bus: Bus,
        detached: Detached,
        journal: Journal,
        table: RouteTable,
        recent: Recent,
        writer: EventWriter,
        clock: Callable[[], float],
    ) -> None:
        self._bus, self._detached, self._journal, self._writer = bus, detached, journal, writer
        self._table, self._recent = table, recent
        self._clock = clock

    # --- beginning --------------------------------------------------------------------------------
    async def begin(
        self, scope: Scope, receive: Receive, send: Send, order: Order, asked: CallOrder, wish: Wish
    ) -> None:
        """Begin the call, or join the one that has its key; then 202, or its answer as ``order.stream`` says."""
        claim = KeyClaim(call=asked.call, body=digest(order.body))
        if wish.key:
            asked = msgspec.structs.replace(asked, key=wish.key, key_body=claim.body)
            claim = await self._journal.claim(wish.key, claim)
            scope["sllm.call"] = claim.call
        if claim.call == asked.call:
            await self._submit(order, asked)
        found = await self._find(claim)
        if wish.durable:
            await self._accepted(found, send)
        elif order.stream:
            await self.events(found, receive, send, last=-1, at_once=False)
        else:
            ran = self._table.get(found.function, found.version) or order.version  # another is active by now, maybe
            await self.whole(found, ran.manifest.handler.streams, scope, send)

    async def _submit(self, order: Order, asked: CallOrder) -> None:
        try:
            await self._detached.submit(replace(order, stream=True), asked)
        except SllmError:
            if asked.key:  # nothing was begun: the same key may try again
                with contextlib.suppress(Conflict):
                    await self._journal.hold(asked.key, asked.claim, 1.0)
            raise

    async def _find(self, claim: KeyClaim) -> CallOrder:
        """What was asked. One whose key was claimed just now is written in a moment. Raises ``Unavailable``, and
        ``JournalExpired`` for one that was written: whoever called again would have it run twice."""
        deadline = self._clock() + CLAIMED_S / 4
        while True:
            try:
                return (await self._journal.find(claim.call))[1]
            except CallNotFound as error:
                if claim.begun:
                    raise expired(claim.call) from error
                if self._clock() > deadline:
                    raise Unavailable(
                        "the first request with this Idempotency-Key was not begun; call again"
                    ) from error
            await asyncio.sleep(_AGAIN_S)

    async def _accepted(self, order: CallOrder, send: Send) -> None:
        """Raises ``InvalidArgument`` for one that was begun otherwise: a 202 would promise what is not kept."""
        call = order.call
        if not order.durable:
            raise InvalidArgument(
                f"{call} was begun with this Idempotency-Key and without `Prefer: respond-async`: it ends when nobody"
                " reads it. Read it by the same request without `Prefer`, or use a new key",
                field="Idempotency-Key",
            )
        journaled, _ = await self._journal.now(stream_of(order), call)
        headers: Headers = [
            _JSON,
            (b"location", f"/v1/calls/{call}".encode()),
            (b"preference-applied", b"respond-async"),
            (CALL_ID.lower().encode(), call.encode()),
        ]
        await answer(send, 202, headers, msgspec.json.encode({"id": call, "state": journaled.state.value}))

    # --- reading ----------------------------------------------------------------------------------
    async def events(self, order: CallOrder, receive: Receive, send: Send, *, last: int, at_once: bool = True) -> None:
        """The stream as it would have been, from after event ``last``. ``at_once``: an error is an event too, however
        early it comes."""
        encoder = encoder_of(order)
        after = After(encoder, last)

        def failed(error: SllmError) -> bytes:
            return encoder.error(error)

        headers = ((CALL_ID.lower().encode(), order.call.encode()),)
        source = self._read(order, after, at_once)
        quiet = _Waiting(self._recent, order.call, encoder)
        await self._writer.write(source, receive, send, headers=headers, failed=failed, quiet=quiet.says)

    async def _read(self, order: CallOrder, after: After, at_once: bool) -> AsyncGenerator[bytes, None]:
        journaled, past = Journaled(), False
        waiting: list[bytes] = []
        async with self._told(order), aclosing(self._journal.entries(stream_of(order), order.call)) as entries:
            async for entry in entries:
                if entry is None:
                    past = True
                    await self._require(order, journaled)
                    waiting += [b""] if at_once else []
                else:
                    frames = list(journaled.take(entry))
                    if not journaled.exact:
                        after.inexact()
                    waiting.append(after.frames(frames))
                if past and (any(waiting) or entry is None) and waiting:
                    yield b"".join(waiting)
                    waiting.clear()
                if past and journaled.ended is not None:
                    yield after.end(_success(journaled))
                    return

    async def whole(self, order: CallOrder, streams: bool, scope: Scope, send: Send) -> None:
        """The answer in one piece, when all of it is there."""
        connection = scope["state"]["connection"]
        collecting = asyncio.create_task(self.collect(order))
        with connection.watched(collecting.cancel):
            try:
                await asyncio.wait({collecting})
                if collecting.cancelled():
                    raise Cancelled("the caller went away")
                journaled, frames = collecting.result()
            finally:
                collecting.cancel()
                await asyncio.wait({collecting})
        body = body_of(order, streams=streams, exact=journaled.exact).body(frames, _success(journaled))
        headers = [_JSON, (CALL_ID.lower().encode(), order.call.encode()), *exactness(exact=journaled.exact)]
        await answer(send, 200, headers, body)

    async def collect(self, order: CallOrder) -> tuple[Journaled, list[Frame]]:
        """All that is written of it, and its answer's frames, once it has ended."""
        journaled, frames, past = Journaled(), list[Frame](), False
        async with self._told(order), aclosing(self._journal.entries(stream_of(order), order.call)) as entries:
            async for entry in entries:
                if entry is None:
                    past = True
                    await self._require(order, journaled)
                else:
                    frames += journaled.take(entry)
                if past and journaled.ended is not None:
                    break
        return journaled, frames

    async def _require(self, order: CallOrder, journaled: Journaled) -> None:
        """Raises ``JournalExpired`` where what was there of a call says that nothing more of it will come."""
        if journaled.order is None:  # or this server does not have it yet
            await self._journal.require(stream_of(order), order.call)
        require_kept(journaled)

    @asynccontextmanager
    async def _told(self, order: CallOrder) -> AsyncGenerator[None, None]:
        """Inside, the gateway that has the call knows that somebody reads it, also while nothing comes of it."""
        telling = asyncio.create_task(self._tell(order.call))
        try:
            yield
        finally:
            await end({telling})

    async def _tell(self, call: str) -> None:
        while True:
            self._detached.read(call)  # also while there is no NATS
            with contextlib.suppress(Unavailable):
                self._bus.publish_now(subjects.READING, Reading(call=call))
            await asyncio.sleep(READING_S)


class _Waiting:
    """What the reader of a call is told while nothing comes of it: what it waits for, as the gateway knows that has it.
    That is in no journal: it says nothing of the answer, and changes with every chunk of a load."""

    def __init__(self, recent: Recent, call: str, encoder: Stream) -> None:
        self._recent, self._call, self._encoder = recent, call, encoder
        self._shown: Progress | None = None
        self._runs = False
        self._passed = 0

    async def says(self) -> bytes | None:
        """See ``Quiet``. A call that runs is asked about more seldom: it computes, and may wait again all the same."""
        self._passed += 1
        if not self._encoder.inside and (not self._runs or self._passed >= _SELDOM):
            self._passed = 0
            with contextlib.suppress(SllmError):
                told = await self._recent.anywhere(self._call)
                self._runs = told is not None and told.state is CallState.RUNNING
                shown, self._shown = self._shown, told.progress if told is not None else None
                if self._shown not in (None, shown) and not self._encoder.inside:
                    return self._encoder.progress(self._shown)
        return None if self._encoder.inside else b""


def require_kept(journaled: Journaled) -> None:
    """Raises ``JournalExpired`` for what has ended too long ago."""
    if journaled.ended is not None and not journaled.kept:
        raise JournalExpired(
            f"{_name(journaled)} ended {journaled.ended.state} and its answer is no longer kept; call again"
        )


def _name(journaled: Journaled) -> str:
    return journaled.order.call if journaled.order is not None else "the call"


def _success(journaled: Journaled) -> End:
    """Raises how the call failed, ``JournalExpired`` where not all of its answer is there: it must not seem whole."""
    assert journaled.ended is not None
    if not journaled.whole:
        raise JournalExpired(
            f"of the answer of {_name(journaled)} only the first {journaled.frames} of {journaled.total} frames are"
            " kept: the journal is full, or its server was killed; call again"
        )
    if journaled.ended.error is not None:
        raise journaled.ended.error.to_error()
    return End(usage=journaled.ended.usage)

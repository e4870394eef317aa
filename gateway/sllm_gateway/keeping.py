"""Calls that are kept, towards their callers: begun with ``Prefer: respond-async`` or an ``Idempotency-Key``, read from
their journal by whoever names them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from sllm_gateway import views
from sllm_gateway.asgi import JSON, PIECE, Headers, Scope, Send, answer, exactness, header
from sllm_gateway.call import Order
from sllm_gateway.detached import Detached, stream_of
from sllm_gateway.errors import KEY
from sllm_gateway.events import EventWriter
from sllm_gateway.journal import CLAIMED_S, Journal, digest, expired
from sllm_gateway.outputs import Stream
from sllm_gateway.recent import Recent
from sllm_gateway.replay import After, Whole, name_of, success
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
    OutputTooLarge,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.http import CALL_ID, IDEMPOTENCY_KEY, PromisedView
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.states import CallState

_KEY: Final = re.compile(IDEMPOTENCY_KEY.encode())
_AGAIN_S: Final = 0.1
_WRITTEN_S: Final = CLAIMED_S / 4
"""A call that has just claimed its key is written within that time, or will not be."""
_SELDOM: Final = 5
"""Of a call that runs it is asked every so many times what it waits for."""


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
        raise InvalidRequest("an Idempotency-Key has 1 to 255 printable ASCII characters", field=KEY)
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
        max_output: int,
        clock: Callable[[], float],
        collects: Callable[[int], str],
    ) -> None:
        """``max_output``: bytes of the largest answer that is not streamed; ``collects``: see ``Calls``."""
        self._bus, self._detached, self._journal, self._writer = bus, detached, journal, writer
        self._table, self._recent = table, recent
        self._max_output, self._collects = max_output, collects
        self._clock = clock

    # --- beginning --------------------------------------------------------------------------------
    async def begin(self, scope: Scope, send: Send, order: Order, asked: CallOrder, wish: Wish) -> None:
        """Begin the call, or join the one that has its key; then 202, or its answer as ``order.stream`` says."""
        own = KeyClaim(call=asked.call, body=digest(order.body))
        if wish.key:
            asked = msgspec.structs.replace(asked, key=wish.key, key_body=own.body)
        found = await self._begun(order, asked, own, scope)
        if wish.durable and found is asked:  # it is stored: nothing that fails now is to have it asked for again
            await self._promise(asked, CallState.QUEUED, send)
        else:
            await self.answer(found, scope, send, wish, stream=order.stream)

    async def again(self, scope: Scope, body: bytes, wish: Wish) -> CallOrder | None:
        """The call that has the key, if one has: whatever its function is by now, it was one of this request. Raises as
        ``_begun``, and ``InvalidArgument`` where it had another body."""
        if not wish.key:
            return None
        own, deadline = KeyClaim(call=scope["sllm.call"], body=digest(body)), self._clock() + _WRITTEN_S
        while (claim := await self._journal.claimed(wish.key, own)) is not None:
            scope["sllm.call"] = claim.call
            if (found := await self._found(claim, deadline)) is not None:
                return found
            await asyncio.sleep(_AGAIN_S)
        scope["sllm.call"] = own.call  # that one was refused
        return None

    async def answer(self, order: CallOrder, scope: Scope, send: Send, wish: Wish, *, stream: bool) -> None:
        """202, or its answer."""
        if wish.durable:
            await self._accepted(order, send)
        elif stream:
            await self.events(order, scope, send, last=-1, at_once=False)
        else:
            await self.whole(order, scope, send)

    async def _submit(self, order: Order, asked: CallOrder) -> None:
        try:
            await self._detached.submit(replace(order, stream=True), asked)
        except SllmError:
            if asked.key:  # nothing was begun: the same key may try again
                with contextlib.suppress(Conflict):
                    await self._journal.hold(asked.key, msgspec.structs.replace(asked.claim, refused=True), 1.0)
            raise

    async def _begun(self, order: Order, asked: CallOrder, own: KeyClaim, scope: Scope) -> CallOrder:
        """The call that has its key, begun if that is its own. One that claimed it just now is written in a moment, or
        refused, which leaves the key. Raises ``Unavailable``, and ``JournalExpired`` for one that was written: whoever
        called again would have it run twice."""
        claim, deadline = own, self._clock() + _WRITTEN_S
        while True:
            if asked.key:
                claim = await self._journal.claim(asked.key, own)
                scope["sllm.call"] = claim.call
            if claim.call == own.call:
                await self._submit(order, asked)
                return asked
            if (found := await self._found(claim, deadline)) is not None:
                return found
            await asyncio.sleep(_AGAIN_S)

    async def _found(self, claim: KeyClaim, deadline: float) -> CallOrder | None:
        """What its call was asked for; None: that is not written, until ``deadline``. Raises as ``_begun``."""
        try:
            return (await self._journal.find(claim.call))[1]
        except CallNotFound as error:
            if claim.begun:
                raise expired(claim.call) from error
            if self._clock() > deadline:
                raise Unavailable("the first request with this Idempotency-Key was not begun; call again") from error
        return None

    async def _accepted(self, order: CallOrder, send: Send) -> None:
        """Raises ``InvalidArgument`` for one that was begun otherwise: a 202 would promise what is not kept."""
        call = order.call
        if not order.durable:
            raise InvalidArgument(
                f"{call} was begun with this Idempotency-Key and without `Prefer: respond-async`: it ends when nobody"
                " reads it. Read it by the same request without `Prefer`, or use a new key",
                field=KEY,
            )
        await self._promise(order, (await self._journal.outline(call)).state, send)

    async def _promise(self, order: CallOrder, state: CallState, send: Send) -> None:
        headers: Headers = [
            JSON,
            (b"location", f"/v1/calls/{order.call}".encode()),
            (b"preference-applied", b"respond-async"),
            (CALL_ID.lower().encode(), order.call.encode()),
        ]
        view = PromisedView(id=order.call, state=state.value)
        await answer(send, 202, headers, view.model_dump_json().encode())

    # --- reading ----------------------------------------------------------------------------------
    async def events(self, order: CallOrder, scope: Scope, send: Send, *, last: int, at_once: bool = True) -> None:
        """The stream as it would have been, from after event ``last``. ``at_once``: an error is an event too, however
        early it comes."""
        encoder = encoder_of(order)
        after = After(encoder, last)

        def failed(error: SllmError) -> bytes:
            return encoder.error(error)

        headers = ((CALL_ID.lower().encode(), order.call.encode()),)
        source = self._read(order, after, at_once)
        quiet = _Waiting(self._recent, order.call, encoder)
        await self._writer.write(source, scope, send, headers=headers, failed=failed, quiet=quiet.says)

    async def _read(self, order: CallOrder, after: After, at_once: bool) -> AsyncGenerator[bytes, None]:
        """A long history comes in pieces, so that a reader that is slow holds one of them and not all."""
        stream, journaled, past = stream_of(order), Journaled(), False
        piece, begun = b"", False
        async with self._told(order), aclosing(self._journal.entries(stream, order.call)) as entries:
            async for entry in entries:
                if entry is None:
                    past = True
                    await self._require(order, journaled)
                else:
                    frames = list(journaled.take(entry))
                    if not journaled.exact:
                        after.inexact()
                    piece += after.frames(frames)
                    if not (past or begun) and len(piece) >= PIECE:  # its end is far: whether it has one comes first
                        require_kept(await self._journal.end_of(stream, order.call))
                if (piece and (past or len(piece) >= PIECE)) or (entry is None and at_once):
                    begun = True
                    yield piece
                    piece = b""
                if past and journaled.ended is not None:
                    yield after.end(success(journaled))
                    return

    async def whole(self, order: CallOrder, scope: Scope, send: Send) -> None:
        """The answer in one piece, when all of it is there."""
        connection = scope["state"]["connection"]
        with self._counted() as counted:
            collecting = asyncio.create_task(self._collect(order, counted))
            with connection.watched(collecting.cancel):
                try:
                    await asyncio.wait({collecting})
                    if collecting.cancelled():
                        raise Cancelled("the caller went away")
                    found = collecting.result()
                finally:
                    collecting.cancel()
                    await asyncio.wait({collecting})
            body = found.body(order, streams=self._streams(order))
            headers = [JSON, (CALL_ID.lower().encode(), order.call.encode()), *exactness(exact=found.journaled.exact)]
            await self._writer.whole(scope, send, headers, body)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Callable[[int], str]]:
        """What counts how much of an answer is held by now, for as long as it is, and says why that is too much: then
        it is to be let go, and its room is the others' at once."""
        held = 0

        def counted(cost: int) -> str:
            nonlocal held
            before, held = held, cost
            why = self._collects(cost - before)
            if why:
                held = 0
                self._collects(-cost)
            return why

        try:
            yield counted
        finally:
            counted(0)

    async def _collect(self, order: CallOrder, counted: Callable[[int], str]) -> Whole:
        """It, once the call has ended. Raises ``OutputTooLarge`` as soon as it is."""
        found, past = Whole(self._max_output), False
        async with self._told(order), aclosing(self._journal.entries(stream_of(order), order.call)) as entries:
            async for entry in entries:
                if entry is None:
                    past = True
                    await self._require(order, found.journaled)
                else:
                    found.take(entry)
                    if why := counted(found.cost):
                        found = Whole(0)
                        raise _without_room(order, why)
                if past and found.journaled.ended is not None:
                    break
                if past:
                    found.require_small(order.call)
        return found

    async def status(self, order: CallOrder, scope: Scope, send: Send) -> None:
        """How it stands, and what its route would have answered without streaming: that is JSON already."""
        with self._counted() as counted:
            await self._status(order, scope, send, counted)

    async def _status(self, order: CallOrder, scope: Scope, send: Send, counted: Callable[[int], str]) -> None:
        found, why = Whole(self._max_output), ""
        journaled = await self._journal.outline(order.call)
        if journaled.state is CallState.SUCCEEDED and journaled.kept:  # of others nothing that came is shown
            async with aclosing(self._journal.entries(stream_of(order), order.call)) as entries:
                async for entry in entries:
                    if entry is not None:
                        found.take(entry)
                        if why := counted(found.cost):
                            found = Whole(0)
                    if entry is None or found.too_large or why:
                        break
            journaled = journaled if found.too_large or why else found.journaled
        if journaled.order is None:
            raise expired(order.call)
        view = views.call(journaled, await self._recent.anywhere(order.call) if journaled.ended is None else None)
        result = b"null"
        if journaled.state is CallState.SUCCEEDED and journaled.kept and (found.too_large or why or journaled.whole):
            try:
                if why:
                    raise _without_room(order, why)
                found.require_small(order.call)
                result = found.body(order, streams=self._streams(order))
            except OutputTooLarge as error:
                view = view.model_copy(update={"error": views.error(error.body())})
        body = msgspec.json.encode(view.model_dump(mode="json") | {"result": msgspec.Raw(result)})
        del result  # a reader may take its time
        await self._writer.whole(scope, send, [JSON, *exactness(exact=journaled.exact)], body)

    def _streams(self, order: CallOrder) -> bool:
        """See ``FunctionBody``; also where its version is no more."""
        if order.streams is not None:
            return order.streams
        version = self._table.get(order.function, order.version)
        return version is not None and version.manifest.handler.streams

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
            await asyncio.sleep(min(READING_S, self._detached.window / 4))


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
            f"{name_of(journaled)} ended {journaled.ended.state} and its answer is no longer kept; call again"
        )


def _without_room(order: CallOrder, why: str) -> OutputTooLarge:
    return OutputTooLarge(f"the answer of {order.call} {why}; read it by GET /v1/calls/{order.call}/events")

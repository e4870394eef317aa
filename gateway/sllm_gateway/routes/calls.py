"""``/v1/calls``: calls that are kept (``Prefer: respond-async``, ``Idempotency-Key``) or open, at any gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from sllm_gateway import views
from sllm_gateway.asgi import JSON, Receive, Scope, Send, answer
from sllm_gateway.detached import Detached
from sllm_gateway.errors import quoted
from sllm_gateway.journal import Journal, known_s
from sllm_gateway.keeping import Keeping
from sllm_gateway.recent import Recent
from sllm_gateway.routes.api import last_event_id
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.calls import (
    CallOrder,
    CallTold,
    CancelAsked,
    CancelCall,
    Journaled,
    ListCalls,
    Reading,
    place_of,
)
from sllm_runtime.protocol.ctl import Reply
from sllm_runtime.protocol.errors import CallNotFound, DeadlineExceeded, InvalidRequest, Unavailable
from sllm_runtime.protocol.http import CALLS, MOST_CALLS, SOME_CALLS, CallListView, CallView, CancelledView
from sllm_runtime.protocol.lives import BEAT_S, SILENT_BEATS
from sllm_runtime.protocol.node import Ok
from sllm_runtime.protocol.states import CALL, CallState, final

log = logging.getLogger(__name__)

ASK_S: Final = 1.0
"""A gateway that has the call answers within this."""
HEARD_S: Final = 2 * BEAT_S * SILENT_BEATS
"""A gateway that is not heard for half of it is taken for dead, and its calls are gone on with."""


class CallRoutes:
    """``start`` before use: other gateways ask this one to cancel, and tell it who reads."""

    def __init__(
        self,
        bus: Bus,
        journal: Journal,
        detached: Detached,
        keeping: Keeping,
        recent: Recent,
        others: Callable[[], Collection[str]],
        coming: Callable[[str], Awaitable[None]],
        cancel: Callable[[str], bool],
    ) -> None:
        """``others`` names the other gateways that live; ``coming`` waits while a call may be one of a gateway that has
        died just now; ``cancel`` ends a call of this gateway that is not kept: whether there was one."""
        self._bus, self._journal, self._detached, self._keeping = bus, journal, detached, keeping
        self._recent, self._others = recent, others
        self._coming, self._cancel = coming, cancel
        self._subscriptions: list[Subscription] = []
        self._offs: list[Callable[[], None]] = []
        """What takes the callbacks off the bus."""

    def routes(self) -> list[BaseRoute]:
        found = (
            (CALLS, self.list, "GET"),
            (CALLS + "/{call}", self.status, "GET"),
            (CALLS + "/{call}/events", self.events, "GET"),
            (CALLS + "/{call}/cancel", self.cancel, "POST"),
        )
        return [Route(path, _Endpoint(run), methods=[method]) for path, run, method in found]

    async def start(self) -> None:
        """Listen. Raises ``Unavailable``."""
        self._offs += [self._bus.on_disconnect(self._detached.deaf), self._bus.on_reconnect(self._detached.hears)]
        self._subscriptions.append(
            await self._bus.listen(subjects.CANCEL_CALL, self._asked_to_cancel),
        )
        self._subscriptions.append(
            await self._bus.subscribe(subjects.READING, Reading, lambda reading, _: self._detached.read(reading.call))
        )

    async def close(self) -> None:
        for off in self._offs:
            off()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def _asked_to_cancel(self, _subject: str, reply_to: str, data: bytes) -> None:
        """Answered by the gateway that has it alone."""
        call = codec.unpack(CancelCall, data).call
        if (self._detached.cancel(call) or self._cancel(call)) and reply_to:
            self._bus.publish_now(reply_to, Reply(value=msgspec.Raw(codec.pack(Ok()))))

    # --- routes -----------------------------------------------------------------------------------
    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = Request(scope, receive).query_params
        function, state, after = query.get("function") or None, query.get("state"), query.get("after", "")
        limit = query.get("limit", str(SOME_CALLS))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 19) or not 1 <= int(limit) <= MOST_CALLS:
            raise InvalidRequest(f"limit must be between 1 and {MOST_CALLS}", field="limit")
        if state is not None and state not in CallState.__members__:
            raise InvalidRequest(f"state must be one of {', '.join(CallState.__members__)}", field="state")
        # One more than is shown: whether there is more.
        asked = ListCalls(limit=int(limit) + 1, function=function or "", state=state or "", after=after)
        others = self._others()
        told, silent = await self._recent.everywhere(asked, others)
        running = {each.call: each for each in told}
        answered = {self._recent.gateway, *others} - set(silent)
        kept = {
            place_of(journaled.order.created, call): (journaled, running.pop(call, None))
            for call, journaled in (await self._journal.all()).items()
            if journaled.order is not None and function in (None, journaled.order.function)
        }
        opened = {place_of(each.created, each.call): each for each in running.values()}
        found: list[tuple[str, CallView]] = []
        for place in sorted((place for place in (*kept, *opened) if not after or place < after), reverse=True):
            each = views.open_call(opened[place]) if place in opened else _kept(*kept[place], state, answered)
            if each is not None:
                found.append((place, each))
            if len(found) > int(limit):  # there may be very many, and others' streams wait meanwhile
                break
        page = found[: int(limit)]
        view = CallListView(
            calls=tuple(each for _, each in page),
            next=page[-1][0] if len(found) > len(page) else "",
            silent=tuple(silent),
        )
        await answer(send, 200, [JSON], view.model_dump_json().encode())

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _call_of(scope)
        try:
            _, order = await self._journal.find(call)
        except CallNotFound:
            told = await self._recent.anywhere(call)
            if told is not None:
                if final(CALL, told.state):
                    raise
                await answer(send, 200, [JSON], views.open_call(told).model_dump_json().encode())
                return
            _, order = await self._found(call)
        await self._keeping.status(order, scope, send)

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = last_event_id(Request(scope, receive))
        _, order = await self._found(_call_of(scope))
        scope["sllm.call"] = order.call
        await self._keeping.events(order, scope, send, last=-1 if last is None else last)

    async def _found(self, call: str) -> tuple[str, CallOrder]:
        """As ``Journal.find``; a stream of a gateway that is no more may become a kept call in a moment."""
        try:
            return await self._journal.find(call, led=False)
        except CallNotFound:
            await self._coming(call)
        try:
            return await self._journal.find(call)
        except CallNotFound:
            await self._journal.require_nothing(call)
            raise

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _call_of(scope)
        state = CallState.CANCELLED
        if not await self._cancelled_somewhere(call):
            known = await self._recent.anywhere(call)
            if known is not None and final(CALL, known.state):  # kept or not
                await _cancelled(send, call, known.state)
                return
            stream, _ = await self._found(call)
            journaled = await self._journal.outline(call)
            state = journaled.state
            if journaled.ended is None:  # its gateway is away: whoever goes on with it reads this
                await self._journal.write(stream, call, CancelAsked(), known_s(0.0))
                state = await self._until_heard(stream, call)
        await _cancelled(send, call, state)

    async def _until_heard(self, stream: str, call: str) -> CallState:
        """Its gateway may live, was away from NATS for a moment, and reads nothing: it is told again, until it would
        have been declared dead. How it stands then."""
        state = CallState.QUEUED
        try:
            async with asyncio.timeout(HEARD_S):
                while not await self._cancelled_somewhere(call):
                    journaled = await self._journal.outline(call)
                    state = journaled.state
                    if journaled.ended is not None:
                        return state
        except TimeoutError:
            log.info("no gateway has it; it is cancelled when one goes on with it", extra={"call": call})
            return state
        return CallState.CANCELLED

    async def _cancelled_somewhere(self, call: str) -> bool:
        try:
            await self._bus.call(subjects.CANCEL_CALL, CancelCall(call=call), Ok, timeout_s=ASK_S)
        except (DeadlineExceeded, Unavailable):
            return False
        return True


def _call_of(scope: Scope) -> str:
    """The call's id in the path. Raises ``CallNotFound`` for what can be none."""
    call: str = scope["path_params"]["call"]
    if not subjects.is_token(call):
        raise CallNotFound(f"no call is named {quoted(call)}")
    return call


async def _cancelled(send: Send, call: str, state: CallState) -> None:
    await answer(send, 202, [JSON], CancelledView(id=call, state=state.value).model_dump_json().encode())


def _kept(journaled: Journaled, told: CallTold | None, state: str | None, answered: Collection[str]) -> CallView | None:
    """A call that is kept, if it is in ``state`` (None: any), which its gateway knows best. ``told``: of those that
    gateways ``answered`` when they were asked for calls in that state."""
    if state is not None and (
        views.state(journaled, told).value != state or (told is None and _elsewise(journaled, answered))
    ):
        return None
    return views.call(journaled, told)


def _elsewise(journaled: Journaled, answered: Collection[str]) -> bool:
    """Whether a gateway has it that has not named it."""
    return journaled.ended is None and journaled.order is not None and journaled.order.gateway in answered


class _Endpoint:
    """Makes starlette take a bound method for an ASGI application."""

    def __init__(self, run: Callable[[Scope, Receive, Send], object]) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)  # type: ignore[misc]

"""``/api/v1/explain/{what}``: why a function, or a call, runs or ran where it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Final

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sllm_gateway.controller import Controller
from sllm_gateway.decisions import events_of, recorded
from sllm_gateway.errors import quoted
from sllm_gateway.journal import Journal
from sllm_gateway.recent import Recent
from sllm_gateway.routes.api import shown
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.calls import PREFIX, CallTold
from sllm_runtime.protocol.errors import CallNotFound, FunctionNotFound, JournalExpired, NotFound, Unavailable
from sllm_runtime.protocol.events import Event, Kind
from sllm_runtime.protocol.http import API, ExplainView
from sllm_runtime.protocol.limits import CONTROLLER_WAIT_S, TOLD_AFTER_S
from sllm_runtime.protocol.manifest import NAME
from sllm_runtime.protocol.states import INSTANCE, CallState, InstanceState, final

_OVER: Final = frozenset(state.value for state in InstanceState if final(INSTANCE, state))
_OF_CALLS: Final = "call."
_ENDS: Final[dict[str, CallState]] = {Kind.CALL_FAILED: CallState.FAILED, Kind.CALL_CANCELLED: CallState.CANCELLED}


class Explaining:
    """One question to the controller, and what a gateway or its journal knows of the call."""

    def __init__(
        self,
        bus: Bus,
        controller: Controller,
        recent: Recent,
        journal: Journal,
        coming: Callable[[str], Awaitable[None]],
    ) -> None:
        """``coming`` waits while a call that nobody has may be one of a gateway that has died."""
        self._bus = bus
        self._controller = controller
        self._recent = recent
        self._journal = journal
        self._coming = coming

    def routes(self) -> list[BaseRoute]:
        return [Route(f"{API}/explain/{{what}}", self.explain, methods=["GET"])]

    async def explain(self, request: Request) -> Response:
        what: str = request.path_params["what"]
        if (known := self._recent.here(what)) is not None:
            return shown(await self._of_call(known))
        is_call = what.startswith(PREFIX)
        if is_call and (found := await self._of_one_elsewhere(what)) is not None:  # that no controller is needed for
            return shown(found)
        nothing = CallNotFound(
            f"{quoted(what)} is no function's name, and no call that any gateway has, or had of late, or that is kept"
        )
        if not NAME.match(what):
            raise nothing
        try:
            return shown(_view(await self._of_function(what)))
        except FunctionNotFound as error:
            raise (nothing if is_call else error) from None

    async def _of_one_elsewhere(self, call: str) -> ExplainView | None:
        """Of a call that this gateway does not know; None: nobody does. Raises ``JournalExpired``, ``Unavailable``."""
        known, expired = None, None
        try:
            known = await self._recent.anywhere(call) or await self._kept(call)
        except JournalExpired as error:
            expired = error
        if known is not None:
            return await self._of_call(known)
        if told := await events_of(self._bus, call):
            return await self._of_events(told)
        if expired is not None:
            raise expired
        await self._coming(call)  # its gateway may be slow, or have died just now
        known = await self._recent.anywhere(call) or await self._kept(call)
        return await self._of_call(known) if known is not None else None

    async def _kept(self, call: str) -> CallTold | None:
        """What its journal says of it, whose gateway may be no more. Raises ``JournalExpired``, ``Unavailable``."""
        if not subjects.is_token(call):
            return None
        try:
            found = await self._journal.outline(call)
        except CallNotFound:
            return None
        order, began, ended = found.order, found.began, found.ended
        assert order is not None
        return CallTold(
            call=call,
            function=order.function,
            version=order.version,
            state=found.state,
            instance=began.instance if began is not None else "",
            error=ended.error.message if ended is not None and ended.error is not None else "",
            created=order.created,
            gateway=order.gateway,
        )

    async def _of_events(self, told: Sequence[Event]) -> ExplainView:
        """A call whose gateway is no more, or has forgotten it: as far as it was told of."""
        own = [event for event in told if event.kind.startswith(_OF_CALLS)]  # the start it waited for may go on
        last, function = (own or told)[-1], told[-1].function
        assert function is not None
        instance = next((event.instance for event in reversed(own) if event.instance), None)
        started = next((event.instance for event in reversed(told) if event.instance), "")
        asked = ctl.Explain(function=function, version=last.version, instance=instance or started or "")
        state = _ENDS.get(last.kind)
        of_call = {
            "call": last.call,
            "state": state.value if state is not None else None,
            "instance": instance,
            "error": last.message if state is not None else "",
        }
        return _view(await self._of_start(asked)).model_copy(update=of_call)

    async def _of_call(self, known: CallTold) -> ExplainView:
        """The start that it waited for, else that of the instance which it found."""
        instance = known.started or known.instance
        asked = ctl.Explain(function=known.function, version=known.version, instance=instance)
        of_call = {
            "call": known.call,
            "state": known.state.value,
            "instance": known.instance or None,
            "timeline": known.timeline,
            "error": known.error,
            "waits": known.waits,
        }
        return _view(await self._of_start(asked)).model_copy(update=of_call)

    async def _of_function(self, name: str) -> ctl.Explained:
        """With its last starts, also those that the controller which leads now has not seen."""
        found = await self._asked(ctl.Explain(function=name))
        known = {start.instance: start for start in found.starts}
        for each in (await recorded(self._bus, name)).values():
            if each.version != found.version:
                continue
            for start in (start for start in each.starts if start.at >= found.since):
                now = known.get(start.instance)
                if now is None:
                    known[start.instance] = structs.replace(start, state=start.state if start.state in _OVER else "")
                elif now.seconds is None:  # of a controller before
                    known[start.instance] = structs.replace(start, state=now.state)
        starts = sorted(known.values(), key=lambda start: start.at or inf)
        return structs.replace(found, starts=tuple(starts))

    async def _of_start(self, asked: ctl.Explain) -> ctl.Explained:
        """One that the controller does not remember, or of none that answers, is recorded; so are the candidates of one
        of which it remembers no more than that it was. Of a function that is gone there may be nothing."""
        try:
            found = await self._asked(asked, wait_s=TOLD_AFTER_S)
            if not asked.instance or (found.past and found.candidates):
                return found
        except (Unavailable, NotFound) as error:
            told = (await recorded(self._bus, asked.function)).get(asked.instance)
            if told is None and not isinstance(error, NotFound):  # nobody else knows: one that leads is waited for
                return await self._asked(asked)
            return told or ctl.Explained(
                function=asked.function, version=asked.version or 0, policy="", decision=error.message, past=True
            )
        told = (await recorded(self._bus, asked.function)).get(asked.instance)
        if told is None or not found.past:
            return told or found
        return structs.replace(found, candidates=told.candidates, moves=found.moves or told.moves)

    async def _asked(self, asked: ctl.Explain, *, wait_s: float = CONTROLLER_WAIT_S) -> ctl.Explained:
        return await self._controller.ask("explain", asked, ctl.Explained, wait_s=wait_s)


def _view(found: ctl.Explained) -> ExplainView:
    return ExplainView.model_validate(msgspec.to_builtins(found))

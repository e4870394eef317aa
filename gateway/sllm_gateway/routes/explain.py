"""``/api/v1/explain/{what}``: why a function, or a call that is open here, runs where it does."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sllm_gateway import timing
from sllm_gateway.call import Call
from sllm_gateway.calls import Calls
from sllm_gateway.controller import Controller
from sllm_gateway.errors import quoted
from sllm_gateway.routes.api import shown
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import CallNotFound
from sllm_runtime.protocol.http import API, ExplainView
from sllm_runtime.protocol.manifest import NAME
from sllm_runtime.protocol.timeline import comment


class Explaining:
    """One question to the controller, and what this gateway knows of the call."""

    def __init__(self, controller: Controller, calls: Calls) -> None:
        self._controller = controller
        self._calls = calls

    def routes(self) -> list[BaseRoute]:
        return [Route(f"{API}/explain/{{what}}", self.explain, methods=["GET"])]

    async def explain(self, request: Request) -> Response:
        what: str = request.path_params["what"]
        call = self._calls.get(what)
        if call is None and not NAME.match(what):
            raise CallNotFound(f"{quoted(what)} is no function's name, and no call that is open at this gateway")
        wanted = ctl.Explain(function=what)
        if call is not None:
            wanted = ctl.Explain(function=call.version.function, version=call.version.number)
        found = await self._controller.ask("explain", wanted, ctl.Explained)
        view = ExplainView.model_validate(msgspec.to_builtins(found))
        return shown(view.model_copy(update=_of(call)) if call is not None else view)


def _of(call: Call) -> dict[str, object]:
    return {
        "call": call.id,
        "state": call.state.value,
        "instance": call.binding.instance if call.binding is not None else None,
        "timeline": comment(timing.spans(call)),
    }

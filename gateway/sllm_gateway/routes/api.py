"""``/api/v1`` for SDK and CLI: functions, models, nodes, status. Deployments and logs stand in modules of their own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from sllm_gateway import views
from sllm_gateway.arguments import path_text
from sllm_gateway.asgi import read_body
from sllm_gateway.controller import ANSWER_S, Controller
from sllm_gateway.errors import quoted
from sllm_gateway.lookup import ROUTE_WAIT_S
from sllm_gateway.openapi import document
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.table import RouteTable
from sllm_runtime.platform.requests import Unserved
from sllm_runtime.protocol import ctl, limits
from sllm_runtime.protocol.errors import (
    FunctionNotFound,
    InvalidManifest,
    InvalidRequest,
    MalformedJson,
    NoController,
    NodeNotFound,
    NotFound,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.http import (
    API,
    MODEL_DIGEST,
    NODE_WISHES,
    DeletedView,
    FunctionListView,
    MigrateRequest,
    ModelListView,
    NodeDetailListView,
    NodeForgottenView,
    NodeListView,
    RollbackRequest,
    StatusView,
    WarmupRequest,
)
from sllm_runtime.protocol.manifest import NAME
from sllm_runtime.protocol.node import Ok
from sllm_runtime.protocol.states import MIGRATION, final

B = TypeVar("B", bound=BaseModel)
DELETE_WAIT_S = 40.0
MIGRATE_WAIT_S = 20.0
POLLED_S = ANSWER_S + limits.LONG_POLL_S
"""For one long poll of those verbs."""
MAX_JSON = 2 * 2**20
_YES, _NO = ("1", "true", "yes"), ("", "0", "false", "no")


def shown(view: BaseModel, status: int = 200) -> Response:
    """A view as the response."""
    return Response(view.model_dump_json(exclude_none=False), status, media_type="application/json")


async def body_of(request: Request, type_: type[B], within_s: float) -> B:
    """The request's body as ``type_``. Raises ``MalformedJson``, or ``Invalid…`` with the path."""
    data = await read_body(request.scope, request.receive, MAX_JSON, within_s)
    try:
        return type_.model_validate_json(data or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise MalformedJson(f"the body is no JSON: {first['msg']}") from error
        field = path_text(first["loc"])
        wrong = InvalidManifest if first["loc"][:1] == ("manifest",) else InvalidRequest
        raise wrong(f"{field or 'body'}: {first['msg'][:500]}", field=field or None) from error


def name_of(request: Request) -> str:
    """The function's name in the path. Raises ``FunctionNotFound`` for what can be none."""
    name: str = request.path_params["name"]
    if not NAME.match(name):
        raise FunctionNotFound(f"no function is named {quoted(name)}")
    return name


def last_event_id(request: Request) -> int | None:
    """The number of the last event that came to who reads on; None: nothing came yet. Raises ``InvalidRequest``."""
    given = request.headers.get("last-event-id", "")
    if given and not (given.isascii() and given.isdigit() and len(given) < 19):
        raise InvalidRequest("Last-Event-ID is the number of an event", field="Last-Event-ID")
    return int(given) if given else None


def flag_of(request: Request, key: str) -> bool:
    """A yes or no in the query; not given: no. Raises ``InvalidRequest``: a guess would do what nobody asked for."""
    given = request.query_params.get(key, "").lower()
    if given not in _YES + _NO:
        raise InvalidRequest(f"{key} must be true or false, not {given[:40]!r}", field=key)
    return given in _YES


def digest_of(request: Request) -> str:
    """The model's digest in the path, or its first digits. Raises ``InvalidRequest``."""
    digest: str = request.path_params["digest"].lower()
    if not re.fullmatch(MODEL_DIGEST, digest):
        raise InvalidRequest(f"{quoted(digest)} is no digest: give at least 4 hex digits", field="digest")
    return digest


class Api:
    """The plain part: one question to the controller, one view."""

    def __init__(
        self, controller: Controller, table: RouteTable, settings: GatewaySettings, clock: Callable[[], float]
    ) -> None:
        self._controller = controller
        self._table = table
        self._settings = settings
        self._clock = clock

    def routes(self) -> list[BaseRoute]:
        return [
            Route(f"{API}/functions", self.functions, methods=["GET"]),
            Route(f"{API}/functions/{{name}}", self.function, methods=["GET"]),
            Route(f"{API}/functions/{{name}}", self.delete, methods=["DELETE"]),
            Route(f"{API}/functions/{{name}}/rollback", self.rollback, methods=["POST"]),
            Route(f"{API}/functions/{{name}}/warmup", self.warmup, methods=["POST"]),
            Route(f"{API}/models", self.models, methods=["GET"]),
            Route(f"{API}/models/{{digest}}", self.model, methods=["GET"]),
            Route(f"{API}/models/{{digest}}", self.delete_model, methods=["DELETE"]),
            Route(f"{API}/models/{{digest}}/validate", self.validate_model, methods=["POST"]),
            Route(f"{API}/placement", self.placement, methods=["GET", "POST"]),
            Route(f"{API}/instances/{{instance}}/migrate", self.migrate, methods=["POST"]),
            Route(f"{API}/nodes", self.nodes, methods=["GET"]),
            Route(f"{API}/nodes/{{node}}", self.node, methods=["GET"]),
            Route(f"{API}/nodes/{{node}}", self.forget_node, methods=["DELETE"]),
            Route(f"{API}/nodes/{{node}}/{{wish}}", self.cordon, methods=["POST"]),
            Route(f"{API}/status", self.status, methods=["GET"]),
            Route(f"{API}/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def functions(self, request: Request) -> Response:
        found = await self._controller.functions()
        return shown(FunctionListView(functions=tuple(views.function(info) for info in found)))

    async def function(self, request: Request) -> Response:
        return shown(views.function(await self._controller.function(name_of(request))))

    async def rollback(self, request: Request) -> Response:
        wanted = await body_of(request, RollbackRequest, self._settings.body_timeout)
        by = wanted.request or uuid4().hex
        verb = ctl.Rollback(function=name_of(request), version=wanted.version, request=by)
        done = "may have been done"
        try:
            info = await self._controller.ask("rollback", verb, ctl.FunctionInfo)
            done = "is done"
            if info.record.active is not None:
                await self._table.until_active(info.record.function, info.record.active, ROUTE_WAIT_S)
            found = await self._controller.function(info.record.function) if info.next else info
        except Unavailable as error:  # of the only controller that heard it: nothing of it is done
            unheard = done != "is done" and (
                not isinstance(error, NoController) or isinstance(error.__cause__, Unserved)
            )
            if not unheard and wanted.version is None and wanted.request is None:
                error.retryable, error.retry_after_s = False, None  # whoever sends the same again goes back twice
                error.message = f"the rollback {done}, and is not to be asked for again unnamed: {error.message}"
            raise
        return shown(views.function(found))

    async def delete(self, request: Request) -> Response:
        """200 when it is gone; 202 when running calls still hold it after ``DELETE_WAIT_S``: ask again, ``begun``."""
        name = name_of(request)
        force = flag_of(request, "force")
        until = self._clock() + DELETE_WAIT_S
        begun = flag_of(request, "begun")
        while True:
            try:
                ok = await self._controller.ask("delete", ctl.Delete(function=name, force=force, begun=begun), Ok)
            except FunctionNotFound:  # of a controller of before, to which ``begun`` says nothing
                if not begun:
                    raise
                ok = Ok(note="deleted")
            begun = True
            if not ok.note.startswith("draining"):
                return shown(DeletedView(function=name, deleted=True, note=ok.note))
            if self._clock() > until:
                return shown(DeletedView(function=name, deleted=False, note=ok.note), 202)
            await asyncio.sleep(0.05)

    async def warmup(self, request: Request) -> Response:
        """200 when so many instances are ready; 202 when they are not after a while: ask again."""
        wanted = await body_of(request, WarmupRequest, self._settings.body_timeout)
        verb = ctl.Warmup(function=name_of(request), version=wanted.version, instances=wanted.instances)
        found = await self._controller.ask("warmup", verb, ctl.Warmed, timeout_s=POLLED_S)
        return shown(views.warmed(found), 200 if found.ready >= found.wanted else 202)

    async def models(self, request: Request) -> Response:
        return shown(ModelListView(models=tuple(views.model(info) for info in await self._controller.models())))

    async def model(self, request: Request) -> Response:
        return await self._model(request, "describe")

    async def delete_model(self, request: Request) -> Response:
        return await self._model(request, "delete")

    async def validate_model(self, request: Request) -> Response:
        return await self._model(request, "validate")

    async def _model(self, request: Request, verb: Any) -> Response:
        ref = ctl.ModelRef(digest=digest_of(request), verb=verb)
        return shown(views.model(await self._controller.ask("model", ref, ctl.ModelInfo, timeout_s=90)))

    async def placement(self, request: Request) -> Response:
        """Where models should lie and do; POST: decided anew."""
        verb = ctl.Placement(redo=request.method == "POST")
        return shown(views.placement(await self._controller.ask("placement", verb, ctl.Placements)))

    async def migrate(self, request: Request) -> Response:
        """200 when it is over; 202 when it still goes on after ``MIGRATE_WAIT_S``."""
        wanted = await body_of(request, MigrateRequest, self._settings.body_timeout)
        verb = ctl.Migrate(instance=request.path_params["instance"], to=wanted.to)
        until = self._clock() + MIGRATE_WAIT_S
        while True:
            found = await self._controller.ask("migrate", verb, ctl.Migrated, timeout_s=POLLED_S)
            over = final(MIGRATION, found.state)
            if over or self._clock() > until:
                return shown(views.migration(found), 200 if over else 202)

    async def nodes(self, request: Request) -> Response:
        """All of them; ``detail``: each with what lies where on it."""
        if flag_of(request, "detail"):
            details = tuple(views.node_detail(info) for info in await self._controller.nodes())
            return shown(NodeDetailListView(nodes=details))
        return shown(NodeListView(nodes=tuple(views.node(info) for info in await self._controller.nodes())))

    async def node(self, request: Request) -> Response:
        """One node, with what lies where on it."""
        name: str = request.path_params["node"]
        found = next((info for info in await self._controller.nodes() if info.record.node == name), None)
        if found is None:
            raise NodeNotFound(f"no node is named {quoted(name)}; `sllm node list` shows all")
        return shown(views.node_detail(found))

    async def cordon(self, request: Request) -> Response:
        """``cordon``, ``uncordon`` or ``drain``: what is decided of a node from now on."""
        wish, name = request.path_params["wish"], request.path_params["node"]
        if wish not in NODE_WISHES:
            raise NotFound(f"a node is not {quoted(wish)}: POST cordon, uncordon or drain")
        verb = ctl.Cordon(node=name, cordoned=wish == "cordon", drain=wish == "drain")
        return shown(views.node(await self._controller.ask("cordon", verb, ctl.NodeInfo)))

    async def forget_node(self, request: Request) -> Response:
        """One that has gone."""
        name: str = request.path_params["node"]
        await self._controller.ask("forget", ctl.Forget(node=name), Ok)
        return shown(NodeForgottenView(node=name))

    async def status(self, request: Request) -> Response:
        """What is there, also when the controller is not."""
        nodes, there = 0, True
        try:
            nodes = len(await self._controller.nodes(timeout_s=2, wait_s=0))
        except SllmError:
            there = False
        view = StatusView(
            version=metadata.version("sllm"),
            gateway=self._settings.gateway,
            controller=there,
            nodes=nodes,
            functions=len(self._table),
        )
        return shown(view)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document())

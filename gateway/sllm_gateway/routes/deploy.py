"""Bundles, deployments, registration of models: what takes time, told as it goes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sllm_gateway import sse, views
from sllm_gateway.arguments import Arguments
from sllm_gateway.asgi import JSON, Receive, Scope, Send, answer, declared_length
from sllm_gateway.controller import Controller
from sllm_gateway.events import EventWriter, Source
from sllm_gateway.lookup import ROUTE_WAIT_S
from sllm_gateway.routes.api import body_of, digest_of, shown
from sllm_gateway.routes.calling import wants_events
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.table import RouteTable
from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.disk import require_room
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import (
    BodyTooLarge,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
)
from sllm_runtime.protocol.http import (
    API,
    BUNDLE_DIGEST,
    REQUEST_ID,
    BundleView,
    DeployRequest,
    DeployResult,
    ModelRegisterRequest,
    PullRequest,
    WithdrawnView,
)
from sllm_runtime.protocol.node import Progress


class Deploying:
    """The long operations."""

    def __init__(
        self, bus: Bus, controller: Controller, writer: EventWriter, settings: GatewaySettings, table: RouteTable
    ) -> None:
        self._bus = bus
        self._controller = controller
        self._writer = writer
        self._settings = settings
        self._table = table

    def routes(self) -> list[BaseRoute]:
        return [
            Route(f"{API}/bundles/{{digest}}", _Put(self), methods=["PUT", "HEAD"]),
            Route(f"{API}/functions", _Long(self, self.deploy), methods=["POST"]),
            Route(f"{API}/deployments/{{request}}", self.withdraw, methods=["DELETE"]),
            Route(f"{API}/models", _Long(self, self.register), methods=["POST"]),
            Route(f"{API}/models/{{digest}}/pull", _Long(self, self.pull), methods=["POST"]),
        ]

    # --- bundles ----------------------------------------------------------------------------------
    async def has_bundle(self, digest: str, send: Send) -> None:
        """Raises ``NotFound``."""
        if not await bundles.exists(self._bus, digest):
            raise NotFound(f"no bundle {digest} is stored")
        await answer(send, 200, [JSON], b"")

    async def put_bundle(self, digest: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams the body into the store; its digest is checked on the way, and nothing is left of another one."""
        require_room(self._settings.nats_store)
        limit = self._settings.max_bundle
        length = declared_length(scope)
        if length is not None and length > limit:
            raise BodyTooLarge(f"the bundle has {length} bytes, more than {limit}; leave files out by .sllmignore")
        nbytes = await bundles.store(self._bus, digest, _chunks(receive), limit, most=self._settings.bundle_bytes)
        await answer(send, 201, [JSON], BundleView(digest=digest, bytes=nbytes).model_dump_json().encode())

    # --- deployments and models -------------------------------------------------------------------
    async def deploy(self, request: Request) -> Source:
        """A version from a bundle that is stored."""
        require_room(self._settings.nats_store)
        wanted = await body_of(request, DeployRequest, self._settings.body_timeout)
        Arguments(wanted.manifest.handler.input_schema).require_bounded()  # told here, not to whoever calls it first
        verb = ctl.Deploy(
            request=wanted.request or uuid4().hex,
            manifest=wanted.manifest,
            bundle=wanted.bundle,
            bundle_bytes=wanted.bundle_bytes,
        )
        return self._deploying(verb)

    async def _deploying(self, verb: ctl.Deploy) -> Source:
        polls = self._controller.poll("deploy", verb, ctl.Deployed, lambda deployed: deployed.version is not None)
        async for news in polls:
            if isinstance(news, Progress):
                yield sse.event(views.progress(news).model_dump_json().encode(), name="progress")
            elif news.version is not None:
                await self._table.until_active(news.version.function, news.version.version, ROUTE_WAIT_S)
                info = await self._controller.function(news.version.function)
                result = DeployResult(
                    function=views.function(info),
                    version=news.version.version,
                    unchanged=news.unchanged,
                    notes=news.notes,
                )
                yield sse.event(result.model_dump_json().encode(), name="done")

    async def withdraw(self, request: Request) -> Response:
        """Undo a deployment that goes on. Raises ``InvalidRequest`` for what can name none."""
        name: str = request.path_params["request"]
        if not re.fullmatch(REQUEST_ID, name):
            raise InvalidRequest("a deployment is named by the 32 hex digits of its request", field="request")
        wanted = ctl.Withdraw(request=name)
        withdrawn = await self._controller.ask("withdraw", wanted, ctl.Withdrawn)
        return shown(WithdrawnView(undone=withdrawn.version is None, version=withdrawn.version))

    async def register(self, request: Request) -> Source:
        """A model without a function."""
        require_room(self._settings.nats_store)
        wanted = await body_of(request, ModelRegisterRequest, self._settings.body_timeout)
        return self._registering(ctl.RegisterModel(uri=wanted.uri))

    async def _registering(self, verb: ctl.RegisterModel) -> Source:
        polls = self._controller.poll("register", verb, ctl.Registered, lambda answer: answer.model is not None)
        async for news in polls:
            if isinstance(news, Progress):
                yield sse.event(views.progress(news).model_dump_json().encode(), name="progress")
            elif news.model is not None:
                yield sse.event(views.model(news.model).model_dump_json().encode(), name="done")

    async def pull(self, request: Request) -> Source:
        """A model to the disks of nodes."""
        wanted = await body_of(request, PullRequest, self._settings.body_timeout)
        return self._pulling(ctl.Pull(digest=digest_of(request), nodes=wanted.nodes))

    async def _pulling(self, verb: ctl.Pull) -> Source:
        polls = self._controller.poll("pull", verb, ctl.Pulled, lambda answer: answer.model is not None)
        async for news in polls:
            if isinstance(news, Progress):
                yield sse.event(views.progress(news).model_dump_json().encode(), name="progress")
            elif news.model is not None:
                there = views.model(news.model).model_copy(update={"nodes": news.nodes})
                yield sse.event(there.model_dump_json().encode(), name="done")

    async def write(self, source: Source, scope: Scope, send: Send) -> None:
        """As SSE, or (for who does not accept it) the result alone."""
        if wants_events(scope):
            await self._writer.write(source, scope, send)
            return
        async for piece in source:
            if piece.startswith(b"event: done\ndata: "):
                result = piece.removeprefix(b"event: done\ndata: ").strip()
                await answer(send, 200, [JSON], result)
                return
        raise InternalError("the operation ended without a result")


class _Put:
    def __init__(self, owner: Deploying) -> None:
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = re.fullmatch(BUNDLE_DIGEST, scope["path_params"]["digest"])
        if not found:
            raise InvalidRequest("a bundle is named by its sha-256: 64 hex digits", field="digest")
        digest = f"sha256:{found.group(1)}"
        if scope["method"] == "PUT":
            await self._owner.put_bundle(digest, scope, receive, send)
        else:
            await self._owner.has_bundle(digest, send)


class _Long:
    def __init__(self, owner: Deploying, begin: object) -> None:
        self._owner = owner
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source = await self._begin(Request(scope, receive))  # type: ignore[operator]
        await self._owner.write(source, scope, send)


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(bundles.STILL_S / 2):
                message = await receive()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the caller sent nothing of the bundle for {bundles.STILL_S / 2:g} s; send it again"
            ) from error
        if message["type"] == "http.disconnect":
            raise Cancelled("the caller went away while it sent the bundle")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return

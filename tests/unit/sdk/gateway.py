"""A real HTTP server on loopback that answers as docs/http.md says, by a script; it remembers what was asked."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sllm_runtime.protocol.errors import CallNotFound, SllmError
from sllm_runtime.protocol.http import DeployRequest, DeployResult, FunctionView, InstanceView, VersionView, error_view
from sllm_runtime.protocol.manifest import Handler, Manifest
from tests.fixtures.waiting import GIVE_UP_S

CALL = "call-1"
TOKEN = "secret"
_PAGE = (
    "<html>\r\n<head><title>{0} Word</title></head>\r\n<body>\r\n<center><h1>{0} Word</h1></center>\r\n<hr><center>"
    "nginx/1.22.1</center>\r\n</body>\r\n</html>\r\n"
)


def sse(data: Any, *, id: int | None = None, event: str | None = None) -> str:
    head = (f"id: {id}\n" if id is not None else "") + (f"event: {event}\n" if event else "")
    return f"{head}data: {json.dumps(data)}\n\n"


def progress(stage: str, done: int = 0, total: int = 0) -> str:
    return sse({"stage": stage, "done": done, "total": total}, event="progress")


TIMELINE = ": timeline queue=0.1@0.0 first_token=20.0@0.1\n"
DONE = "data: [DONE]\n\n"


def error(problem: SllmError) -> str:
    return sse(error_view(problem.body(), CALL), event="error")


@dataclass
class Answer:
    """What one request gets: pieces of a stream, an error, or JSON; then, perhaps, silence or a broken connection."""

    pieces: tuple[str, ...] = ()
    problem: SllmError | None = None
    json: Any = None
    breaks: bool = False
    hangs: bool = False
    """It sends heartbeats."""
    silent: bool = False
    """It sends nothing."""
    retry_after: str | None = None
    raw: bytes | None = None
    elsewhere: str | None = None
    """Where a redirect without a body sends, as proxies do."""
    front: int | None = None
    """The status of an answer that none of ours wrote: nginx did, in front of it."""


@dataclass
class Gateway:
    """The script and the memory. ``answers`` are used in turn, the last one for ever."""

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    asked: list[tuple[str, str, Any, dict[str, str]]] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    """Of ``asked``."""
    bundles: dict[str, bytes] = field(default_factory=dict)
    refused: list[SllmError] = field(default_factory=list)
    """What the next uploads get, one each, once their bytes are here."""
    looks: list[int] = field(default_factory=list)
    """Status of what those get who ask next whether a bundle is there."""
    deployed: list[Manifest] = field(default_factory=list)
    instances: list[InstanceView] = field(default_factory=list)
    """Of every function."""
    tokens: list[str | None] = field(default_factory=list)
    """What those have sent who asked for all functions."""
    notes: list[str] = field(default_factory=list)
    """Of every deployment."""
    requests: list[str | None] = field(default_factory=list)
    """The names of the deployments."""
    withdrawal: Answer = field(default_factory=Answer)
    """To who calls a deployment back."""
    reads: list[Answer] = field(default_factory=list)
    """What those get who read a call's stream on, in turn; after the last one no such call is known."""
    read_after: list[str | None] = field(default_factory=list)
    """Their ``Last-Event-ID``."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a caller of a hanging answer has gone."""
    reached: threading.Event = field(default_factory=threading.Event)

    def forget(self) -> None:
        """As it was at the beginning."""
        for memory in (
            self.answers,
            self.asked,
            self.queries,
            self.bundles,
            self.refused,
            self.looks,
            self.deployed,
            self.reads,
        ):
            memory.clear()
        for more in (self.instances, self.notes, self.requests, self.read_after, self.tokens):
            more.clear()
        self.left.clear()
        self.reached.clear()

    def will(self, *answers: Answer) -> None:
        """What the next requests get."""
        self.answers = list(answers)

    def view(self, name: str) -> FunctionView:
        schema = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
        handler = Handler(entry="function:f", kind="function", streams=False, input_schema=schema)
        version = VersionView(
            version=1, state="ACTIVE", active=True, bundle="sha256:" + "0" * 64, bundle_bytes=5, created=0.0
        )
        return FunctionView(
            name=name,
            active=1,
            url=f"/fn/{name}",
            streams=False,
            openai=False,
            manifest=Manifest(name=name, handler=handler),
            versions=(version,),
            instances=tuple(self.instances),
        )

    # --- routes -----------------------------------------------------------------------------------
    async def call(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append((request.method, request.url.path, json.loads(body or b"null"), dict(request.headers)))
        self.queries.append(dict(request.query_params))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await self._respond(answer, request)

    async def _respond(self, answer: Answer, request: Request) -> Response:
        if answer.silent:
            while (await request.receive())["type"] != "http.disconnect":
                continue
        if answer.raw is not None:
            return Response(answer.raw, 200)
        if answer.front is not None:
            return HTMLResponse(_PAGE.format(answer.front), answer.front)
        if answer.elsewhere is not None:
            return Response(status_code=308, headers={"Location": answer.elsewhere})
        own = {"Sllm-Call-Id": CALL} if request.url.path.startswith(("/fn/", "/v1/")) else {}
        if answer.problem is not None:
            headers = {**own, "Retry-After": answer.retry_after} if answer.retry_after else own
            return JSONResponse(error_view(answer.problem.body(), CALL), answer.problem.status, headers)
        if answer.pieces or answer.breaks or (answer.hangs and answer.json is None):
            return StreamingResponse(self._pieces(answer, request), headers=own, media_type="text/event-stream")
        return JSONResponse(answer.json, headers=own)

    async def _pieces(self, answer: Answer, request: Request) -> AsyncIterator[str]:
        for piece in answer.pieces:
            yield piece
        self.reached.set()
        if answer.breaks:
            raise ConnectionResetError("as the script says")
        try:
            while answer.hangs:
                yield ": heartbeat\n"
                await asyncio.sleep(0.02)
        finally:
            if answer.hangs:
                self.left.set()

    async def events(self, request: Request) -> Response:
        assert request.path_params["call"] == CALL
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        self.read_after.append(request.headers.get("last-event-id"))
        unknown = Answer(problem=CallNotFound(f"no call {CALL} is kept"))
        return await self._respond(self.reads.pop(0) if self.reads else unknown, request)

    async def functions(self, request: Request) -> Response:
        if request.method == "GET":
            self.tokens.append(request.headers.get("authorization"))
            return JSONResponse({"functions": [self.view("chat").model_dump(mode="json")]})
        wanted = DeployRequest.model_validate_json(await request.body())
        self.deployed.append(wanted.manifest)
        self.requests.append(wanted.request)
        if self.answers:
            return await self._respond(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0], request)
        result = DeployResult(function=self.view(wanted.manifest.name), version=1, notes=tuple(self.notes))
        pieces = (progress("sandbox"), ": heartbeat\n", sse(result.model_dump(mode="json"), event="done"), DONE)
        return await self._respond(Answer(pieces), request)

    async def withdraw(self, request: Request) -> Response:
        self.asked.append((request.method, request.url.path, None, dict(request.headers)))
        return await self._respond(self.withdrawal, request)

    async def bundle(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        if request.method == "HEAD":
            found = 200 if digest in self.bundles else 404
            return Response(status_code=self.looks.pop(0) if self.looks else found)
        data = await request.body()
        assert hashlib.sha256(data).hexdigest() == digest
        if self.refused:
            return await self._respond(Answer(problem=self.refused.pop(0)), request)
        self.bundles[digest] = data
        return JSONResponse({"digest": f"sha256:{digest}", "bytes": len(data)}, 201)

    async def function(self, request: Request) -> Response:
        self.asked.append((request.method, request.url.path, None, dict(request.headers)))
        return JSONResponse(self.view(request.path_params["name"]).model_dump(mode="json"))

    def app(self) -> Starlette:
        scripted = ("/fn/{name}", "/fn/{name}/{version}", "/api/v1/functions/{name}/logs", "/api/v1/status",
                    "/api/v1/functions/{name}/rollback")  # fmt: skip
        more = ("/api/v1/nodes", "/api/v1/models", "/api/v1/models/{digest}", "/api/v1/models/{digest}/validate",
                "/api/v1/nodes/{node}", "/api/v1/nodes/{node}/{wish}", "/api/v1/explain/{what}", "/api/v1/events",
                "/metrics", "/v1/calls", "/v1/calls/{call}", "/v1/calls/{call}/cancel", "/api/v1/secrets",
                "/api/v1/placement", "/api/v1/instances/{instance}/migrate",
                "/api/v1/secrets/{name}")  # fmt: skip
        return Starlette(
            routes=[
                Route("/v1/calls/{call}/events", self.events, methods=["GET"]),
                Route("/api/v1/functions", self.functions, methods=["GET", "POST"]),
                Route("/api/v1/deployments/{request}", self.withdraw, methods=["DELETE"]),
                Route("/api/v1/bundles/{digest}", self.bundle, methods=["HEAD", "PUT"]),
                Route("/api/v1/functions/{name}", self.function, methods=["GET"]),
                *(Route(path, self.call, methods=["GET", "POST", "PUT", "DELETE"]) for path in (*scripted, *more)),
            ]
        )


@contextmanager
def running() -> Iterator[Gateway]:
    """A gateway in a thread of its own."""
    gateway = Gateway()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gateway.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            gateway.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1, http="h11", loop="asyncio"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until = time.monotonic() + GIVE_UP_S
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.005)
        try:
            yield gateway
        finally:
            server.should_exit = True
            thread.join(GIVE_UP_S)
            assert not thread.is_alive()

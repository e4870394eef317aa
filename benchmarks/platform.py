"""Our platform as a benchmark uses it: the real ``sllm up``, deployed to over HTTP, seen from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import psutil

from benchmarks.modules import own_modules
from benchmarks.programs import ROOT, Program, ProgramFailed, title
from sllm import Client, bundle
from sllm.cli import load
from sllm.deployment import deploy_bundle
from sllm.function import ModelFunction
from sllm.sse import Parser
from sllm_runtime.platform.local import Layout
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.timeline import Span, parse_comment

READY_S: Final = 60.0
COLD_S: Final = 60.0
CALL_S: Final = 120.0
_ENDED: Final = ("STOPPED", "FAILED", "LOST")


@dataclass(frozen=True)
class Answer:
    """One streamed call as its caller saw it. Times in ms from before the request's first byte is sent."""

    first_ms: float
    """To the first event with an output."""
    total_ms: float
    values: tuple[Any, ...]
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        return "".join(str(value) for value in self.values)


class Platform:
    """A platform in a directory of its own. ``settings``: environment of its daemons (``SLLM_POOL_SIZE``)."""

    def __init__(
        self, directory: Path, settings: Mapping[str, str] | None = None, nodes: int = 1, gateways: int = 1
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.home = directory / "home"
        # Short: sockets lie below it, and their paths have 107 bytes.
        self._scratch = tempfile.TemporaryDirectory(prefix="sb-", ignore_cleanup_errors=True)
        self.settings = dict(settings or {})
        kept = {key: "" for key in os.environ if key.startswith("SLLM_")}
        env = {**kept, "SLLM_HOME": str(self.home), "TMPDIR": self._scratch.name, **self.settings}
        argv = [sys.executable, "-m", "sllm_runtime.platform", "up", "--json", "--with-parent", "--port", "0"]
        argv += ["--nodes", str(nodes)] if nodes > 1 else []
        argv += ["--gateways", str(gateways)] if gateways > 1 else []
        self.program = Program(argv, directory / "up.log", env=env, cwd=ROOT)
        try:
            said = self.program.hear(READY_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - self.program.began
        self.url, self.token, self.data = str(said["url"]), str(said["token"]), Path(said["data"])
        self.client = Client(self.url, self.token, timeout=CALL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.stop()

    def stop(self) -> None:
        """End it with everything it started. Repeatable."""
        self.program.stop()
        self._scratch.cleanup()

    # --- functions --------------------------------------------------------------------------------
    def deploy(self, file: Path, *, model: str = "", **changes: Any) -> str:
        """Deploy the one function of ``file`` with ``changes`` to its manifest (``name``, ``keep_alive``), and with
        another ``model`` than it names; its name."""
        with own_modules():
            function = load.one(str(file))
            if model:
                function = ModelFunction(function.target, {**function.options, "model": model})
            built = bundle.build(function)
        manifest = built.manifest.model_copy(update=changes)
        deploy_bundle(dataclasses.replace(built, manifest=manifest), self.client)
        return manifest.name

    def function(self, name: str) -> Any:
        """``FunctionView`` as JSON."""
        return self.client.request("GET", f"{API}/functions/{name}")

    def measured(self, node: str) -> set[str]:
        """The paths of ``node`` whose bandwidth it knows."""
        storage = self.client.request("GET", f"{API}/nodes/{node}")["storage"]
        return {path["path"] for path in storage["paths"] if path["bandwidth"]} if storage is not None else set()

    def until_cold(self, *names: str) -> None:
        """Wait until the functions hold no instance and the warm pool is as full as it gets."""
        wanted = int(self.settings.get("SLLM_POOL_SIZE", "2"))
        until = time.monotonic() + COLD_S
        while time.monotonic() < until:
            live = [name for name in names if self._live(name)]
            nodes = self.client.request("GET", f"{API}/nodes")["nodes"]
            if not live and nodes and all(node["pool_idle"] >= wanted for node in nodes):
                return
            time.sleep(0.05)
        raise ProgramFailed(f"{', '.join(names)}: still holds an instance, or the pool is not full, after {COLD_S} s")

    def _live(self, name: str) -> bool:
        return any(each["state"] not in _ENDED for each in self.function(name)["instances"])

    def stream(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """One call over a connection that is already open."""
        with contextlib.closing(self.connect()) as connection:
            return stream(connection, self.token, name, arguments)

    def connect(self) -> http.client.HTTPConnection:
        """An open connection to the gateway."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=CALL_S)
        connection.connect()
        return connection

    def pool_idle(self) -> int:
        """Warm sandboxes of all nodes, as the controller knows them."""
        return sum(int(node["pool_idle"]) for node in self.client.request("GET", f"{API}/nodes")["nodes"])

    def loader_socket(self) -> Path:
        """The control socket of the one node's loader."""
        return Layout(self.data).socket("n1")

    def process(self, name: str) -> psutil.Process:
        """The one process whose title begins so (``sllm-zygote``). Raises ``ProgramFailed``."""
        for process in self.program.tree():
            if title(process).startswith(name):
                return process
        raise ProgramFailed(f"no process called {name} runs")


def stream(connection: http.client.HTTPConnection, token: str, name: str, arguments: Mapping[str, Any]) -> Answer:
    """Call a function with SSE and read it to its end. Raises ``ProgramFailed`` for an error of any kind."""
    body = json.dumps(arguments).encode()
    headers = {
        "Authorization": f"Bearer {token}",
        "Accept": "text/event-stream",
        "Content-Type": "application/json",
    }
    began = time.perf_counter()
    connection.request("POST", f"/fn/{name}", body, headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ProgramFailed(f"{name}: HTTP {response.status}: {response.read()[:300]!r}")
    spans: tuple[Span, ...] = ()
    first, values, parser, done = 0.0, [], Parser(), False
    while data := response.read1(65536):
        now = time.perf_counter()
        for event in parser.feed(data):
            if event.comment is not None:
                spans = parse_comment(event.comment) if event.comment.startswith("timeline ") else spans
            elif event.event == "error":
                raise ProgramFailed(f"{name}: {event.data[:300]}")
            elif event.done:
                done = True
            elif event.event == "message":
                first = first or now
                values.append(json.loads(event.data))
    total = time.perf_counter() - began
    if not done or not values:
        raise ProgramFailed(f"{name}: the stream ended without its end")
    return Answer((first - began) * 1e3, total * 1e3, tuple(values), spans)

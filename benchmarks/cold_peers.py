"""The systems beside ours that bring a first token of the same model from nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.programs import PEER_ENVIRONMENT, PEERS, ROOT, Program, ProgramFailed
from sllm_runtime.platform.nats_server import free_port
from sllm_runtime.worker.imports import PRELOAD, SINGLE_THREADED

SCRIPTS: Final = ROOT / "benchmarks" / "peers"
READY_S: Final = 120.0
_CALL_S: Final = 120.0


@dataclass(frozen=True)
class First:
    """A first token: ms until it was there, all text, CPU seconds of the system until the text's end and its memory
    then."""

    first_ms: float
    text: str
    cpu_s: float
    mib: float


def plain(directory: Path, model: Path, prompt: str, count: int) -> First:
    """A script, from its process's start on. Our own environment: the same torch and transformers."""
    return script(directory, "plain.py", [str(model), prompt, str(count)])


def script(directory: Path, name: str, arguments: Sequence[str]) -> First:
    """One of the scripts that print ``{"piece"}`` lines, then another one, and wait. Raises ``ProgramFailed``."""
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with Program([sys.executable, str(SCRIPTS / name), *arguments], directory / f"{name}.log", env=env) as program:
        pieces = [program.hear(_CALL_S)["piece"]]
        first = (time.monotonic() - program.began) * 1e3
        while "piece" in (said := program.hear(_CALL_S)):
            pieces.append(said["piece"])
        used = program.usage()
        return First(first, "".join(pieces), used.cpu_s, used.pss_mib)


FOREIGN: Final = tuple(name for name in PRELOAD if not name.startswith("sllm"))
"""What a start with our engine needs of others' code."""


def bare_import(directory: Path) -> First:
    """From a python's start until it has imported ``FOREIGN``, as the fork server does: the collector rests. Its text
    is empty."""
    code = (
        f"import gc, importlib, os, sys\ngc.disable()\nos.environ.update({SINGLE_THREADED!r})\n"
        f"for name in {FOREIGN!r}: importlib.import_module(name)\nprint('{{}}', flush=True)\nsys.stdin.read()"
    )
    with Program([sys.executable, "-c", code], directory / "import.log") as program:
        program.hear(READY_S)
        first, used = (time.monotonic() - program.began) * 1e3, program.usage()
        return First(first, "", used.cpu_s, used.pss_mib)


class RayServe:
    """Serve with ``min_replicas=0`` on a Ray of its own."""

    def __init__(self, program: Program, port: int) -> None:
        self.program = program
        self.port = port

    def until_cold(self) -> None:
        """Until no replica runs. Raises ``ProgramFailed``."""
        self.program.say({})
        if self.program.hear(READY_S)["replicas"]:
            raise ProgramFailed("Ray Serve did not scale to zero")

    def first(self, prompt: str, count: int) -> First:
        """One call."""
        before = self.program.usage().cpu_s
        first_ms, text = post_text(self.port, "/stream", {"prompt": prompt, "count": count})
        used = self.program.usage()
        return First(first_ms, text, used.cpu_s - before, used.pss_mib)


@contextlib.contextmanager
def ray_serve(directory: Path, model: Path) -> Iterator[RayServe]:
    """Start it."""
    port, scratch = free_port(), directory / "ray"
    scratch.mkdir(exist_ok=True)
    argv = [str(PEERS / "python"), str(SCRIPTS / "ray_cold.py"), str(port), str(directory / "r"), str(model)]
    env = {**PEER_ENVIRONMENT, "HOME": str(scratch), "PYTHONPATH": str(SCRIPTS)}
    with Program(argv, directory / "ray.log", env=env, cwd=scratch, own_namespace=True) as program:
        program.hear(READY_S)
        yield RayServe(program, port)


def bentoml(directory: Path, model: Path, prompt: str, count: int) -> First:
    """Its server, from its process's start on: asked as soon as it listens, until it answers."""
    port, scratch = free_port(), directory / "bento"
    scratch.mkdir(exist_ok=True)
    argv = [str(PEERS / "python"), "-m", "bentoml", "serve", "bento_service:Coder", "--host", "127.0.0.1"]
    env = {**PEER_ENVIRONMENT, "HOME": str(scratch), "PYTHONPATH": str(SCRIPTS), "BENCH_MODEL": str(model)}
    log = directory / "bento.log"
    with Program([*argv, "--port", str(port)], log, env=env, cwd=SCRIPTS, own_namespace=True) as program:
        until = time.monotonic() + READY_S
        while True:
            try:
                began = time.monotonic()
                first_ms, text = post_text(port, "/generate", {"prompt": prompt, "count": count})
            except (OSError, ProgramFailed, http.client.HTTPException) as error:
                if program.ended or time.monotonic() > until:
                    raise ProgramFailed(f"BentoML does not answer: {error}; {log.read_text()[-500:]}") from error
                time.sleep(0.02)
            else:
                used = program.usage()
                return First((began - program.began) * 1e3 + first_ms, text, used.cpu_s, used.pss_mib)


def post_text(
    port: int, path: str, body: dict[str, object], more: Mapping[str, str] | None = None, timeout_s: float = _CALL_S
) -> tuple[float, str]:
    """Milliseconds to the first byte of a streamed text, and all of it. ``more``: further headers. Raises
    ``ProgramFailed`` for an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    connection.connect()
    try:
        began = time.perf_counter()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, text/plain, */*", **(more or {})}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        data = response.read1(65536)
        first = (time.perf_counter() - began) * 1e3
        data += response.read()
        if response.status != 200:
            raise ProgramFailed(f"HTTP {response.status}: {data[:300]!r}")
        return first, text_of(data, response.headers.get_content_type())
    finally:
        connection.close()


def text_of(data: bytes, content_type: str) -> str:
    """The text, also out of server-sent events; BentoML calls bare text that."""
    text = data.decode()
    if content_type != "text/event-stream" or not text.startswith("data:"):
        return text
    return "".join(line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))

"""The systems that stream the scripted tokens, each as an address to load and a process tree to account for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from benchmarks.generator import Load, Outcome
from benchmarks.platform import Platform
from benchmarks.programs import (
    PEER_ENVIRONMENT,
    PEERS,
    ROOT,
    Program,
    ProgramFailed,
    Usage,
    await_port,
    peers_missing,
)
from sllm_runtime.platform.nats_server import free_port

PACED: Final = ROOT / "benchmarks" / "functions" / "paced" / "function.py"
SYSTEMS: Final = ("sllm", "bare", "ray serve", "litellm")
READY_S: Final = 90.0
_MARGIN_S: Final = 30.0


@dataclass(frozen=True)
class System:
    """Where one system takes requests. ``chat``: in OpenAI's shape."""

    name: str
    program: Program
    port: int
    path: str
    headers: dict[str, str]
    chat: bool = False

    def load(
        self, streams: int, count: int, interval: float, *, spread_s: float = 0.0, deadline_s: float = 60.0
    ) -> Load:
        """``streams`` requests for ``count`` tokens each."""
        body = json.dumps({"count": count, "interval": interval})
        if self.chat:
            body = json.dumps({"model": "paced", "stream": True, "messages": [{"role": "user", "content": body}]})
        return Load(self.port, self.path, self.headers, body, streams, count, interval, spread_s, deadline_s)


@dataclass(frozen=True)
class Generator:
    """The load generator's process."""

    program: Program

    def run(self, system: System, load: Load) -> tuple[Outcome, Usage]:
        """What came of ``load``, and the CPU seconds that ``system`` used for it with its memory afterwards."""
        before = system.program.usage()
        self.program.say(dataclasses.asdict(load))
        outcome = Outcome(**self.program.hear(load.deadline_s + _MARGIN_S))
        after = system.program.usage()
        return outcome, Usage(after.cpu_s - before.cpu_s, after.pss_mib)


@contextlib.contextmanager
def generator(directory: Path) -> Iterator[Generator]:
    """Start the load generator."""
    with Program([sys.executable, "-m", "benchmarks.generator"], directory / "generator.log", cwd=ROOT) as program:
        yield Generator(program)


@contextlib.contextmanager
def systems(directory: Path) -> Iterator[tuple[list[System], dict[str, str]]]:
    """All systems, started together and ready; and why the others are not there, by name."""
    with contextlib.ExitStack() as stack:
        ready, missing = [], {}
        bare = _bare(stack, directory)
        peers = {}
        if reason := peers_missing():
            missing = dict.fromkeys(SYSTEMS[2:], reason)
        else:
            peers = {"ray serve": _ray(stack, directory), "litellm": _litellm(stack, directory, bare.port)}
        platform = stack.enter_context(Platform(directory / "sllm"))
        platform.deploy(PACED)
        ready.append(_ours(platform))
        bare.program.hear(READY_S)
        ready.append(bare)
        for name, peer in peers.items():
            try:
                await_port(peer.program, peer.port, READY_S)
                if name == "ray serve":
                    peer.program.hear(READY_S)
                ready.append(peer)
            except ProgramFailed as error:
                missing[name] = str(error)
        yield ready, missing


def _ours(platform: Platform) -> System:
    headers = {"Authorization": f"Bearer {platform.token}"}
    return System("sllm", platform.program, urlsplit(platform.url).port or 0, "/fn/paced", headers)


def _bare(stack: contextlib.ExitStack, directory: Path) -> System:
    port = free_port()
    argv = [sys.executable, "-m", "benchmarks.bare", "--port", str(port)]
    return System("bare", stack.enter_context(Program(argv, directory / "bare.log", cwd=ROOT)), port, "/stream", {})


def _peer(stack: contextlib.ExitStack, directory: Path, name: str, argv: list[str]) -> Program:
    scratch = directory / name
    scratch.mkdir()
    env = {**PEER_ENVIRONMENT, "HOME": str(scratch)}
    log = directory / f"{name}.log"
    return stack.enter_context(Program(argv, log, env=env, cwd=scratch, own_namespace=True))


def _ray(stack: contextlib.ExitStack, directory: Path) -> System:
    port = free_port()
    script = ROOT / "benchmarks" / "peers" / "ray_stream.py"
    argv = [str(PEERS / "python"), str(script), str(port), str(directory / "r")]
    return System("ray serve", _peer(stack, directory, "ray", argv), port, "/stream", {})


def _litellm(stack: contextlib.ExitStack, directory: Path, upstream: int) -> System:
    """LiteLLM makes no tokens: the bare endpoint is behind it, whose CPU is not counted as LiteLLM's."""
    port = free_port()
    model = {"model": "openai/paced", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = directory / "litellm.yaml"  # JSON is YAML
    settings = {"telemetry": False, "num_retries": 0, "request_timeout": 120}
    listed = [{"model_name": "paced", "litellm_params": model}]
    config.write_text(json.dumps({"model_list": listed, "litellm_settings": settings}))
    argv = [str(PEERS / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    headers = {"Authorization": f"Bearer {PEER_ENVIRONMENT['LITELLM_MASTER_KEY']}"}
    return System("litellm", _peer(stack, directory, "litellm", argv), port, "/v1/chat/completions", headers, chat=True)

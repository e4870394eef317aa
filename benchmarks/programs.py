"""Child processes of a benchmark: started, spoken to in lines of JSON, measured with everything below them, ended.

Each dies with the benchmark. Where the kernel permits it, a program gets a PID namespace of its own, so that what it
leaves behind (Ray's daemons start sessions of their own) ends with it; elsewhere its descendants are killed by name of
their ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from sllm_runtime.platform.process import die_with_parent

ROOT: Final = Path(__file__).resolve().parents[1]
PEERS: Final = ROOT / ".venv-peers" / "bin"
_NAMESPACE: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_STOP_S: Final = 8.0


class ProgramFailed(Exception):
    """A program ended, or did not say in time what it should have said. The text holds the end of its stderr."""


@dataclass(frozen=True)
class Usage:
    """CPU seconds that a process tree has used, and its memory now (proportional set size: shared pages once)."""

    cpu_s: float
    pss_mib: float


class Program:
    """``argv`` as a child. Use as a context manager. ``log`` takes its stderr (and stdout that is no JSON)."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        own_namespace: bool = False,
    ) -> None:
        self._isolated = own_namespace and may_isolate()
        words = (*_NAMESPACE, *argv) if self._isolated else tuple(argv)
        self.began = time.monotonic()
        self._log = log
        parent = os.getpid()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                process_group=0,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
            )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    @contextlib.contextmanager
    def starting_nothing(self) -> Iterator[None]:
        """It alone is stopped meanwhile; what it has started goes on."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def say(self, message: Mapping[str, Any]) -> None:
        """Write one line of JSON to its stdin. Raises ``ProgramFailed`` if nobody reads."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure(f"does not listen: {error}") from error

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next line of its stdout that is a JSON object; other lines are its log. Raises ``ProgramFailed``."""
        until = time.monotonic() + timeout_s
        while True:
            line = self._line(until)
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
            with self._log.open("ab") as log:
                log.write(line + b"\n")

    def _line(self, until: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._failure("did not answer in time")
                data = os.read(stdout.fileno(), 1 << 20)
                if not data:
                    raise self._failure("ended")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _failure(self, what: str) -> ProgramFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        end = self._log.read_text(errors="replace").splitlines()[-12:] if self._log.exists() else []
        status = self._process.poll()
        words = " ".join(str(word) for word in self._process.args)  # type: ignore[union-attr]
        return ProgramFailed(f"{words[:200]} {what} (exit status {status}):\n" + "\n".join(end))

    def usage(self) -> Usage:
        """Of it and everything below it that lives, and of what those have waited for."""
        return usage(self.tree())

    def tree(self) -> list[psutil.Process]:
        """It and its descendants."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.Error:
            return []

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Its whole tree gets no processor meanwhile: what it does while nobody asks is nobody else's delay."""
        stopped: dict[int, psutil.Process] = {}
        try:
            while new := [process for process in self.tree() if process.pid not in stopped]:
                for process in new:
                    stopped[process.pid] = process
                    with contextlib.suppress(psutil.Error):
                        process.suspend()
            yield
        finally:
            for process in reversed(stopped.values()):
                with contextlib.suppress(psutil.Error):
                    process.resume()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left of its tree; a namespace is killed as a whole. Repeatable."""
        tree = self.tree()
        if self._process.poll() is None and not self._isolated:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil checks that the id is still this process's
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(tree, timeout=_STOP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def usage(processes: Iterable[psutil.Process]) -> Usage:
    """Of those that live, and of what they have waited for."""
    cpu_s, pss = 0.0, 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            pss += _pss_kib(process.pid) / 1024
    return Usage(cpu_s, pss)


def own_usage() -> Usage:
    """Of this process, where what is measured runs in it."""
    return usage([psutil.Process()])


def _pss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


@cache
def may_isolate() -> bool:
    """Whether this user may make PID namespaces here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    try:
        return subprocess.run([*_NAMESPACE, "true"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_port(program: Program, port: int, timeout_s: float) -> None:
    """Until somebody listens on the port. Raises ``ProgramFailed``."""
    until = time.monotonic() + timeout_s
    while True:
        if program.ended:
            raise ProgramFailed(f"the program for port {port} ended; see its log")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > until:
            raise ProgramFailed(f"nobody listens on port {port} after {timeout_s:.0f} s")
        time.sleep(0.01)


def peers_missing() -> str:
    """Why no peer can run; empty if they can."""
    return "" if (PEERS / "python").exists() else "no .venv-peers; `make bench-peers` makes it"


PEER_ENVIRONMENT: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "disabled",
    "LITELLM_MASTER_KEY": "sk-benchmark-on-loopback",
    "BENTOML_DO_NOT_TRACK": "True",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
"""Peers stay on this machine and report to nobody."""

"""Child processes of a benchmark: started, spoken to in lines of JSON, measured with everything below them, ended.

Each dies with the benchmark. Where the kernel permits it, a program gets a PID namespace of its own, so that what it
leaves behind (Ray's daemons start sessions of their own) ends with it; elsewhere its descendants are killed by name of
their ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
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
    """``argv`` as a child. Use as a context manager. ``log`` takes its stderr (and stdout that is no JSON).

    Its stdout is read whether somebody hears it or not: a program that nobody hears would stand still as soon as its
    pipe is full, after some hundred lines of a server's access log.
    """

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
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"stdout of {self.pid}", daemon=True)
        self._reader.start()

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
        try:
            said = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure("did not answer in time") from None
        if said is None:
            self._heard.put(None)  # it stays ended
            raise self._failure("ended")
        return said

    def _read(self) -> None:
        """To the end of its stdout, which is that of the last process that has it."""
        assert self._process.stdout is not None
        with self._log.open("ab", buffering=0) as log:
            for line in self._process.stdout:
                found = _object(line)
                if found is None:
                    log.write(line)
                else:
                    self._heard.put(found)
        self._heard.put(None)

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
        return tree(self.pid)

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
        below = self.tree()
        if self._process.poll() is None and not self._isolated:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil checks that the id is still this process's
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(below, timeout=_STOP_S)
        self._reader.join(_STOP_S)
        ended = () if self._reader.is_alive() else (self._process.stdout,)  # else somebody lives who has it
        for pipe in (self._process.stdin, *ended):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return None


def run_to_end(
    argv: Sequence[str], timeout_s: float, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], float]:
    """A command that ends by itself, and its CPU seconds with those it waited for. Of its memory the kernel tells
    nothing: the peak is at least ours, of which it was a fork. Raises ``subprocess.TimeoutExpired``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    more = {**os.environ, **(env or {})}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s, env=more, cwd=cwd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def title(process: psutil.Process) -> str:
    """Its name in ``ps``; empty if it has ended."""
    try:
        return " ".join(process.cmdline()).strip() or process.name()
    except psutil.Error:
        return ""


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

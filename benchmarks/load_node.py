"""A loaderd of a benchmark's own, driven over its control socket, and what it has used."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from benchmarks.programs import ROOT, Program, ProgramFailed
from sllm_loaderd.client import LoaderControl
from sllm_runtime.protocol.loader import Status

READY_S: Final = 30.0
_PAGES_S: Final = 120.0
"""Its memory is made ready by a thread behind all others."""
T = TypeVar("T")


class Node:
    """loaderd on ``directory``. Use as a context manager, entered when the memory that it is to have ready
    (``prefault_bytes``) has its pages. ``flags`` are its command line's, without dashes."""

    def __init__(self, directory: Path, *, env: Mapping[str, str] | None = None, **flags: object) -> None:
        self._ahead = int(str(flags.get("prefault_bytes", 0)))
        directory.mkdir(parents=True, exist_ok=True)
        self.data, self.socket = directory / "data", directory / "s"
        words = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
        argv = [sys.executable, "-m", "sllm_loaderd", "--node", "bench", "--data", str(self.data)]
        self.program = Program(
            [*argv, "--socket", str(self.socket), *words], directory / "loaderd.log", env=env, cwd=ROOT
        )

    def __enter__(self) -> Self:
        try:
            self._until(self.socket.exists, READY_S, "its socket")
            self.until_prefaulted(min(self._ahead, self.status().pool.limit))
        except BaseException:
            self.program.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.program.stop()

    def ask(self, work: Callable[[LoaderControl], Awaitable[T]]) -> T:
        """What ``work`` gets from the control socket. Raises the daemon's typed error."""

        async def connected() -> T:
            async with LoaderControl(self.socket) as control:
                return await work(control)

        return asyncio.run(connected())

    def register(self, uri: str, convert: str = "") -> str:
        """The digest of the model at ``uri``, which is in the store then."""
        return self.ask(lambda control: control.register(uri, convert=convert)).model

    def partition(self, model: str) -> Path:
        """The converted model's file in the store. Raises ``ProgramFailed``."""
        directory = self.data / "models" / model.rpartition(":")[2]
        found = list(directory.rglob("partition_0.bin"))
        if len(found) != 1:
            raise ProgramFailed(f"{len(found)} partitions of {model} lie below {self.data}")
        return found[0]

    def forget(self, model: str) -> None:
        """Nothing of the model in memory, nothing that waits for a dead process, free chunks with their pages."""
        self.ask(lambda control: control.evict(model))
        self._until(lambda: self._quiet(model), READY_S, f"the end of {model} in memory")

    def _quiet(self, model: str) -> bool:
        status = self.status()
        left = [each for each in status.resident if each.model == model and each.nbytes]
        return not left and not status.pool.retiring and not status.pool.held

    def until_free(self) -> None:
        """Until no chunk is held by a process that has ended."""
        self._until(lambda: not self.status().pool.held, READY_S, "its holders' end")

    def until_prefaulted(self, nbytes: int) -> None:
        """Until free chunks of ``nbytes`` have their pages."""
        self._until(lambda: self.status().pool.prefaulted >= nbytes, _PAGES_S, f"{nbytes} bytes with their pages")

    def status(self) -> Status:
        """What it reports."""
        return self.ask(lambda control: control.status())

    def cpu_s(self) -> float:
        """CPU seconds of the daemon so far, to the nanosecond (its process's CPU clock)."""
        return time.clock_gettime(cpu_clock(self.program.pid))

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        while not condition():
            if self.program.ended:
                raise ProgramFailed(f"loaderd ended; see {self.data.parent / 'loaderd.log'}")
            if time.monotonic() > until:
                raise ProgramFailed(f"loaderd: {what} did not come in {limit_s:.0f} s")
            time.sleep(0.005)


def cpu_clock(pid: int) -> int:
    """The clock id of a process's CPU time (clock_getcpuclockid(3))."""
    return (~pid << 3) | 2


def usable_cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))

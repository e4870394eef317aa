"""What an instance runs in, and who makes it. A process is the first driver; a container has the same face."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from sllm_runtime.platform.wire import AsyncWire


@dataclass(frozen=True)
class Exit:
    """How a sandbox ended. ``code`` None: not known (its fork server ended first, or not even SIGKILL ended it)."""

    code: int | None
    signal: int = 0
    asked: bool = False
    """Whether we killed it."""
    out_of_memory: bool | None = None
    """Whether the kernel killed it for memory; None: this sandbox cannot know."""
    peak: int = 0
    """Bytes of memory at its most, beside what each warm worker has; 0: not known."""
    orphaned: bool = False
    """Whether its fork server had ended, and has most likely taken it along."""

    def __str__(self) -> str:
        if self.signal:
            try:
                name = signal.Signals(self.signal).name
            except ValueError:
                name = "unknown"
            return f"signal {self.signal} ({name})"
        if self.orphaned:
            return "the node's fork server ended, and its worker with it"
        return "an unknown cause" if self.code is None else f"exit code {self.code}"


@dataclass(frozen=True)
class Wish:
    """What an instance asks of its sandbox. A driver whose sandboxes lack it makes one for that instance alone."""

    network: bool = False
    gpus: tuple[int, ...] = ()
    cluster: str = ""
    """Name of the sandbox whose network this one shares, that of an instance's number 0: ``network = cluster``."""
    image: str = ""
    """Name on this node; "": the driver's own."""


PLAIN: Final = Wish()


class Sandbox(Protocol):
    """One worker, warm or at work. Used once. Its owner calls ``close`` on every path."""

    @property
    def name(self) -> str:
        """Unique on this node, over all its lives."""

    @property
    def pid(self) -> int:
        """Process id on this machine; 0 when it is dead."""

    @property
    def python(self) -> str:
        """Version its worker runs, as ``3.11.7``."""

    @property
    def home(self) -> str:
        """Directory that its instance is to use, as its worker sees it; "": one on this machine."""

    @property
    def wire(self) -> AsyncWire:
        """The socket to its worker, after the worker's ``Hello``."""

    @property
    def stdout(self) -> int:
        """Non-blocking read end of the pipe; the sandbox owns it."""

    @property
    def stderr(self) -> int:
        """Non-blocking read end of the pipe; the sandbox owns it."""

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Done as soon as the worker is dead, or given up: within seconds of ``kill`` in any case."""

    async def confine(self, memory: int, cpu: float) -> None:
        """Set the limits of the instance that it becomes: bytes of private memory, cores. Raises ``Unavailable``."""

    def started(self) -> None:
        """Its instance is ready: later sandboxes may learn from what its start did."""

    def short_of_memory(self) -> bool:
        """Whether it has used up the memory that it may have, so that it may be silent for that."""

    def kill(self) -> None:
        """Kill the worker and its process group now. Repeatable."""

    async def close(self) -> Exit:
        """Kill what is left, wait for ``exited``, free everything. Repeatable."""


class SandboxDriver(Protocol):
    """Makes sandboxes of one sort."""

    @property
    def python(self) -> str:
        """Version of its workers' Python; empty before it is known."""

    @property
    def problem(self) -> str:
        """Why it can make no sandbox now, nor soon; empty: nothing is known."""

    async def start(self) -> None:
        """Begin; raises ``Unavailable`` if this machine cannot run this driver."""

    def serves(self, wish: Wish) -> bool:
        """Whether any warm sandbox will do."""

    async def ready(self, wish: Wish = PLAIN) -> None:
        """Wait until one could be begun: its fork server runs, its image is there. Raises ``Unavailable``."""

    async def create(self, name: str, wish: Wish = PLAIN) -> Sandbox:
        """A warm sandbox: its worker said ``Hello``. Raises ``Unavailable`` when none can be made now."""

    def on_complete(self, call: Callable[[], None]) -> None:
        """Call ``call`` when starts in sandboxes that are made from then on are quicker than in those of before."""

    async def close(self) -> None:
        """End everything this driver made."""

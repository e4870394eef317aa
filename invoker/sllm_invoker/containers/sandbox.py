"""One container as a sandbox: seen by its first process's pidfd, heard over two sockets, removed on every path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sllm_invoker.containers import shortage
from sllm_invoker.containers.control_group import Group
from sllm_invoker.containers.engine import Engine, EngineFailed
from sllm_invoker.containers.monitor import Monitor, reap
from sllm_invoker.containers.rendezvous import Rendezvous
from sllm_invoker.sandbox import Exit
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.process import KILLED_S
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.worker import CONTAINER_HOME, Exited, FromZygote, Hello

log = logging.getLogger(__name__)

ASKED_S: Final = 3.0
"""Process 1 does what it is told within milliseconds, on a loaded machine within a second."""
REPORT_S: Final = 5.0
"""What a dead process 1 has said is there to be read; only a stranger who holds its socket could keep us waiting."""
WAIT_S: Final = 10.0
"""The engine says the exit code of a container whose first process could not."""
LEAST_CPU: Final = 1.0
"""A quota is a right and a bound: a function that asked for a tenth of a core would take a minute to start."""
_OF_SIGNAL: Final = 128


@dataclass(frozen=True)
class Parts:
    """What a container that runs consists of; its sandbox owns all of it."""

    rendezvous: Rendezvous
    first: AsyncWire
    """To its process 1."""
    wire: AsyncWire
    """To its worker."""
    stdout: int
    stderr: int
    pidfd: int
    pid: int
    monitor: Monitor
    group: Group | None = None
    """None: the engine sets its limits."""


def end_of(report: Exited, asked: bool) -> Exit:
    """How the worker ended, as process 1 of its container says."""
    return Exit(report.code, report.signal, asked, report.out_of_memory)


def end_by_code(code: int | None, asked: bool) -> Exit:
    """The same of a container whose process 1 could not say: from its exit code (``None``: unknown)."""
    if asked:
        return Exit(code=0, signal=signal.SIGKILL, asked=True)
    if code is not None and code > _OF_SIGNAL:
        return Exit(0, code - _OF_SIGNAL)
    return Exit(code)


class ContainerSandbox:
    """Used once. ``close`` on every path."""

    def __init__(
        self, name: str, engine: Engine, parts: Parts, base: int, tasks: Tasks, closed: Callable[[str, bool], None]
    ) -> None:
        """``base``: bytes that it needs before it runs anything of a function. ``tasks``: their owner lives longer.
        ``closed`` is told its name at its end, and whether the engine has removed it."""
        self._name = name
        self._base = base
        self._engine = engine
        self._parts = parts
        self._tasks = tasks
        self._closed = closed
        self._pid = parts.pid
        self._asked = False
        self._alone = False
        """It outlived its monitor, or has none."""
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._dead: asyncio.Future[None] = self._loop.create_future()
        self._exited: asyncio.Future[Exit] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self.hello = Hello(pid=0, python="")
        self._loop.add_reader(parts.pidfd, self._on_death)
        self._watching = tasks.start(self._watch(), f"watch {name}")

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        """Of its process 1, as seen from here."""
        return self._pid

    @property
    def python(self) -> str:
        return self.hello.python

    @property
    def home(self) -> str:
        return CONTAINER_HOME

    @property
    def wire(self) -> AsyncWire:
        return self._parts.wire

    @property
    def stdout(self) -> int:
        return self._parts.stdout

    @property
    def stderr(self) -> int:
        return self._parts.stderr

    @property
    def exited(self) -> asyncio.Future[Exit]:
        return self._exited

    async def confine(self, memory: int, cpu: float) -> None:
        """Give it the limits of the function that it becomes. Raises ``Unavailable``."""
        limits = (self._base + memory, max(cpu, LEAST_CPU))
        group = self._parts.group
        try:
            if group is not None:
                group.limit(*limits)
        except OSError as error:
            log.info("limits of sandbox %s are set by %s: %s", self._name, self._engine.kind, error)
            group = None
        if group is None:
            await self._engine.limit(self._name, *limits)
        elif group.systemd:  # it writes its own idea of them again whenever it is reloaded, and the engine tells it
            self._tasks.start(self._repeat(*limits), f"limit {self._name}")

    def started(self) -> None:
        """Containers share no memory with a fork server."""

    def short_of_memory(self) -> bool:
        """As its control group says, where that can be read."""
        memory = shortage.read(self._parts.group.memory) if self._parts.group is not None else None
        return memory is not None and shortage.exhausted(memory)

    async def _repeat(self, memory: int, cpu: float) -> None:
        """The limits that hold, by way of the engine."""
        try:
            await self._engine.limit(self._name, memory, cpu)
        except EngineFailed as error:
            if not self._dead.done():
                log.warning("the limits of sandbox %s may not last: %s", self._name, error.message)

    # --- its end --------------------------------------------------------------------------------------
    def _on_death(self) -> None:
        """Its process 1 has ended, and with it everything else in it."""
        self._loop.remove_reader(self._parts.pidfd)
        self._alone = self._parts.monitor.gone
        reap(self._parts.pidfd)
        self._pid = 0
        if not self._dead.done():
            self._dead.set_result(None)

    async def _watch(self) -> None:
        """Until it is known how it ended; whatever goes wrong here, that it did is said."""
        reading = self._tasks.start(self._report(), f"hear {self._name}")
        try:
            await self._dead
            done, _ = await asyncio.wait({reading}, timeout=REPORT_S)
            self._settle(await self._end(reading.result() if done else None))
        finally:
            reading.cancel()
            self._settle(Exit(None, asked=self._asked))

    async def _end(self, report: Exited | None) -> Exit:
        if report is not None:
            return end_of(report, self._asked)
        return end_by_code(None if self._asked else await self._code(), self._asked)

    async def _report(self) -> Exited | None:
        """What process 1 says before it ends, if it can."""
        try:
            payload = await self._parts.first.receive()
            body = codec.unpack(FromZygote, payload).body if payload is not None else None
        except (SllmError, OSError) as error:
            log.warning("sandbox %s: %s", self._name, error)
            return None
        return body if isinstance(body, Exited) else None

    async def _code(self) -> int | None:
        try:
            return await self._engine.wait(self._name, WAIT_S)
        except SllmError as error:
            log.warning("how sandbox %s ended is not known: %s", self._name, error.message)
            return None

    def _settle(self, end: Exit) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._exited.done():
            self._exited.set_result(end)

    def _hangs(self) -> None:
        log.error("sandbox %s (pid %d) has not ended %g s after SIGKILL: given up", self._name, self._pid, KILLED_S)
        self._settle(Exit(None, asked=True))

    def kill(self) -> None:
        """Tell process 1 to end everything: if its worker had ended before, it can still say how. Repeatable."""
        if self._pid == 0 or self._asked:
            return
        self._asked = True
        self._timer = self._loop.call_later(ASKED_S, self._kill)
        with contextlib.suppress(OSError):
            self._parts.first.sock.shutdown(socket.SHUT_WR)

    def _kill(self) -> None:
        """It has not done so: SIGKILL to process 1, and the kernel ends the rest."""
        self._timer = self._loop.call_later(KILLED_S, self._hangs)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._parts.pidfd, signal.SIGKILL)

    async def close(self) -> Exit:
        """Kill it, wait for its end, have the engine remove it, free the descriptors. Repeatable."""
        self.kill()
        end = await asyncio.shield(self._exited)
        if self._closing is None:
            self._closing = self._tasks.start(self._close(), f"close {self._name}")
        await asyncio.shield(self._closing)
        return end

    async def _close(self) -> None:
        parts = self._parts
        self._loop.remove_reader(parts.pidfd)
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        for wire in (parts.wire, parts.first):
            wire.close()
        for fd in (parts.stdout, parts.stderr, parts.pidfd):
            os.close(fd)
        removed = await self._remove()
        if not await parts.monitor.ended(KILLED_S):
            log.warning("the monitor of sandbox %s has not ended", self._name)
        parts.rendezvous.close()
        self._closed(self._name, removed)

    async def _remove(self) -> bool:
        if self._alone:
            await self._engine.abandon(self._name)
        try:
            await self._engine.remove(self._name)
        except EngineFailed as error:
            log.error("sandbox %s is dead but not removed: %s", self._name, error.message)
            return False
        return True

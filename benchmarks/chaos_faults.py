"""Faults of ``benchmarks.chaos`` as they befall a running platform, and what is left of one when all is over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.chaos_schedule import Fault
from benchmarks.nats_cluster import NatsCluster
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed, title
from sllm_loaderd.chunk import MEMFD_NAME
from sllm_loaderd.client.control import LoaderControl
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.local import Layout
from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.running import Running, read_running
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import Status
from sllm_runtime.protocol.records import Term
from sllm_runtime.protocol.subjects import TERM_KEY

WAIT_S: Final = 120.0
POLL_S: Final = 0.02
DAEMONS: Final = ("gateway", "controller", "invoker", "loaderd")
_STILL_S: Final = 0.5
_OWN: Final = re.compile(r"\b[0-9a-f]{6,}\b|\d+")
"""What titles of the same process differ in from life to life: instances, descriptors, ports."""


@dataclass(frozen=True)
class Victim:
    """A process and the name of what it is: ``gateway-g1``, or a worker's instance. ``gateway``: its URL, if one."""

    name: str
    pid: int
    gateway: str = ""


class Field:
    """The platform that faults befall. ``function``: whose workers; ``nats``: the servers, if they are not its own."""

    def __init__(self, platform: Platform, function: str, nats: NatsCluster | None = None) -> None:
        self._platform, self._function, self._nats = platform, function, nats

    def victim(self, fault: Fault) -> Victim:
        """Whom it befalls: one that has something to do, once there is one. Raises ``ProgramFailed``."""
        found: list[Victim] = []

        def there() -> bool:
            found[:] = self.victims(fault.kind.component)
            return bool(found)

        until(there, f"no {fault.kind.component} to befall")
        return fault.of(sorted(found, key=lambda victim: victim.name))

    def victims(self, component: str) -> list[Victim]:
        """Those there are now; of nodes' daemons only where an instance takes calls."""
        if component == "worker":
            return [Victim(instance, pid) for instance in self.ready() for pid in self._pids(f"sllm-worker {instance}")]
        if component == "nats" and self._nats is not None:
            return [Victim(f"nats-{name}", pid) for name, pid in self._nats.pids().items()]
        running = running_of(self._platform)
        nodes = set(self.ready().values()) if component in ("invoker", "loaderd") else None
        urls = dict(zip((f"gateway-g{number}" for number in range(1, 10)), running.urls, strict=False))
        return [
            Victim(name, pid, urls.get(name, ""))
            for name, pid in running.pids.items()
            if name.partition("-")[0] == component
            and start_time(pid) is not None
            and (nodes is None or name.partition("-")[2] in nodes)
        ]

    def leads(self, victim: Victim) -> bool | None:
        """Whether it is the controller that leads, or the NATS server that leads the stream of the state; None: neither
        of these kinds, or nobody can say now."""
        with contextlib.suppress(SllmError, ProgramFailed):
            if victim.name.startswith("controller"):
                return leader_of(self._platform) == victim.name
            if victim.name.startswith("nats-") and self._nats is not None:
                return f"nats-{self._nats.leader()}" == victim.name
        return None

    def ready(self) -> dict[str, str]:
        """Instances that take calls, and their nodes; nothing while nobody can say."""
        try:
            view: dict[str, Any] = self._platform.function(self._function)
        except (SllmError, OSError):
            return {}
        return {each["instance"]: each["node"] for each in view["instances"] if each["state"] == "READY"}

    def _pids(self, name: str) -> list[int]:
        return [process.pid for process in self._platform.program.tree() if title(process).startswith(name)]

    def processes(self) -> Counter[str]:
        """What runs, by title without what is the process's own."""
        return Counter(_OWN.sub("…", title(process)) for process in self._platform.program.tree())

    def mend(self) -> None:
        """Start again what nobody else does."""
        if self._nats is not None:
            self._nats.start_missing()

    def until_ready(self, instances: int) -> None:
        """Until so many instances take calls. Raises ``ProgramFailed``."""
        until(lambda: len(self.ready()) == instances, f"not {instances} instances take calls")

    def until_back(self, before: Counter[str]) -> None:
        """Until all of ``before`` is there again. Raises ``ProgramFailed``."""
        until(lambda: not before - self.processes() and bool(self.ready()), "not all processes are back")

    def beyond(self, before: Counter[str]) -> Counter[str]:
        """Processes that are there beyond ``before``, after the time that whatever ends has for it."""
        left: list[Counter[str]] = []

        def none() -> bool:
            left[:] = [self.processes() - before]
            return not left[0]

        with contextlib.suppress(ProgramFailed):
            until(none, "processes stay")
        return left[0]


def running_of(platform: Platform) -> Running:
    """What it says of itself. Raises ``ProgramFailed``."""
    running = read_running(platform.data)
    if running is None:
        raise ProgramFailed("the platform has ended")
    return running


def leader_of(platform: Platform) -> str:
    """The controller that leads, by the store. Raises ``ProgramFailed``, or ``SllmError`` of a store that is away."""
    return asyncio.run(_leader(platform))


async def _leader(platform: Platform) -> str:
    identity = str(Layout(platform.data).identity_file("g1"))
    settings = Settings.load({"SLLM_NATS_URL": running_of(platform).nats_url, "SLLM_IDENTITY_FILE": identity})
    bus = await Bus.connect(settings, "g1", name="benchmark")
    try:
        term = await (await StateStore.open(bus, create=False)).get(TERM_KEY, Term)
    finally:
        await bus.close()
    if term is None:
        raise ProgramFailed("no controller was ever elected")
    return term.controller


def gateways_of(platform: Platform) -> tuple[str, ...]:
    """The URLs of all its gateways."""
    return running_of(platform).urls


def strike(victim: Victim, fault: Fault) -> bool:
    """Kill it, or stop it and let it go on. Whether it was there: one that is gone meanwhile is left alone."""
    struck = False
    with contextlib.suppress(ProcessLookupError), _handle(victim.pid) as handle:
        if not fault.stopped_s:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            _until_ended(handle)  # else who looks at once sees it live, and mends nothing
            return True
        try:
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
            struck = True
            time.sleep(fault.stopped_s)
        finally:
            signal.pidfd_send_signal(handle, signal.SIGCONT)
    return struck


def _until_ended(handle: int) -> None:
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    ended.poll(WAIT_S * 1000)


@contextlib.contextmanager
def _handle(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def until(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Raises ``ProgramFailed`` with ``what`` if it is not true in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise ProgramFailed(f"{what} for {within_s:g} s")
        time.sleep(POLL_S)


def counted(urls: Sequence[str], token: str, what: str) -> dict[str, float]:
    """A counter of each gateway that answers, by its URL."""
    found = {}
    for url in urls:
        with contextlib.suppress(httpx.TransportError):
            headers = {"Authorization": f"Bearer {token}"}
            text = httpx.get(f"{url}/metrics", headers=headers, timeout=2.0, verify=False).text
            lines = [line for line in text.splitlines() if line.startswith(f"sllm_calls_{what}_total")]
            found[url] = sum(float(line.rpartition(" ")[2]) for line in lines)
    return found


class Tally:
    """A counter over all lives of the gateways. At least: what one counts in its last moments nobody reads."""

    def __init__(self) -> None:
        self._lives: dict[str, list[float]] = {}

    def take(self, now: Mapping[str, float]) -> None:
        """What stands there now; less than before: a new life."""
        for url, value in now.items():
            lives = self._lives.setdefault(url, [0.0])
            lives[-1:] = [lives[-1], value] if value < lives[-1] else [value]

    @property
    def sum(self) -> int:
        return int(sum(map(sum, self._lives.values())))


def shared_mib(platform: Platform) -> float:
    """Memory that processes of the platform hold by descriptors (chunks of models), each once."""
    held = [_held(process.pid, "") for process in platform.program.tree()]
    return sum({file: nbytes for files in held for file, nbytes in files.items()}.values()) / MIB


def _held(pid: int, name: str) -> dict[tuple[int, int], int]:
    """Bytes of the memory files of a name that a process has, by device and inode."""
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith(f"/memfd:{name}"):
                    status = entry.stat()
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def until_nothing_left(platform: Platform, nodes: Sequence[str]) -> float:
    """MiB of models' memory that belongs to nothing (``left_mib``), after the time that whatever ends has for it."""
    left: list[float] = []

    def nothing() -> bool:
        with contextlib.suppress(SllmError, OSError):  # a loaderd that has just come is not heard yet
            left[:] = [left_mib(platform, nodes)]
        return left == [0.0]

    with contextlib.suppress(ProgramFailed):
        until(nothing, "memory stays")
    return left[0] if left else left_mib(platform, nodes)


def left_mib(platform: Platform, nodes: Sequence[str]) -> float:
    """What nodes' loaderds count as used beyond the models that they have, and chunks that other processes hold and no
    loaderd has."""
    pids = running_of(platform).pids
    loaders = {pid for node in nodes if (pid := pids.get(f"loaderd-{node}")) is not None}
    if len(loaders) < len(nodes):
        raise Unavailable("a loaderd is being started again")
    known = {file for pid in loaders for file in _held(pid, MEMFD_NAME)}
    others = [_held(process.pid, MEMFD_NAME) for process in platform.program.tree() if process.pid not in loaders]
    strays = {file: nbytes for files in others for file, nbytes in files.items() if file not in known}
    statuses = [asyncio.run(_status(Layout(platform.data).socket(node))) for node in nodes]
    return (sum(strays.values()) + sum(map(beyond_models, statuses))) / MIB


async def _status(socket: Path) -> Status:
    async with LoaderControl(socket) as control:
        return await control.status()


def beyond_models(status: Status) -> int:
    """Bytes of chunks in use beyond those that the models in memory take, or that are of models which are gone."""
    chunk = status.pool.chunk_bytes
    models = sum(-(-each.total // chunk) * chunk for each in status.resident)
    return max(0, status.pool.used - models) + status.pool.retiring


def heaps_mib(platform: Platform) -> dict[str, float]:
    """Anonymous memory (no chunk of a model, no file) of our daemons, by their names."""
    pids = running_of(platform).pids
    found = {name: _heap_mib(pid) for name, pid in pids.items() if name.partition("-")[0] in DAEMONS}
    return {name: mib for name, mib in found.items() if mib is not None}


def _heap_mib(pid: int) -> float | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return None


def settled_mib(platform: Platform) -> float:
    """``shared_mib`` once it stands still: a pool makes its reserve in the background, page by page. Raises
    ``ProgramFailed``."""
    until, last = time.monotonic() + WAIT_S, -1.0
    while (now := shared_mib(platform)) != last:
        if time.monotonic() > until:
            raise ProgramFailed(f"memory of models still grows after {WAIT_S:g} s: {now:g} MiB")
        last = now
        time.sleep(_STILL_S)
    return now

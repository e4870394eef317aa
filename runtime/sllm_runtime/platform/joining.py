"""``sllm up --node``: this machine joins a cluster that is there, as one node: an invoker and its loaderd, no more."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pydantic import Field

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.clock import since_boot
from sllm_runtime.platform.daemon import ready
from sllm_runtime.platform.lifetime import Stop, keep, reap
from sllm_runtime.platform.local import Layout, node_specs
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.process import become_subreaper, end_orphans, start_time
from sllm_runtime.platform.running import Lock, Running
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.supervise import Supervisor
from sllm_runtime.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

_STOP_S: Final = 15.0

Report = Callable[[str], None]


class JoinSettings(Settings):
    """What a node needs to join, beside what its daemons read for themselves."""

    node: str = Field(default="", max_length=80, pattern=r"^[A-Za-z0-9_-]*$")
    """``SLLM_NODE``: its name in the cluster; its credentials are for this name."""
    node_drain: float = Field(default=90.0, ge=0, le=3600)
    """Seconds that running calls have, when the node is stopped, to move or to end: less than the two minutes from the
    notice of a spot instance to its end."""

    node_owner: str = Field(default="", pattern=r"^(\d+:\d+)?$")
    """Process id and start of a platform that it ends with; empty: nobody's."""

    def required(self) -> JoinSettings:
        """Itself. Raises ``InvalidRequest`` that names the variable which is missing."""
        for value, variable, what in (
            (self.node, "SLLM_NODE", "the name of this node, as its credentials have it"),
            (self.nats_url, "SLLM_NATS_URL", "where the cluster's NATS is"),
        ):
            if not value:
                raise InvalidRequest(f"{variable} is not set: {what}; `sllm up --node` joins a cluster", field=variable)
        return self


class Boot:
    """How long this machine took from its boot until the node is ready, stage by stage, told to ``report``."""

    def __init__(self, report: Report, since_boot: Callable[[], float]) -> None:
        self._report, self._since_boot = report, since_boot
        self._last = 0.0
        self.stages: dict[str, float] = {}
        """Seconds by stage."""

    def reached(self, stage: str) -> None:
        """``stage`` is over now."""
        now = self._since_boot()
        self.stages[stage] = now - self._last
        self._report(f"boot {stage}: {now - self._last:.2f} s")
        self._last = now

    def ready(self) -> None:
        """The last one is over."""
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.stages.items())
        self._report(f"READY {self._last:.1f} s after boot ({parts})")


class Joined:
    """One node of somebody else's cluster. ``await run()`` is its whole life."""

    def __init__(self, data: Path, settings: JoinSettings, environment: Mapping[str, str], report: Report) -> None:
        self._layout, self._settings, self._environment = Layout(data), settings.required(), environment
        self._report = report
        self._stop = Stop()
        self._boot = Boot(report, since_boot)
        self._tasks = Tasks("node")

    async def run(self, on_ready: Callable[[Running], None]) -> int:
        """Join, call ``on_ready``, wait for a signal or for a child that cannot be kept, drain, stop. The exit status.

        Raises ``Conflict`` if the data directory is in use, ``InvalidRequest`` for a setting, ``Unauthorized``,
        ``StartFailed``, ``Unavailable``.
        """
        with Lock(self._layout.data) as lock, self._stop.heard():
            become_subreaper()
            self._boot.reached("machine")
            bus = await Bus.connect(self._settings, self._settings.node, name="sllm up --node", jetstream=False)
            await bus.close()
            self._boot.reached("nats")
            await self._until_stopped(lock, on_ready)
        return self._stop.status

    async def _until_stopped(self, lock: Lock, on_ready: Callable[[Running], None]) -> None:
        settings = self._settings
        children = node_specs(self._layout, settings.node, settings.node_drain, self._environment)

        def changed() -> None:
            lock.changed(self._running(supervisor))

        supervisor = Supervisor(children, changed=changed)
        self._tasks.start(reap(supervisor), "orphans")
        if settings.node_owner:
            pid, _, born = settings.node_owner.partition(":")
            self._tasks.start(self._outlive(int(pid), int(born)), "owner")

        async def started() -> None:
            self._boot.reached("daemons")
            self._boot.ready()
            changed()
            on_ready(self._running(supervisor))
            ready()

        try:
            await keep(supervisor, self._stop, supervisor.start(), started)
        finally:
            self._report(f"stopping: running calls have {settings.node_drain:g} s")
            await supervisor.stop()
            await self._tasks.close()
            end_orphans(set())
            shutil.rmtree(self._layout.far_sockets, ignore_errors=True)

    async def _outlive(self, pid: int, born: int) -> None:
        """Stop when that process has ended."""
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._stop.asked.set()
            return
        try:
            loop.add_reader(handle, over.set)
            if start_time(pid) == born:
                await over.wait()
            self._stop.asked.set()
        finally:
            loop.remove_reader(handle)
            os.close(handle)

    def _running(self, supervisor: Supervisor) -> Running:
        return Running(
            pid=os.getpid(),
            started=start_time(os.getpid()),
            url="",
            urls=(),
            profile="",
            nats_url=str(self._settings.nats_url),
            data=str(self._layout.data),
            stop_s=_STOP_S + self._settings.node_drain,
            pids=supervisor.pids(),
            notes=supervisor.notes(),
        )

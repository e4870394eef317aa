"""When the disk and the stores are measured: once the node has begun, one loaderd of a machine after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import psutil

from sllm_loaderd.paths import Paths
from sllm_loaderd.probe import probe, probe_stores
from sllm_loaderd.store import ModelStore
from sllm_loaderd.turns import turn
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable

log = logging.getLogger(__name__)

WITHIN_S: Final = 10.0
"""A disk that is not measured by then (loads go first, so do other nodes of the machine) is by the first load."""
IDLE: Final = 0.5
"""Share of the machine's processor time that nobody uses while it counts as quiet: a read that waits for a core says
nothing of the disk."""
QUIET_WITHIN_S: Final = 5.0
"""One that is busy for longer is measured as it is."""
_GLANCE_S: Final = 0.1


class Measuring:
    """Measures the paths of ``store`` of which no load has told. Lives in one event loop; ``close`` ends it."""

    def __init__(self, store: ModelStore, paths: Paths, used: Callable[[], tuple[float, float]]) -> None:
        """``used``: see ``processor_time``."""
        self._store, self._paths, self._used = store, paths, used
        self._tasks = Tasks("measuring")

    def begin(self, uri: str = "") -> None:
        """Have the disk measured, and all stores or that of ``uri``."""
        self._tasks.start(self._measure(uri), uri or "paths")

    async def _measure(self, uri: str) -> None:
        with contextlib.suppress(Unavailable):  # this loader is stopping
            await asyncio.to_thread(lambda: probe_stores(self._store.stores(uri), self._paths))
            try:
                async with asyncio.timeout(WITHIN_S), turn(f"sllm-disk-{self._store.device}"):
                    await self._quiet()
                    await self._disk()
            except TimeoutError:
                log.info("the disk was not measured within %g s: the first load will tell", WITHIN_S)

    async def _quiet(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_WITHIN_S):
                idle, total = self._used()
                while True:
                    await asyncio.sleep(_GLANCE_S)
                    (idle_before, before), (idle, total) = (idle, total), self._used()
                    if idle - idle_before >= IDLE * (total - before):
                        return

    async def _disk(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_end() -> None:
            loop.call_soon_threadsafe(ended.set)

        if await asyncio.to_thread(lambda: probe(self._store.files(), self._paths, on_end)):
            await ended.wait()

    async def close(self) -> None:
        """Wait for nothing more."""
        await self._tasks.close()


def processor_time() -> tuple[float, float]:
    """Seconds of all cores: idle (not: waiting for a disk), and all."""
    times = psutil.cpu_times()
    return times.idle, sum(times)

"""When the disk and the stores are measured: once the node has begun, the disk while its machine is quiet, and by one
loaderd after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import psutil

from sllm_loaderd.paths import Paths
from sllm_loaderd.probe import READS, probe, probe_stores, unmeasured
from sllm_loaderd.store import ModelStore
from sllm_loaderd.turns import turn
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import SllmError

log = logging.getLogger(__name__)

IDLE: Final = 0.5
"""Share of the machine's processor time that nobody uses while it counts as quiet: a read that waits for a core says
nothing of the disk."""
QUIET_WITHIN_S: Final = 5.0
"""One that is busy for longer is measured as it is."""
READ_WITHIN_S: Final = 10.0
"""A disk that is not measured by then (loads go first, so do the machine's other loaderds) is tried again, until it
was or a load has told."""
AGAIN_S: Final = 5.0
BETWEEN_S: Final = 0.2
"""Between two reads."""
_GLANCE_S: Final = 0.1


class Measuring:
    """Measures the paths of ``store`` of which no load has told. Lives in one event loop; ``close`` ends it."""

    def __init__(
        self, store: ModelStore, paths: Paths, used: Callable[[], tuple[float, float]], *, huge: bool = False
    ) -> None:
        """``used``: see ``processor_time``; ``huge``: whether loads read into pages of 2 MiB."""
        self._store, self._paths, self._used, self._huge = store, paths, used, huge
        self._tasks = Tasks("measuring")
        self._disk: asyncio.Task[None] | None = None
        self._begun = self._asked = False

    def begun(self) -> None:
        """The node has. Repeatable."""
        if not self._begun:
            self._begun = True
            self.look()

    def look(self, uri: str = "") -> None:
        """Have the disk measured, and all stores or that of ``uri``."""
        self._tasks.start(self._stores(uri), f"stores {uri}")
        self._asked = True
        if self._disk is None or self._disk.done():
            self._disk = self._tasks.start(self._measure_disk(), "disk")

    async def _stores(self, uri: str) -> None:
        try:
            await asyncio.to_thread(lambda: probe_stores(self._store.stores(uri), self._paths))
        except SllmError as error:  # it cannot be reached, or this loader is stopping
            log.info("stores are not measured: %s", error.message)

    async def _measure_disk(self) -> None:
        while self._asked:  # a model may have come while there was none
            self._asked = False
            while await asyncio.to_thread(lambda: unmeasured(self._store.files(), self._paths)) is not None:
                await self._quiet()
                try:
                    await self._read_disk()
                    break
                except OSError as error:  # it took too long, or there is no memory
                    log.info("the disk was not measured (%s)", str(error) or f"not within {READ_WITHIN_S:g} s")
                await asyncio.sleep(AGAIN_S)

    async def _read_disk(self) -> None:
        """Raises ``TimeoutError``, ``OSError``."""
        async with asyncio.timeout(READ_WITHIN_S):
            for number in range(READS):
                await asyncio.sleep(BETWEEN_S if number else 0.0)
                async with turn(f"sllm-disk-{self._store.device}"):
                    await self._read(number)

    async def _quiet(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_WITHIN_S):
                idle, total = self._used()
                while True:
                    await asyncio.sleep(_GLANCE_S)
                    (idle_before, before), (idle, total) = (idle, total), self._used()
                    if idle - idle_before >= IDLE * (total - before):
                        return

    async def _read(self, number: int) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_end() -> None:
            loop.call_soon_threadsafe(ended.set)

        reads = await asyncio.to_thread(
            lambda: probe(self._store.files(), self._paths, on_end, number, huge=self._huge)
        )
        try:
            if reads:
                await ended.wait()
        finally:
            for read in reads:  # late, or given up: in another one's turn it would say nothing
                self._paths.cancel(read)

    async def close(self) -> None:
        """Wait for nothing more."""
        await self._tasks.close()


def processor_time() -> tuple[float, float]:
    """Seconds of all cores: idle (not: waiting for a disk), and all."""
    times = psutil.cpu_times()
    return times.idle, sum(times[:8])  # what virtual machines used is among what programs did

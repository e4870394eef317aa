"""When the disk and the stores are measured: once the node has begun, one loaderd of a machine after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from sllm_loaderd.paths import Paths
from sllm_loaderd.probe import probe, probe_stores
from sllm_loaderd.store import ModelStore
from sllm_loaderd.turns import turn
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable

log = logging.getLogger(__name__)

WITHIN_S: Final = 10.0
"""A disk that is not measured by then (loads go first, so do other nodes of the machine) is by the first load."""


class Measuring:
    """Measures the paths of ``store`` of which no load has told. Lives in one event loop; ``close`` ends it."""

    def __init__(self, store: ModelStore, paths: Paths) -> None:
        self._store, self._paths = store, paths
        self._tasks = Tasks("measuring")

    def begin(self, uri: str = "") -> None:
        """Have the disk measured, and all stores or that of ``uri``."""
        self._tasks.start(self._measure(uri), uri or "paths")

    async def _measure(self, uri: str) -> None:
        with contextlib.suppress(Unavailable):  # this loader is stopping
            await asyncio.to_thread(lambda: probe_stores(self._store.stores(uri), self._paths))
            try:
                async with asyncio.timeout(WITHIN_S), turn(f"sllm-disk-{self._store.device}"):
                    await self._disk()
            except TimeoutError:
                log.info("the disk was not measured within %g s: the first load will tell", WITHIN_S)

    async def _disk(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_end() -> None:
            loop.call_soon_threadsafe(ended.set)

        if await asyncio.to_thread(lambda: probe(self._store.files(), self._paths, on_end)):
            await ended.wait()

    async def close(self) -> None:
        """Wait for nothing more."""
        await self._tasks.close()

"""What the daemon can do, without its sockets: store, registrations, pool, queue and residency put together."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from sllm_loaderd.daemon.registration import Registrations, Report
from sllm_loaderd.daemon.settings import LoaderSettings
from sllm_loaderd.disk.local import LocalPartition
from sllm_loaderd.load_job import LoadJob, plan_job
from sllm_loaderd.path_queue import PathQueue
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.residency import Residency, Resident
from sllm_loaderd.store import ModelStore, StoredModel
from sllm_loaderd.verify import describe, validate_checkpoint
from sllm_runtime.protocol.errors import Conflict, DigestMismatch, SllmError
from sllm_runtime.protocol.loader import Load, ModelInfo, PathStatus, PoolStatus, ResidentStatus

_MOST_OPEN = 256
"""Models whose index and small files are kept open."""
T = TypeVar("T")


class LoaderService:
    """All state of one node's loader. Lives in one event loop; ``close`` frees everything."""

    def __init__(self, settings: LoaderSettings) -> None:
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.store = ModelStore(settings.data)
        self.pool = ChunkPool(settings.chunk_bytes, settings.pool_bytes, settings.prefault_bytes)
        self.disk = PathQueue(LocalPartition.path, settings.io_threads)
        self.residency = Residency(self.pool, self.disk, loop.call_soon_threadsafe)
        self.registrations = Registrations(self.store, settings.conversions)
        self._open: dict[str, StoredModel] = {}

    async def close(self) -> None:
        """End conversions and reads, then give back memory and files."""
        await self.registrations.close()
        self.disk.close()
        await asyncio.sleep(0)  # lets the reads that just ended report, so that they give back their sources
        for model in self._open.values():
            model.close()
        self.pool.close()
        self.store.close()

    async def model(self, digest: str) -> StoredModel:
        """The opened model. Raises ``ModelNotFound`` or ``InvalidCheckpoint``."""
        if (known := self._open.pop(digest, None)) is not None:
            self._open[digest] = known  # now the most recently used
            return known
        opened = await _in_thread(self.store.open, digest)
        if (other := self._open.get(digest)) is not None:  # somebody else opened it meanwhile
            opened.close()
            return other
        self._open[digest] = opened
        if len(self._open) > _MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        return opened

    async def register(self, uri: str, expected: str, report: Report) -> ModelInfo:
        """Have the model at ``uri`` in the store. Raises ``DigestMismatch`` if it is not ``expected``."""
        digest = await self.registrations.register(uri, report)
        if expected and digest != expected:
            raise DigestMismatch(f"{uri} is {digest}, not {expected}: the source has changed", field="model")
        return await self.describe(digest)

    async def describe(self, digest: str) -> ModelInfo:
        """Everything about a model but its bytes."""
        model = await self.model(digest)
        sources = tuple(record.uri for record in await asyncio.to_thread(self.store.sources, digest))
        resident = self.residency.resident_bytes(digest)
        return await _in_thread(functools.partial(describe, model.checkpoint, sources=sources, resident=resident))

    async def validate(self, digest: str, report: Report) -> None:
        """Compare every byte on disk with its digest. Raises ``CorruptCheckpoint``."""
        directory = self.store.directory(digest)
        loop = asyncio.get_running_loop()
        stopped = False

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(report, "validate", done, total)

        try:
            await asyncio.to_thread(validate_checkpoint, directory, progress, lambda: stopped)
        finally:
            stopped = True

    async def delete(self, digest: str) -> None:
        """Remove a model from disk and memory. Raises ``Conflict`` while it is being loaded."""
        self.store.directory(digest)
        self.residency.evict(digest)
        if (known := self._open.pop(digest, None)) is not None:
            known.close()
        await asyncio.to_thread(self.store.delete, digest)

    async def load(
        self,
        request: Load,
        *,
        ready: Callable[[int], None],
        progress: Callable[[int, int], None],
        done: Callable[[], None],
        failed: Callable[[SllmError], None],
    ) -> tuple[StoredModel, Resident, LoadJob]:
        """Begin a load; nothing is told before ``residency.start``. Raises typed errors if it cannot begin."""
        if request.device != "cpu":
            raise Conflict(f"device {request.device!r} is not served by this loader, only cpu", field="device")
        model = await self.model(request.model)
        job = plan_job(
            model,
            request.partition,
            request.blocks,
            request.priority,
            ready=ready,
            progress=progress,
            done=done,
            failed=failed,
        )
        return model, self.residency.load(model, request.partition, job), job

    def status(self) -> tuple[PoolStatus, tuple[ResidentStatus, ...], tuple[PathStatus, ...]]:
        """Pool, partitions in memory, paths."""
        return (
            self.pool.status(self.residency.reserved_bytes),
            tuple(self.residency.status()),
            (self.disk.status(),),
        )


async def _in_thread(action: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.to_thread(action, *arguments)

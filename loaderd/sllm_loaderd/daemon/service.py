"""What the daemon can do, without its sockets: store, registrations, pool, queue and residency put together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from sllm_loaderd.daemon.copying import Copying
from sllm_loaderd.daemon.measuring import Measuring, processor_time
from sllm_loaderd.daemon.registration import Registrations, Report
from sllm_loaderd.daemon.settings import LoaderSettings
from sllm_loaderd.device_adoption import CountedMemory
from sllm_loaderd.device_stage import DeviceStage
from sllm_loaderd.devices.registry import Devices, open_devices
from sllm_loaderd.eviction import evict
from sllm_loaderd.held import Held
from sllm_loaderd.huge_pages import have_huge_pages
from sllm_loaderd.load_job import plan_job
from sllm_loaderd.loading import DeviceLoad, Loading, MemoryLoad
from sllm_loaderd.opening import finished, opened
from sllm_loaderd.paths import Paths
from sllm_loaderd.peer.exports import Exports
from sllm_loaderd.peer.server import open_peer_server
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.prefaulting import LEAST, bytes_ahead, model_sizes
from sllm_loaderd.reader import ChunkSource, close_all
from sllm_loaderd.residency import Residency
from sllm_loaderd.sources import SourceSettings
from sllm_loaderd.sources.fetch import forget_old
from sllm_loaderd.store import ModelStore, StoredModel
from sllm_loaderd.verify import Checkpoint, describe, validate_checkpoint
from sllm_runtime.protocol.errors import (
    Conflict,
    DigestMismatch,
    InvalidCheckpoint,
    ModelNotFound,
    SllmError,
)
from sllm_runtime.protocol.loader import (
    CONVERT,
    CPU,
    DISK,
    Load,
    ModelInfo,
    PathStatus,
    PoolStatus,
    ResidentStatus,
)

log = logging.getLogger(__name__)
_MOST_OPEN = 256
"""Models whose index and small files are kept open."""
_TIDY_S: Final = 24 * 3600.0


class LoaderService:
    """All state of one node's loader. Lives in one event loop; ``close`` frees everything."""

    def __init__(self, settings: LoaderSettings) -> None:
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.store = ModelStore(
            settings.data, ssd_bytes=settings.ssd_bytes, sources=SourceSettings(settings.peer_token)
        )
        self.devices = Devices(open_devices(settings.fake_devices, settings.cuda_devices))
        self.pool = ChunkPool(
            settings.chunk_bytes,
            settings.pool_bytes,
            LEAST if settings.prefault_bytes is None else settings.prefault_bytes,
            huge=settings.huge_pages and have_huge_pages(),
            pinner=self.devices if settings.pipeline.pinned and any(True for _ in self.devices) else None,
        )
        self.paths = Paths(self._threads_of, spare=self._spare_of)
        self.residency = Residency(
            self.pool,
            self.paths,
            loop.call_soon_threadsafe,
            ssd=self.store.ssd,
            integrity=settings.pipeline.integrity,
        )
        self.stage = DeviceStage(
            self.residency, self.paths, loop.call_soon_threadsafe, overlap=settings.pipeline.overlap
        )
        self.counted = CountedMemory()
        exports = Exports(self.store, self.residency, loop.call_soon_threadsafe)
        held = Held(self.store, self.residency, exports)
        self.copying = Copying(self)
        self.measuring = Measuring(self.store, self.paths, processor_time, huge=self.pool.huge_pages)
        self.registrations = Registrations(
            self.store, settings.conversions, held, settings.listing_timeout, settings.chunk_bytes
        )
        self.peers = open_peer_server(settings.peer_listen, settings.peer_token, exports)
        self._open: dict[str, StoredModel] = {}
        self._superseded: list[StoredModel] = []
        self._sizes: dict[str, int] = {}
        """Bytes of each model of the store, as far as they are known."""

    async def look(self) -> None:
        """Learn what models there are, to have memory ready for the largest one. The daemon serves meanwhile."""
        found = await asyncio.to_thread(model_sizes, self.store)
        self._sizes = found | self._sizes
        self._prepare()

    async def tidy(self) -> None:
        """Remove what was fetched and is of no use any more, now and then, until cancelled. The daemon serves
        meanwhile."""
        while True:
            try:
                await asyncio.to_thread(forget_old, self.store.cache, time.time())
            except OSError as error:
                log.warning("what was fetched cannot be looked at: %s", error)
            await asyncio.sleep(_TIDY_S)

    def _prepare(self) -> None:
        """Have as much memory ready as the next start may need."""
        if self.settings.prefault_bytes is None:
            there = {resident.key[0] for resident in self.residency.residents()}
            self.pool.keep_ready(bytes_ahead(self._sizes, there, self.pool.limit))

    async def close(self) -> None:
        """End conversions and reads, then give back memory and files."""
        await self.measuring.close()
        await self.registrations.close()
        if self.peers is not None:
            await asyncio.to_thread(self.peers.close)
        self.store.origins.close()  # ends the remote reads that run
        await asyncio.to_thread(self.paths.close)  # what the last tasks post to this loop is done when this returns
        self.residency.close()
        self.stage.close()
        self.counted.close()
        for model in (*self._open.values(), *self._superseded):
            model.close()
        self.pool.close()
        self.devices.close()
        self.store.close()

    async def model(self, digest: str) -> StoredModel:
        """The opened model. Raises ``ModelNotFound`` or ``InvalidCheckpoint``.

        One that was loaded as it is and has been converted since takes its new form when none of it is in memory.
        """
        known = self._open.get(digest)
        if known is not None and known.index.segments and not self._in_memory(digest):
            replaced = await opened(lambda: self.store.open_replaced(digest), _close)
            if replaced is not None and self._open.get(digest) is known and not self._in_memory(digest):
                self._open[digest] = replaced
                self._superseded.append(known)  # somebody may be about to send its files
            elif replaced is not None:
                replaced.close()
        if (known := self._open.pop(digest, None)) is not None:
            self._open[digest] = known  # now the most recently used
            return known
        await self.registrations.taken(digest)
        found = await opened(lambda: self.store.open_latest(digest), _close)
        if (other := self._open.get(digest)) is not None:  # somebody else opened it meanwhile
            found.close()
            return other
        self._open[digest] = found
        # What is in memory has the form of the model that is open: opened anew it may be its later conversion.
        oldest = (each for each in tuple(self._open) if each != digest and not self._in_memory(each))
        for closed in islice(oldest, max(len(self._open) - _MOST_OPEN, 0)):
            self._open.pop(closed).close()
        return found

    def _in_memory(self, digest: str) -> bool:
        return self.residency.has(digest) or self.stage.has(digest)

    async def register(self, uri: str, expected: str, report: Report, convert: str = "") -> ModelInfo:
        """Have the model at ``uri`` in the store. Raises ``DigestMismatch`` if it is not ``expected``."""
        convert = convert or self.settings.convert
        if convert not in CONVERT:
            raise InvalidCheckpoint(f"convert {convert!r} is none of {CONVERT}", field="convert")
        digest = await self.registrations.register(uri, report, convert)
        if expected and digest != expected:
            text = f"{uri} is {digest}, not {expected}: the source has changed, or a release before read it otherwise"
            raise DigestMismatch(f"{text}; deploy the function, or register the model, again", field="model")
        info = await self.describe(digest)
        self._sizes[digest] = info.nbytes
        self._prepare()
        self.measuring.look(uri)
        return info

    def lacks(self, digest: str) -> bool:
        """Whether a model is not in the store."""
        try:
            self.store.directory(digest)
        except ModelNotFound:
            return True
        return False

    async def bring(self, digest: str, sources: Sequence[str]) -> None:
        """Have a model from the first of ``sources`` that gives it. Raises what the last one failed with."""
        failure: SllmError = ModelNotFound(f"model {digest} has no source to make it from", field="model")
        for uri in sources:
            try:
                await self.register(uri, digest, lambda stage, done, total: None)
                return
            except SllmError as error:
                log.warning("model %s from %s: %s", digest, uri, error.message)
                failure = error
        raise failure

    async def describe(self, digest: str) -> ModelInfo:
        """Everything about a model but its bytes."""
        model = await self.model(digest)
        sources = tuple(record.uri for record in await asyncio.to_thread(self.store.sources, digest))
        resident = self.residency.resident_bytes(digest)
        return await asyncio.to_thread(describe, model.checkpoint, sources=sources, resident=resident)

    async def validate(self, digest: str, report: Report) -> None:
        """Compare every byte, where a load would take it first, with its digest. Raises ``CorruptCheckpoint``."""
        directory = self.store.directory(self.store.replacement(digest) or digest)
        loop = asyncio.get_running_loop()
        stopped = False

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(report, "validate", done, total)

        try:
            await asyncio.to_thread(
                validate_checkpoint, directory, progress, lambda: stopped, self._first_source, self.store.stated
            )
        finally:
            stopped = True

    def _first_source(self, checkpoint: Checkpoint, rank: int) -> ChunkSource:
        first, *others = self.store.open_sources(checkpoint, rank)
        for other in others:
            other.close()
        return first

    async def delete(self, digest: str) -> None:
        """Remove a model from disk and memory. Raises ``Conflict`` while it is being loaded or copied."""
        await self.registrations.taken(digest)
        self.store.directory(digest)
        await self._let_go(digest)  # where that is refused, no conversion is ended
        await self.registrations.forget(digest)
        await self._let_go(digest)  # what was begun meanwhile
        if (known := self._open.pop(digest, None)) is not None:
            known.close()
        await asyncio.to_thread(self.store.delete, digest)
        self._sizes.pop(digest, None)
        self._prepare()

    async def _let_go(self, digest: str) -> None:
        """As ``evict``. Raises ``Conflict`` also while the model is copied."""
        if digest in self.copying.running:
            raise Conflict(f"model {digest} is being copied to the SSD tier; try again", field="model")
        await self.evict(digest)

    async def load(
        self,
        request: Load,
        holder: str,
        *,
        ready: Callable[[int], None],
        progress: Callable[[int, int], None],
        done: Callable[[], None],
        failed: Callable[[SllmError], None],
    ) -> Loading:
        """Begin a load for ``holder`` (empty: for nobody yet); nothing is told before its ``start``.

        Raises typed errors if it cannot begin.
        """
        turn = self.paths.turn()  # in which it was asked for, not in which its files were open
        device = None if request.device == CPU else self.devices.get(request.device)
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
        rank = request.partition
        there = self.stage.there(model, rank, device, holder) if device is not None else set()
        sources: list[ChunkSource] = []
        if self.residency.lacks(model, rank, [number for number in job.chunks if number not in there]):
            sources = await opened(lambda: self.settings.pipeline.open_sources(model, rank), close_all)
        if self._open.get(request.model) is not model:
            # It was deleted meanwhile, or too many others were opened: the number of its descriptor may be another's.
            # Or its conversion has taken its place: both forms under one digest would share memory.
            await finished(lambda: close_all(sources))
            return await self.load(request, holder, ready=ready, progress=progress, done=done, failed=failed)
        if device is not None:
            return DeviceLoad(model, rank, job, self.stage, self.stage.load(model, rank, device, holder, sources))
        load = MemoryLoad(model, rank, job, self.residency, self.residency.load(model, rank, job, sources, turn))
        self._prepare()
        return load

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep a model in memory and on the SSD tier, or stop doing so."""
        self.residency.pin(digest, pinned)
        self.store.ssd.pin(digest, pinned)

    def forget(self, holder: str) -> None:
        """A sandbox is dead: what only it held can be used again."""
        self.residency.forget(holder)
        self.stage.forget(holder)
        self.counted.forget(holder)

    async def evict(self, digest: str) -> None:
        """Drop a model from all memory; what runs and nobody waits for ends first. Raises ``Conflict`` while loaded."""
        await evict(digest, self.stage, self.residency)

    def _threads_of(self, path: str) -> int:
        links = {device.path: device.threads for device in self.devices}
        return links.get(path) or (self.settings.io_threads if path == DISK else self.settings.remote_threads)

    def _spare_of(self, path: str) -> int:
        """A digest takes a fraction of its read's time: on a disk of 3 GB/s a quarter."""
        return self.settings.io_threads // 2 if path == DISK and self.settings.pipeline.integrity else 0

    def recent(self) -> list[str]:
        """Models that were used, the last one first, then those with copies on the SSD tier."""
        return [*reversed(self._open), *self.store.ssd.recent()]

    def status(self) -> tuple[PoolStatus, tuple[ResidentStatus, ...], tuple[PathStatus, ...]]:
        """Pool, partitions in memory, paths."""
        return (
            self.pool.status(self.residency.reserved_bytes),
            tuple(self.residency.status()),
            self.paths.status(),
        )


def _close(model: StoredModel | None) -> None:
    if model is not None:
        model.close()

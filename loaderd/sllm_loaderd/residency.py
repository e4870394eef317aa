"""How partitions come to memory: chunks that are read, who waits for which blocks, and what devices copy from.

Lives in the daemon's event loop; only tasks run elsewhere, and their end is posted back here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.load_job import LoadJob
from sllm_loaderd.paths import Paths
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.reader import ChunkSource, close_all
from sllm_loaderd.resident import Resident
from sllm_loaderd.residents import Residents
from sllm_loaderd.store import StoredModel
from sllm_loaderd.task import ReadChunk, Task
from sllm_loaderd.write_back import SsdTier, WriteBack
from sllm_runtime.protocol.errors import (
    CorruptCheckpoint,
    InternalError,
    InvalidCheckpoint,
    SllmError,
)

log = logging.getLogger(__name__)


class Residency(Residents):
    """Loads the partitions of one pool. ``integrity``: what is read is compared with its digests."""

    def __init__(
        self,
        pool: ChunkPool,
        paths: Paths,
        post: Callable[[Callable[[], None]], object],
        *,
        ssd: SsdTier | None = None,
        integrity: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pool)
        self._paths = paths
        self._post = post
        self._ssd = ssd
        self._integrity = integrity
        self._clock = clock
        self.on_written: Callable[[Resident], None] = lambda resident: None
        """A chunk was written to the SSD tier: whoever waits for its memory may have it."""

    # --- loading ------------------------------------------------------------------------------------
    def lacks(self, model: StoredModel, rank: int, chunks: Iterable[int]) -> bool:
        """Whether ``load`` would have to read, and so needs sources."""
        resident = self._residents.get((model.checkpoint.digest, rank))
        there = resident.chunks if resident is not None else {}
        return (resident is None or not resident.sources) and any(number not in there for number in chunks)

    def load(
        self,
        model: StoredModel,
        rank: int,
        job: LoadJob,
        sources: Sequence[ChunkSource] = (),
        turn: int | None = None,
    ) -> Resident:
        """Start or join the load of a partition. ``chunks`` of what is returned has all that ``job`` needs.

        ``sources`` (best first) are this method's own from here on. ``turn``: as ``Paths.put`` has it. Raises
        ``PoolExhausted`` (nothing was evicted then) or ``InvalidCheckpoint``.
        """
        digest = model.checkpoint.digest
        resident = self._residents.get((digest, rank)) or Resident((digest, rank), model, self._clock())
        spare = list(sources)
        try:
            self._check_chunk_size(model)
            missing = [number for number in job.chunks if number not in resident.chunks]
            if missing and not resident.sources and not sources:
                raise InternalError(f"{digest} is to be read and no source is open")
            size = self._pool.size_for(resident.nbytes)
            self._make_room(len(missing) * size, digest)
            fresh = self._pool.allocate(len(missing), size)
            if missing and not resident.sources:
                resident.sources, spare = spare, []
        finally:
            close_all(spare)
        self._residents[resident.key] = resident
        resident.used_at = self._clock()
        self.promote(resident, job.chunks, job.priority)
        self._read(resident, dict(zip(missing, fresh, strict=True)), job.priority, turn)
        return resident

    def start(self, resident: Resident, job: LoadJob) -> None:
        """Begin to tell ``job``: what is ready already at once, in order, the rest as it comes.

        If all is there, ``done`` alone says so.
        """
        if job.begin(resident.there):
            job.done()
        else:
            resident.jobs.append(job)

    def reorder(self, resident: Resident, job: LoadJob, blocks: Iterable[int]) -> None:
        """``job`` wants ``blocks`` first from now on, in this order."""
        job.reorder(blocks)
        self.reorder_chunks(resident, job.chunks)

    def reorder_chunks(self, resident: Resident, numbers: Iterable[int]) -> None:
        """Those of these chunks that still wait are read in this order."""
        self._paths.reorder([resident.tasks[number] for number in numbers if number in resident.tasks])

    def cancel(self, resident: Resident, job: LoadJob) -> None:
        """Nobody waits for ``job`` any more: drop the reads no other job wants. What is there stays. Repeatable."""
        if job in resident.jobs:
            resident.jobs.remove(job)
        wanted = resident.wanted()
        for number, task in list(resident.tasks.items()):
            if number not in wanted and self._paths.cancel(task):
                del resident.tasks[number]
                self._pool.free([resident.chunks.pop(number)])
        self._settle(resident)

    def adopt(self, model: StoredModel, rank: int, chunks: Mapping[int, Chunk]) -> list[Chunk]:
        """Chunks that are filled and checked already become part of a partition; those that it has come back."""
        key = (model.checkpoint.digest, rank)
        resident = self._residents.setdefault(key, Resident(key, model, self._clock()))
        refused = [chunk for number, chunk in chunks.items() if number in resident.chunks]
        resident.chunks.update({n: chunk for n, chunk in chunks.items() if n not in resident.chunks})
        self._settle(resident)
        return refused

    def _check_chunk_size(self, model: StoredModel) -> None:
        if model.index.chunk_bytes != self._pool.chunk_bytes:
            raise InvalidCheckpoint(
                f"{model.checkpoint.digest} has chunks of {model.index.chunk_bytes} bytes, this node's pool of"
                f" {self._pool.chunk_bytes}; register what it was made of on nodes of this size, or start loaderd with"
                f" --chunk-bytes {model.index.chunk_bytes}",
                field="chunk_bytes",
            )

    def _read(self, resident: Resident, fresh: dict[int, Chunk], priority: int, turn: int | None) -> None:
        stated = resident.model.index.partitions[resident.key[1]].digests
        chunk_bytes = resident.model.index.chunk_bytes

        def done(task: Task, error: SllmError | None) -> None:
            self._post(lambda: self._finished(resident, task.number, error))

        resident.chunks.update(fresh)
        tasks = [
            ReadChunk(n, n * chunk_bytes, resident.nbytes_of(n), digest, chunk, resident.sources, done)
            for n, chunk in fresh.items()
            for digest in (stated[n] if self._integrity else None,)
        ]
        resident.tasks.update((task.number, task) for task in tasks)
        self._paths.put(tasks, priority, turn)

    def _finished(self, resident: Resident, number: int, error: SllmError | None) -> None:
        task = resident.tasks[number]
        if error is None and task.found:
            error = resident.model.learn(resident.key[1], number, task.found)
        if isinstance(error, CorruptCheckpoint):
            resident.model.doubt(resident.key[1], task.path)
        if error is not None and number in resident.wanted() and task.next_source():
            # One line for a source that is down, not one a chunk.
            level = logging.DEBUG if task.path in resident.doubted else logging.WARNING
            log.log(level, "%s; another source is read", error)
            resident.doubted.add(task.path)
            self._paths.again(task)
            return
        del resident.tasks[number]
        if error is not None:
            self._pool.free([resident.chunks.pop(number)])
            for job in [job for job in resident.jobs if number in job.lacking]:
                self.cancel(resident, job)
                job.failed(error)
        else:
            self._write_back(resident, task)
            self._advance(resident, number)
        self._settle(resident)
        self._tell()

    def _advance(self, resident: Resident, number: int) -> None:
        for job in list(resident.jobs):
            if job.advance(number):
                resident.jobs.remove(job)
                job.done()

    def _write_back(self, resident: Resident, task: ReadChunk) -> None:
        """Begin a copy for the SSD tier when the first remote chunk is there; what came before it is added."""
        if self._ssd is None or (resident.write_back is None and not task.remote):
            return
        if resident.write_back is None:
            resident.write_back = WriteBack(
                self._ssd, resident.model, resident.key[1], self._paths, self._post, lambda: self._written(resident)
            )
        for number in [number for number in resident.chunks if resident.there(number)]:
            resident.write_back.add(number, resident.chunks[number], resident.nbytes_of(number))

    def given_up(self, digest: str, rank: int) -> WriteBack | None:
        """The copy of a partition that lacks what nobody brings just now: the caller, who wants its place on the disk,
        stops it. A later load begins it anew."""
        resident = self.find(digest, rank)
        return None if resident is None else self._given_up(resident)

    def all_given_up(self) -> list[WriteBack]:
        """As ``given_up``, of every partition."""
        found = [self._given_up(resident) for resident in self._residents.values()]
        return [write_back for write_back in found if write_back is not None]

    def _given_up(self, resident: Resident) -> WriteBack | None:
        if resident.tasks or resident.feeding:
            return None
        write_back = resident.write_back
        if write_back is None or not write_back.waiting:
            return None
        resident.write_back = None
        return write_back

    def _written(self, resident: Resident) -> None:
        self.on_written(resident)
        self._tell()

    def _settle(self, resident: Resident) -> None:
        """No descriptor stays open for a partition that is not being read: its file may be deleted."""
        if resident.tasks or resident.feeding:
            return
        sources, resident.sources = resident.sources, []
        close_all(sources)
        if not resident.chunks and self._residents.get(resident.key) is resident:
            self._drop(resident)

    # --- copies to devices --------------------------------------------------------------------------
    def feed(self, model: StoredModel, rank: int, sources: Sequence[ChunkSource]) -> Resident:
        """A device is to be fed from a partition, some of it at a time: until ``fed`` it stays and may be loaded from.

        ``sources`` are this method's own; none are needed for what is in memory.
        """
        key = (model.checkpoint.digest, rank)
        resident = self._residents.setdefault(key, Resident(key, model, self._clock()))
        resident.feeding += 1
        self.supply(resident, sources)
        return resident

    def supply(self, resident: Resident, sources: Sequence[ChunkSource]) -> None:
        """Further sources for a partition that is being fed from; of no use if it has some."""
        if resident.sources:
            close_all(sources)
        else:
            resident.sources = list(sources)

    def fed(self, resident: Resident) -> None:
        """The device has what it wanted, or wants it no more."""
        resident.feeding -= 1
        self._settle(resident)
        self._tell()

    def promote(self, resident: Resident, numbers: Iterable[int], priority: int) -> None:
        """Somebody of a higher class waits for these chunks now."""
        for number in numbers:
            if number in resident.tasks:
                self._paths.promote(resident.tasks[number], priority)

    def borrow(self, resident: Resident, number: int) -> Chunk:
        """A chunk that is there, to be copied; it stays until ``give_back``."""
        resident.copying[number] += 1
        return resident.chunks[number]

    def pin_memory(self, chunk: Chunk) -> None:
        """Have the devices know a chunk before they copy from it. Thread-safe."""
        self._pool.pin(chunk)

    def give_back(self, resident: Resident, number: int, *, drop: bool = False) -> None:
        """It was copied. ``drop``: it is not worth its memory, unless somebody else needs it."""
        resident.copying[number] -= 1
        if not resident.copying[number]:
            del resident.copying[number]
            if drop:
                self.drop(resident, [number])
            self._tell()

    def drop(self, resident: Resident, numbers: Iterable[int]) -> None:
        """Use the memory of these chunks for others, but for those that somebody has, wants, copies or writes."""
        wanted, write_back = resident.wanted(), resident.write_back
        for number in numbers:
            busy = number in wanted or number in resident.copying or not resident.there(number)
            if not (busy or resident.chunks[number].holders) and (write_back is None or write_back.let_go(number)):
                self._pool.free([resident.chunks.pop(number)])

    def room(self, resident: Resident, count: int) -> int:
        """How many of ``count`` further chunks a partition could have now, others being evicted for them."""
        return self._room.available(count, self._pool.size_for(resident.nbytes), resident.key[0])

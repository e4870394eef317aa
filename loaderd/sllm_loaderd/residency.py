"""What is in memory: partitions made of chunks, who waits for which blocks, what stays and what is dropped.

Lives in the daemon's event loop; only ``ChunkTask``s run elsewhere, and their end is posted back here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sllm_loaderd.disk.local import LocalPartition
from sllm_loaderd.load_job import LoadJob
from sllm_loaderd.path_queue import ChunkTask, PathQueue
from sllm_loaderd.pool import Chunk, ChunkPool
from sllm_loaderd.reader import ChunkSource
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.checkpoint import chunk_count
from sllm_runtime.protocol.errors import Conflict, InvalidCheckpoint, PoolExhausted, SllmError
from sllm_runtime.protocol.loader import ResidentStatus

Key = tuple[str, int]
"""(model digest, rank)"""


@dataclass(eq=False, slots=True)
class Resident:
    """One partition in memory or on its way."""

    key: Key
    model: StoredModel
    used_at: float
    chunks: dict[int, Chunk] = field(default_factory=dict)
    tasks: dict[int, ChunkTask] = field(default_factory=dict)
    """Chunks that are not there yet."""
    jobs: list[LoadJob] = field(default_factory=list)
    source: ChunkSource | None = None

    def there(self, number: int) -> bool:
        """Whether a chunk's bytes are in memory and checked."""
        return number in self.chunks and number not in self.tasks

    def nbytes_of(self, number: int) -> int:
        """Bytes of a chunk that belong to the partition."""
        partition = self.model.index.partitions[self.key[1]]
        return min(self.model.index.chunk_bytes, partition.nbytes - number * self.model.index.chunk_bytes)

    @property
    def holders(self) -> set[str]:
        """Sandboxes that were given chunks of it and live."""
        return set().union(*(chunk.holders for chunk in self.chunks.values()))


class Residency:
    """The partitions of one pool. Not thread-safe: everything happens in one event loop."""

    def __init__(
        self,
        pool: ChunkPool,
        queue: PathQueue,
        post: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._post = post
        self._clock = clock
        self._residents: dict[Key, Resident] = {}
        self._pinned: set[str] = set()
        self._reserved: dict[str, int] = {}

    # --- loading ------------------------------------------------------------------------------------
    def load(self, model: StoredModel, rank: int, job: LoadJob) -> Resident:
        """Start or join the load of a partition. ``chunks`` of what is returned has all that ``job`` needs.

        Raises ``PoolExhausted`` (nothing was evicted then) or ``InvalidCheckpoint``.
        """
        digest = model.checkpoint.digest
        if model.index.chunk_bytes != self._pool.chunk_bytes:
            raise InvalidCheckpoint(
                f"{digest} has chunks of {model.index.chunk_bytes} bytes, this node's pool of {self._pool.chunk_bytes};"
                " convert it again with this size or start loaderd with --chunk-bytes",
                field="chunk_bytes",
            )
        resident = self._residents.get((digest, rank)) or Resident((digest, rank), model, self._clock())
        missing = [number for number in job.chunks if number not in resident.chunks]
        if missing and resident.source is None:
            resident.source = LocalPartition(model.checkpoint.directory, rank, model.index.partitions[rank].nbytes)
        try:
            self._make_room(len(missing), digest, job)
            fresh = self._pool.allocate(len(missing))
        except BaseException:
            if resident.key not in self._residents and resident.source is not None:
                resident.source.close()
            raise
        self._residents[resident.key] = resident
        resident.used_at = self._clock()
        self._queue_tasks(resident, dict(zip(missing, fresh, strict=True)), job)
        return resident

    def start(self, resident: Resident, job: LoadJob) -> None:
        """Begin to tell ``job``: what is ready already at once, in order, the rest as it comes.

        If all is there, ``done`` alone says so.
        """
        for block, needs in zip(job.blocks, job.needs, strict=True):
            job.waiting[block] = {number for number in needs if not resident.there(number)}
        job.lacking = {number for number in job.chunks if not resident.there(number)}
        job.total = sum(resident.nbytes_of(number) for number in job.chunks)
        job.there = job.total - sum(resident.nbytes_of(number) for number in job.lacking)
        job.progress(job.there, job.total)
        if not job.lacking:
            job.done()  # says as much as every single block
            return
        resident.jobs.append(job)
        for block in [block for block in job.blocks if not job.waiting[block]]:
            job.ready(block)
            del job.waiting[block]

    def cancel(self, resident: Resident, job: LoadJob) -> None:
        """Nobody waits for ``job`` any more: drop the reads that no other job wants. What is there stays."""
        if job not in resident.jobs:
            return
        resident.jobs.remove(job)
        wanted = {number for other in resident.jobs for needs in other.waiting.values() for number in needs}
        for number, task in list(resident.tasks.items()):
            if number not in wanted and self._queue.cancel(task):
                del resident.tasks[number]
                self._pool.free([resident.chunks.pop(number)])
        self._close_source_if_idle(resident)

    def _queue_tasks(self, resident: Resident, fresh: dict[int, Chunk], job: LoadJob) -> None:
        for number in job.chunks:
            if number in resident.tasks:
                self._queue.promote(resident.tasks[number], job.priority)
        if not fresh or resident.source is None:
            return
        digests = resident.model.index.partitions[resident.key[1]].digests
        chunk_bytes = resident.model.index.chunk_bytes

        def done(task: ChunkTask, error: SllmError | None) -> None:
            self._post(lambda: self._finished(resident, task, error))

        resident.chunks.update(fresh)
        tasks = [
            ChunkTask(n, n * chunk_bytes, resident.nbytes_of(n), digests[n], chunk, resident.source, done)
            for n, chunk in fresh.items()
        ]
        resident.tasks.update((task.number, task) for task in tasks)
        self._queue.put(tasks, job.priority)

    def _finished(self, resident: Resident, task: ChunkTask, error: SllmError | None) -> None:
        del resident.tasks[task.number]
        if error is not None:
            self._pool.free([resident.chunks.pop(task.number)])
            self._fail(resident, task.number, error)
        else:
            for job in list(resident.jobs):
                self._advance(resident, job, task.number)
        self._close_source_if_idle(resident)

    def _advance(self, resident: Resident, job: LoadJob, number: int) -> None:
        if number in job.lacking:
            job.lacking.discard(number)
            job.there += resident.nbytes_of(number)
            job.progress(job.there, job.total)
        for block in [block for block, lacks in job.waiting.items() if number in lacks]:
            job.waiting[block].discard(number)
            if not job.waiting[block]:
                del job.waiting[block]
                job.ready(block)
        if not job.waiting:
            resident.jobs.remove(job)
            job.done()

    def _fail(self, resident: Resident, number: int, error: SllmError) -> None:
        for job in [job for job in resident.jobs if number in job.chunks]:
            self.cancel(resident, job)
            job.failed(error)

    def _close_source_if_idle(self, resident: Resident) -> None:
        """No descriptor stays open for a partition that is not being read: its file may be deleted."""
        if not resident.tasks and resident.source is not None:
            resident.source.close()
            resident.source = None
            if not resident.chunks:
                self._residents.pop(resident.key, None)

    # --- what stays ---------------------------------------------------------------------------------
    def pin(self, digest: str, pinned: bool) -> None:
        """Keep a model in memory, or stop doing so."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)

    def reserve(self, digest: str, nbytes: int) -> None:
        """Keep room for ``nbytes`` of a model, evicting others now; 0 ends it. Raises ``PoolExhausted``."""
        before = self._reserved.pop(digest, 0)
        if not nbytes:
            return
        try:
            self._make_room(chunk_count(nbytes, self._pool.chunk_bytes) - self._used_by(digest), digest, None)
        except PoolExhausted:
            if before:
                self._reserved[digest] = before
            raise
        self._reserved[digest] = nbytes

    def evict(self, digest: str) -> int:
        """Drop a model from memory; the number of its chunks. Raises ``Conflict`` while it is being loaded."""
        residents = [resident for resident in self._residents.values() if resident.key[0] == digest]
        if any(resident.tasks for resident in residents):
            raise Conflict(f"model {digest} is being loaded; cancel the load first", field="model")
        return sum(self._drop(resident) for resident in residents)

    def forget(self, holder: str) -> None:
        """A sandbox is dead: what only it held can be used again."""
        self._pool.forget(holder)

    def hold(self, chunks: Sequence[Chunk], holder: str) -> None:
        """A sandbox is being given these chunks."""
        self._pool.hold(chunks, holder)

    def _drop(self, resident: Resident) -> int:
        del self._residents[resident.key]
        self._pool.free(resident.chunks.values())
        count = len(resident.chunks)
        resident.chunks.clear()
        return count

    def _used_by(self, digest: str) -> int:
        return sum(len(resident.chunks) for key, resident in self._residents.items() if key[0] == digest)

    def _reserved_by_others(self, digest: str) -> int:
        """Chunks that are kept free for other models."""
        return sum(
            max(chunk_count(nbytes, self._pool.chunk_bytes) - self._used_by(other), 0)
            for other, nbytes in self._reserved.items()
            if other != digest
        )

    def _make_room(self, count: int, digest: str, job: LoadJob | None) -> None:
        """Evict, least recently used first, until ``count`` chunks are free for ``digest``; or nothing at all."""
        if count <= 0:
            return
        shortage = self._pool.shortage(count + self._reserved_by_others(digest))
        victims = []
        for resident in sorted(self._residents.values(), key=lambda resident: resident.used_at):
            if shortage <= 0:
                break
            if resident.key[0] not in {digest, *self._pinned} and self._evictable(resident):
                victims.append(resident)
                shortage -= len(resident.chunks)
        if shortage > 0:
            raise self._exhausted(count, digest)
        for victim in victims:
            self._drop(victim)

    def _evictable(self, resident: Resident) -> bool:
        return not (resident.tasks or resident.jobs or resident.holders)

    def _exhausted(self, count: int, digest: str) -> PoolExhausted:
        status = self._pool.status()
        size = status.chunk_bytes
        kept = [
            f"{key[0][:19]}/{key[1]} {len(resident.chunks) * size} ({self._why_kept(resident)})"
            for key, resident in self._residents.items()
            if key[0] in self._pinned or not self._evictable(resident)
        ]
        kept += [f"retiring {status.retiring}"] if status.retiring else []
        kept += [f"reserved {others * size}"] if (others := self._reserved_by_others(digest)) else []
        return PoolExhausted(
            f"{digest[:19]} needs {count * size} bytes of the pool of {status.limit}; the rest is held by:"
            f" {', '.join(kept) or 'nothing, the pool is too small'}. Stop instances, unpin, or raise --pool-bytes",
            field="pool",
            retry_after_s=1.0,
        )

    def _why_kept(self, resident: Resident) -> str:
        if resident.key[0] in self._pinned:
            return "pinned"
        return "loading" if resident.tasks or resident.jobs else f"held by {len(resident.holders)}"

    # --- reports --------------------------------------------------------------------------------------
    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations."""
        return sum(self._reserved.values())

    def resident_bytes(self, digest: str) -> int:
        """Bytes of a model that are in memory and checked."""
        return sum(status.nbytes for status in self.status() if status.model == digest)

    def status(self) -> list[ResidentStatus]:
        """Every partition in memory, least recently used first."""
        ordered = sorted(self._residents.values(), key=lambda resident: resident.used_at)
        return [
            ResidentStatus(
                model=resident.key[0],
                partition=resident.key[1],
                nbytes=sum(resident.nbytes_of(number) for number in resident.chunks if resident.there(number)),
                total=resident.model.index.partitions[resident.key[1]].nbytes,
                pinned=resident.key[0] in self._pinned,
                holders=tuple(sorted(resident.holders)),
            )
            for resident in ordered
        ]

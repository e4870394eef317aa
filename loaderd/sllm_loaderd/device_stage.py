"""What is in the memory of devices: chunks go there from DRAM the moment they are there, over the device's own link.

The device's copy of a partition is fed from its ``Resident``. Where the pool has no room for all of it, it is fed in
parts, and the chunks of the parts that were copied are used again. Lives in the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from sllm_loaderd.device_resident import CopyChunk, DeviceResident
from sllm_loaderd.devices import Allocation, Device
from sllm_loaderd.load_job import LoadJob
from sllm_loaderd.paths import Paths
from sllm_loaderd.reader import ChunkSource
from sllm_loaderd.residency import Residency
from sllm_loaderd.resident import Resident
from sllm_loaderd.store import StoredModel
from sllm_loaderd.task import Task
from sllm_runtime.protocol.errors import Conflict, DeviceOutOfMemory, SllmError, Unavailable


class DeviceStage:
    """The partitions on devices. ``overlap``: a chunk is copied at once, not when all are in DRAM."""

    def __init__(
        self,
        residency: Residency,
        paths: Paths,
        post: Callable[[Callable[[], None]], object],
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._residency = residency
        self._paths = paths
        self._post = post
        self._overlap = overlap
        self._clock = clock
        self._partitions: list[DeviceResident] = []
        residency.on_written = self._written
        self.on_freed: Callable[[list[int]], None] = lambda ids: None
        """Called with the ids of memory that was given back."""

    # --- loading ------------------------------------------------------------------------------------
    def load(
        self,
        model: StoredModel,
        rank: int,
        device: Device,
        holder: str,
        sources: Sequence[ChunkSource] = (),
    ) -> DeviceResident:
        """The partition's memory on ``device`` for ``holder`` (empty: for whoever asks first).

        ``sources`` are this method's own. Raises ``DeviceOutOfMemory`` if what nobody has does not make room either.
        """
        part = self._find(model, rank, device, holder)
        if part is None:
            try:
                allocation = self._allocate(device, model.index.partitions[rank].nbytes)
            except BaseException:
                for source in sources:
                    source.close()
                raise
            part = DeviceResident(self._feed(model, rank, sources), device, allocation, self._clock(), feeding=True)
            self._partitions.append(part)
        elif part.feeding:
            self._residency.supply(part.resident, sources)
        else:
            part.resident, part.feeding = self._feed(model, rank, sources), True
        part.used_at = self._clock()
        part.holders |= {holder} - {""}
        return part

    def start(self, part: DeviceResident, job: LoadJob) -> None:
        """Bring what ``job`` wants to the device and tell it."""
        coming = part.coming()
        if job.begin(lambda number: number in part.there):
            job.done()
        else:
            part.jobs.append(job)
            part.pending += [number for number in job.chunks if number not in coming]
            self._residency.promote(part.resident, job.chunks, job.priority)
            for number in job.chunks:
                if number in part.copies:
                    self._paths.promote(part.copies[number], job.priority)
        self._ask(part)

    def reorder(self, part: DeviceResident, job: LoadJob, blocks: Iterable[int]) -> None:
        """``job`` wants ``blocks`` first from now on, in this order."""
        job.reorder(blocks)
        part.pending = [n for n in job.chunks if n in part.pending] + [n for n in part.pending if n not in job.chunks]
        for feed in part.feeds:
            self._residency.reorder_chunks(part.resident, [n for n in job.chunks if n in feed.lacking])
        self._paths.reorder([part.copies[number] for number in job.chunks if number in part.copies])

    def cancel(self, part: DeviceResident, job: LoadJob) -> None:
        """Nobody waits for ``job`` any more: drop what no other job wants. What is on the device stays."""
        if job not in part.jobs:
            self._settle(part)  # it had yet to start: what was to feed it ends here
            return
        part.jobs.remove(job)
        wanted = {number for other in part.jobs for number in other.lacking}
        part.pending = [number for number in part.pending if number in wanted]
        for number in [number for number in part.landed if number not in wanted]:
            part.landed.remove(number)
            self._residency.give_back(part.resident, number)
        for feed in [feed for feed in part.feeds if not feed.lacking & wanted]:
            part.feeds.remove(feed)
            self._residency.cancel(part.resident, feed)
        for number, copy in list(part.copies.items()):
            if number not in wanted and self._paths.cancel(copy):
                del part.copies[number]
                self._residency.give_back(part.resident, number)
        self._ask(part)

    def there(self, model: StoredModel, rank: int, device: Device, holder: str) -> set[int]:
        """Chunks of the partition that ``load`` would not have to bring to the device."""
        part = self._find(model, rank, device, holder)
        return part.there if part is not None else set()

    def _find(self, model: StoredModel, rank: int, device: Device, holder: str) -> DeviceResident | None:
        key = (model.checkpoint.digest, rank)
        found = [p for p in self._partitions if p.resident.key == key and p.device is device and p.open_to(holder)]
        # Its own before one that was loaded for whoever asks first.
        return max(found, key=lambda part: holder in part.holders, default=None)

    def _feed(self, model: StoredModel, rank: int, sources: Sequence[ChunkSource]) -> Resident:
        return self._residency.feed(model, rank, sources)

    def _ask(self, part: DeviceResident) -> None:
        """Have DRAM load as many of the pending chunks as there is room for."""
        resident = part.resident
        missing = [number for number in part.pending if number not in resident.chunks]
        room = self._residency.room(resident, len(missing)) if missing else 0
        part.in_parts = part.in_parts or room < len(missing)
        writing = resident.write_back is not None and resident.write_back.running
        if part.pending and (room or not missing or not (part.feeds or part.copies or writing)):
            # With no room and nothing that will make some this raises what says who holds the pool.
            stop = missing[room] if 0 < room < len(missing) else None
            count = part.pending.index(stop) if stop is not None else len(part.pending)
            batch, part.pending = part.pending[:count], part.pending[count:]
            self._load(part, tuple(batch))
        if part.landed and (part.in_parts or not (part.pending or part.feeds)):
            # However the last feed has ended: what landed before it failed is wanted by others.
            landed, part.landed = part.landed, []
            self._copy(part, landed)
        self._settle(part)

    def _load(self, part: DeviceResident, numbers: tuple[int, ...]) -> None:
        def done() -> None:
            part.feeds.remove(feed)
            self._ask(part)

        def failed(error: SllmError) -> None:
            part.feeds.remove(feed)
            self._fail(part, numbers, error)
            self._ask(part)

        feed = LoadJob(
            needs={},
            chunks=numbers,
            sizes=part.resident.nbytes_of,
            priority=min(job.priority for job in part.jobs),
            ready=lambda block: None,
            progress=lambda there, total: None,
            done=done,
            failed=failed,
            arrived=lambda number: self._arrived(part, number),
        )
        part.feeds.append(feed)
        try:
            self._residency.load(part.resident.model, part.resident.key[1], feed)
        except SllmError as error:
            failed(error)
            return
        self._residency.start(part.resident, feed)

    def _arrived(self, part: DeviceResident, number: int) -> None:
        self._residency.borrow(part.resident, number)
        if self._overlap or part.in_parts:
            self._copy(part, [number])
        else:
            part.landed.append(number)

    def _copy(self, part: DeviceResident, numbers: Sequence[int]) -> None:
        resident, size = part.resident, part.model.index.chunk_bytes

        def done(task: Task, error: SllmError | None) -> None:
            self._post(lambda: self._copied(part, task.number, error))

        copies = [
            CopyChunk(
                n,
                resident.nbytes_of(n),
                resident.chunks[n],
                (part.device, part.allocation, n * size),
                done,
                self._residency.pin_memory,
            )
            for n in numbers
        ]
        part.copies.update((copy.number, copy) for copy in copies)
        self._paths.put(copies, min((job.priority for job in part.jobs), default=0))

    def _copied(self, part: DeviceResident, number: int, error: SllmError | None) -> None:
        del part.copies[number]
        self._residency.give_back(part.resident, number, drop=part.in_parts)
        if error is not None:
            self._fail(part, (number,), error)
        else:
            part.there.add(number)
            for job in list(part.jobs):
                if job.advance(number):
                    part.jobs.remove(job)
                    job.done()
        self._ask(part)

    def _fail(self, part: DeviceResident, numbers: Sequence[int], error: SllmError) -> None:
        for job in [job for job in part.jobs if not job.lacking.isdisjoint(numbers)]:
            if job in part.jobs:  # ending one may have ended another
                self.cancel(part, job)
                job.failed(error)

    def _written(self, resident: Resident) -> None:
        """A chunk that could not be dropped while it was written to the SSD tier can be now."""
        for part in [part for part in self._partitions if part.resident is resident and part.in_parts]:
            self._residency.drop(resident, part.there)
            self._ask(part)

    def _settle(self, part: DeviceResident) -> None:
        if part.feeding and not (part.feeds or part.pending or part.copies or part.landed):
            part.feeding = part.in_parts = False
            self._residency.fed(part.resident)
        if part.leaving and not part.copies and part in self._partitions:
            self._partitions.remove(part)
            part.allocation.free()
            self.on_freed([part.id])

    # --- what stays ---------------------------------------------------------------------------------
    def forget(self, holder: str) -> None:
        """A sandbox is dead: the device memory that only it had is free again."""
        for part in [part for part in self._partitions if holder in part.holders]:
            part.holders.discard(holder)
            if not part.holders and not (part.jobs and part.allocation.shareable):
                self._leave(part)

    def adopt(self, part: DeviceResident) -> None:
        """A partition that an earlier loaderd brought to a device, whole and checked."""
        self._partitions.append(part)

    def hold(self, id: int, holders: Iterable[str]) -> bool:
        """Whether the memory ``id`` is here; if so ``holders`` have it."""
        part = next((part for part in self._partitions if part.id == id), None)
        if part is not None:
            part.holders.update(holders)
        return part is not None

    def has(self, digest: str) -> bool:
        """Whether any part of a model is on a device or on its way to one."""
        return any(part.resident.key[0] == digest for part in self._partitions)

    def evict(self, digest: str) -> None:
        """Drop what nobody has of a model. Raises ``Conflict`` while it is being loaded to a device."""
        parts = [part for part in self._partitions if part.resident.key[0] == digest]
        if any(part.jobs for part in parts):
            raise Conflict(f"model {digest} is being loaded to a device; cancel the load first", field="model")
        for part in parts:
            if not part.holders:
                self._leave(part)

    def close(self) -> None:
        """No task runs any more: give back all device memory."""
        for part in self._partitions:
            part.allocation.free()
        self._partitions.clear()

    def _leave(self, part: DeviceResident) -> None:
        part.leaving = True
        for job in list(part.jobs):
            self.cancel(part, job)
            job.failed(Unavailable(f"the memory on {part.device.name} went with the sandbox that had it; load again"))
        self._settle(part)

    def _allocate(self, device: Device, nbytes: int) -> Allocation:
        """Memory on ``device``; what nobody has goes for it, least recently used first."""
        for part in sorted(self._partitions, key=lambda part: part.used_at):
            try:
                return device.allocate(nbytes)
            except DeviceOutOfMemory:
                if part.device is device and part.idle:
                    self._leave(part)
        return device.allocate(nbytes)

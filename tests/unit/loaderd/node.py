"""The pipeline of a node without its sockets: real files, chunks, threads and (fake) devices; the test is its loop."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.device_stage import DeviceStage
from sllm_loaderd.devices.fake import FakeAllocation, FakeDevice
from sllm_loaderd.devices.link import Link
from sllm_loaderd.disk.local import LocalPartition
from sllm_loaderd.files import chunk_digest
from sllm_loaderd.load_job import LoadJob, plan_job
from sllm_loaderd.loading import DeviceLoad, Loading, MemoryLoad
from sllm_loaderd.paths import Paths
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.reader import ChunkSource
from sllm_loaderd.residency import Residency
from sllm_loaderd.store import ModelStore, StoredModel
from sllm_loaderd.write_back import SsdTier
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.loader import START
from tests.fixtures.loaderd import numbers_model
from tests.fixtures.waiting import GIVE_UP_S

CHUNK = 4096
WAIT = GIVE_UP_S


@contextlib.contextmanager
def stored_model(directory: Path, *, layers: int = 4, seed: int = 0) -> Iterator[StoredModel]:
    """A model of 4 KiB chunks in a store: one chunk a layer and a few around them; a block each."""
    numbers_model(directory / "source", layers=layers, rows=16, seed=seed)
    with contextlib.closing(ModelStore(directory / "data")) as store:
        options = ConvertOptions(chunk_bytes=CHUNK, min_block=0)
        with store.staging() as staging:
            digest = convert_directory(directory / "source", staging, options=options)
            store.adopt(staging, digest)
        with contextlib.closing(store.open(digest)) as model:
            yield model


class RemoteSource:
    """The bytes of a local partition by another path, with faults: chunks it cannot bring, chunks it brings wrong.

    Reads wait while ``gate`` is closed. ``closed`` says whether it was given back.
    """

    def __init__(self, model: StoredModel, path: str = "peer x") -> None:
        self.path = path
        self.name = path
        self._file = LocalPartition(model.checkpoint.directory, 0, model.index.partitions[0].nbytes)
        self.gate = threading.Event()
        self.gate.set()
        self.lost: set[int] = set()
        self.wrong: set[int] = set()
        self.read_chunks: list[int] = []
        self.closed = False

    def read(self, view: memoryview, offset: int) -> str:
        number = offset // CHUNK
        self.read_chunks.append(number)
        if not self.gate.wait(WAIT):
            raise Unavailable(f"{self.name}: the gate stayed closed")
        if number in self.lost:
            raise Unavailable(f"{self.name}: chunk {number} is lost")
        self._file.read(view, offset)
        if number in self.wrong:
            view[0] ^= 1
        return ""

    def close(self) -> None:
        assert not self.closed, "a source is closed once"
        self.closed = True
        self._file.close()


class PrivateDevice(FakeDevice):
    """A device whose memory a sandbox could write to, as that of a GPU."""

    def allocate(self, nbytes: int) -> FakeAllocation:
        made = super().allocate(nbytes)
        made.shareable = False
        return made


@dataclass(eq=False)
class Wish:
    """A load and all that it was told."""

    holder: str
    load: Loading | None = None
    ready: list[int] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)
    ended: list[SllmError | None] = field(default_factory=list)
    cancelled: bool = False

    @property
    def job(self) -> LoadJob:
        assert self.load is not None
        return self.load.job

    @property
    def over(self) -> bool:
        return bool(self.ended) or self.cancelled


class Node:
    """Pool, paths, residency and device stage. Nothing that threads post is done before ``turn``."""

    def __init__(
        self,
        *,
        chunks: int = 16,
        devices: int = 0,
        device_bytes: int = 2**21,
        shareable: bool = True,
        ssd: SsdTier | None = None,
        overlap: bool = True,
        threads: int = 2,
    ) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.pool = ChunkPool(CHUNK, chunks * CHUNK, 0)
        self.paths = Paths(lambda path: threads)
        self.residency = Residency(self.pool, self.paths, self.posted.put, ssd=ssd)
        kind = FakeDevice if shareable else PrivateDevice
        self.devices = [kind(number, device_bytes, Link(1e12)) for number in range(devices)]
        self.stage = DeviceStage(self.residency, self.paths, self.posted.put, overlap=overlap)

    def wish(
        self,
        model: StoredModel,
        *,
        sources: Sequence[ChunkSource] | None = None,
        blocks: Sequence[tuple[int, int]] = (),
        priority: str = START,
        device: int | None = None,
        holder: str = "w",
        on_ready: Callable[[Wish, int], None] = lambda wish, block: None,
    ) -> Wish:
        """Load for ``holder`` to memory, or to a device; begun. Raises what a load raises."""
        wish = Wish(holder)

        def ready(block: int) -> None:
            wish.ready.append(block)
            on_ready(wish, block)

        job = plan_job(
            model,
            0,
            blocks,
            priority,
            ready=ready,
            progress=lambda there, total: wish.progress.append((there, total)),
            done=lambda: wish.ended.append(None),
            failed=wish.ended.append,
        )
        there = self.stage.there(model, 0, self.devices[device], holder) if device is not None else set()
        opened: list[ChunkSource] = []
        if self.residency.lacks(model, 0, [number for number in job.chunks if number not in there]):
            opened = model.open_sources(0) if sources is None else list(sources)
        else:
            for source in sources or ():
                source.close()
        if device is not None:
            part = self.stage.load(model, 0, self.devices[device], holder, opened)
            wish.load = DeviceLoad(model, 0, job, self.stage, part)
        else:
            wish.load = MemoryLoad(model, 0, job, self.residency, self.residency.load(model, 0, job, opened))
            if holder:
                self.residency.hold(wish.load.chunks, holder)
        wish.load.start()
        return wish

    def cancel(self, wish: Wish) -> None:
        assert wish.load is not None
        wish.cancelled = not wish.ended
        wish.load.cancel()

    def gone(self, holder: str) -> None:
        self.residency.forget(holder)
        self.stage.forget(holder)

    def turn(self) -> None:
        """Do what was posted so far."""
        while not self.posted.empty():
            self.posted.get()()

    def until(self, condition: Callable[[], object]) -> None:
        """Do what is posted until ``condition`` holds."""
        while not condition():
            self.posted.get(timeout=WAIT)()

    def quiet(self) -> bool:
        """Whether nothing is queued or running."""
        return not any(sum(status.queued.values()) for status in self.paths.status())

    def settle(self) -> None:
        """Do everything there is to do; gates have to be open."""
        until = time.monotonic() + WAIT
        while not self.quiet() or not self.posted.empty():
            assert time.monotonic() < until, "something never ends"
            with contextlib.suppress(queue.Empty):  # a thread may be between telling its end and waiting again
                self.posted.get(timeout=0.01)()

    def close(self) -> None:
        self.paths.close()
        self.turn()
        self.residency.close()
        self.stage.close()
        self.pool.close()
        for device in self.devices:
            device.close()


def in_memory(wish: Wish, number: int) -> bool:
    """Whether a chunk of a load to memory is there with the bytes that the index states."""
    assert isinstance(wish.load, MemoryLoad)
    resident, model = wish.load.resident, wish.load.model
    nbytes = resident.nbytes_of(number)
    with resident.chunks[number].view[:nbytes] as view:
        return chunk_digest(view) == model.index.partitions[0].digests[number]


def on_device(wish: Wish, number: int) -> bool:
    """The same of a load to a device."""
    assert isinstance(wish.load, DeviceLoad)
    model = wish.load.model
    fd = wish.load.allocation.export()
    assert fd is not None
    try:
        data = os.pread(fd, wish.load.part.resident.nbytes_of(number), number * CHUNK)
    finally:
        os.close(fd)
    return chunk_digest(data) == model.index.partitions[0].digests[number]


def check_ready(wish: Wish, block: int) -> None:
    """A block may be told only when all its bytes are there and right."""
    right = on_device if isinstance(wish.load, DeviceLoad) else in_memory
    if wish.load is not None:
        assert all(right(wish, number) for number in wish.job.needs[block])

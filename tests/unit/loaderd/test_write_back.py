"""The SSD copy of what comes from elsewhere: written beside the load, and whatever goes wrong with it stops only it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.store import StoredModel
from sllm_loaderd.write_back import SsdWrite, _Copy
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import PoolExhausted, Unavailable
from tests.unit.loaderd.node import CHUNK, WAIT, Node, RemoteSource, check_ready, on_device


class HookedTier:
    """The real tier, with something that happens before each write."""

    def __init__(self, directory: Path, before: Callable[[int], None]) -> None:
        self.real = SsdDirectory(directory, 2**30)
        self.before = before

    def begin(self, model: StoredModel, rank: int) -> SsdWrite | None:
        write = self.real.begin(model, rank)
        return None if write is None else HookedWrite(write, self.before)


class HookedWrite:
    def __init__(self, real: SsdWrite, before: Callable[[int], None]) -> None:
        self.real = real
        self.before = before
        self.finish = real.finish
        self.abandon = real.abandon

    def write(self, number: int, view: memoryview) -> None:
        self.before(number)
        self.real.write(number, view)


class SlowSource(RemoteSource):
    """The last chunk is waited for, and does not come."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model)
        self.go = threading.Event()
        self.last = len(model.index.partitions[0].digests) - 1

    def read(self, view: memoryview, offset: int) -> str:
        if offset // CHUNK == self.last:
            assert self.go.wait(WAIT)
            raise Unavailable("it is gone")
        return super().read(view, offset)


def copy_of(model: StoredModel, tier: SsdDirectory) -> bytes | None:
    opened = tier.open(model.checkpoint.digest, 0, model.index.partitions[0].nbytes)
    if opened is None:
        return None
    data = bytearray(opened.nbytes)
    opened.read(memoryview(data), 0)
    opened.close()
    return bytes(data)


def original(model: StoredModel) -> bytes:
    return (model.checkpoint.directory / partition_name(0)).read_bytes()


def test_a_remote_load_leaves_a_copy_and_a_local_one_none(tmp_path: Path, model: StoredModel) -> None:
    tier = SsdDirectory(tmp_path / "ssd", 2**30)
    with contextlib.closing(Node(ssd=tier)) as node:
        local = node.wish(model, holder="")
        node.until(lambda: local.ended)
        node.settle()
        assert copy_of(model, tier) is None
        node.residency.evict(model.checkpoint.digest)
        remote = node.wish(model, sources=[RemoteSource(model)])
        node.until(lambda: remote.ended)
        node.settle()
        assert copy_of(model, tier) == original(model)
        node.gone("w")
        node.residency.evict(model.checkpoint.digest)


def test_parts_of_a_model_become_a_copy_when_the_last_one_is_there(tmp_path: Path, model: StoredModel) -> None:
    tier = SsdDirectory(tmp_path / "ssd", 2**30)
    with contextlib.closing(Node(ssd=tier)) as node:
        for blocks in ([(2, 2)], [(0, 0)], []):
            assert copy_of(model, tier) is None
            wish = node.wish(model, sources=[RemoteSource(model)], blocks=blocks)
            node.until(lambda wish=wish: wish.ended)  # type: ignore[misc]
            node.settle()
        assert copy_of(model, tier) == original(model)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), Unavailable("a bad disk")])
def test_a_disk_that_fails_ends_the_copy_and_the_load_goes_on(
    tmp_path: Path, model: StoredModel, failure: Exception
) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise failure

    tier = HookedTier(tmp_path / "ssd", fail)
    with contextlib.closing(Node(ssd=tier)) as node:
        wish = node.wish(model, sources=[RemoteSource(model)], holder="")
        node.until(lambda: wish.ended)
        assert wish.ended == [None]
        node.settle()
        assert os.listdir(tmp_path / "ssd") == []
        node.residency.evict(model.checkpoint.digest)
        assert node.pool.status().used == 0


def test_a_tier_that_is_off_or_full_is_no_error(tmp_path: Path, model: StoredModel) -> None:
    tier = SsdDirectory(tmp_path / "ssd", 0)
    with contextlib.closing(Node(ssd=tier)) as node:
        wish = node.wish(model, sources=[RemoteSource(model)])
        node.until(lambda: wish.ended)
        node.settle()
        assert wish.ended == [None]
        assert copy_of(model, tier) is None


def test_the_load_does_not_wait_for_its_copy_and_a_start_takes_the_room_of_one(
    tmp_path: Path, model: StoredModel, other: StoredModel
) -> None:
    gate, began = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        began.set()
        assert gate.wait(WAIT)

    tier = HookedTier(tmp_path / "ssd", wait)
    chunks = len(model.index.partitions[0].digests)
    with contextlib.closing(Node(ssd=tier, chunks=chunks + 2, threads=1)) as node:
        wish = node.wish(model, sources=[RemoteSource(model)], holder="")
        node.until(lambda: wish.ended)  # while the disk stands still
        assert began.wait(WAIT)
        (resident,) = node.residency.residents()
        assert resident.write_back is not None
        assert resident.write_back.running
        gate.set()
        node.until(lambda: not resident.write_back.running)  # type: ignore[union-attr]
        start = node.wish(other)  # whatever of the copy waits still is given up for it
        node.until(lambda: start.ended)
        assert start.ended == [None]
        node.settle()
        assert all(not name.startswith(".") for name in os.listdir(tmp_path / "ssd"))


def test_a_model_of_which_a_chunk_is_being_written_makes_room_for_nobody(
    tmp_path: Path, model: StoredModel, other: StoredModel
) -> None:
    gate, began = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        began.set()
        assert gate.wait(WAIT)

    tier = HookedTier(tmp_path / "ssd", wait)
    with contextlib.closing(Node(ssd=tier, chunks=len(model.index.partitions[0].digests) + 1, threads=1)) as node:
        wish = node.wish(model, sources=[RemoteSource(model)], holder="")
        node.until(lambda: wish.ended)
        try:
            assert began.wait(WAIT)
            with pytest.raises(PoolExhausted, match="being written to the SSD tier"):
                node.wish(other)
        finally:
            gate.set()
        node.settle()
        late = node.wish(other)
        node.until(lambda: late.ended)
        assert late.ended == [None]


def test_a_model_that_makes_room_is_written_no_further(tmp_path: Path, model: StoredModel, other: StoredModel) -> None:
    """Its memory has other bytes by then."""
    tier = SsdDirectory(tmp_path / "ssd", 2**30)
    with contextlib.closing(Node(ssd=tier, chunks=len(model.index.partitions[0].digests) + 1, threads=1)) as node:
        busy = RemoteSource(other, "disk")
        busy.gate.clear()
        first = node.wish(other, sources=[busy], blocks=[(0, 0)], holder="")  # the disk has one thread, which is stuck
        wish = node.wish(model, sources=[RemoteSource(model)], blocks=[(1, 3)], holder="")
        node.until(lambda: wish.ended)
        (resident,) = (resident for resident in node.residency.residents() if resident.model is model)
        assert resident.write_back is not None
        assert resident.write_back.busy
        late = node.wish(other, sources=[])
        assert not node.residency.has(model.checkpoint.digest)
        busy.gate.set()
        node.until(lambda: first.ended and late.ended)
        node.settle()
        assert not resident.write_back.busy
        assert os.listdir(tmp_path / "ssd") == []


def test_memory_that_is_being_written_is_not_used_again_before(tmp_path: Path, model: StoredModel) -> None:
    gate, began = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        began.set()
        assert gate.wait(WAIT)

    tier = HookedTier(tmp_path / "ssd", wait)
    with contextlib.closing(Node(ssd=tier, chunks=2, devices=1, threads=1)) as node:
        first = node.wish(model, sources=[RemoteSource(model)], blocks=[(2, 2)], holder="")
        node.until(lambda: first.ended)
        assert began.wait(WAIT)  # its one chunk stands still on its way to the disk
        wish = node.wish(model, sources=[RemoteSource(model)], device=0, on_ready=check_ready)
        node.until(lambda: len(wish.job.lacking) < 4)  # the others go through what is left of the pool
        (resident,) = node.residency.residents()
        assert set(first.job.chunks) <= set(resident.chunks)
        gate.set()
        node.until(lambda: wish.ended)
        assert wish.ended == [None]
        assert all(on_device(wish, number) for number in wish.job.chunks)
        node.settle()
        assert copy_of(model, tier.real) in (None, original(model))


def test_one_chunk_of_memory_is_enough_for_a_device_and_a_slow_disk(tmp_path: Path, model: StoredModel) -> None:
    tier = HookedTier(tmp_path / "ssd", lambda number: time.sleep(0.005))
    with contextlib.closing(Node(ssd=tier, chunks=1, devices=1)) as node:
        wish = node.wish(model, sources=[RemoteSource(model)], device=0, on_ready=check_ready)
        node.until(lambda: wish.ended)
        assert wish.ended == [None]
        node.settle()


def test_a_node_that_stops_leaves_no_half_copy(tmp_path: Path, model: StoredModel) -> None:
    tier = SsdDirectory(tmp_path / "ssd", 2**30)
    source = SlowSource(model)
    with contextlib.closing(Node(ssd=tier)) as node:
        wish = node.wish(model, sources=[source])
        node.until(lambda: wish.job.lacking == {source.last})
        (resident,) = node.residency.residents()
        node.until(lambda: resident.write_back is not None and not resident.write_back.busy)
        assert len(os.listdir(tmp_path / "ssd")) == 1
        source.go.set()
    assert os.listdir(tmp_path / "ssd") == []


def test_who_stops_a_copy_does_not_wait_until_it_has_begun(tmp_path: Path, model: StoredModel) -> None:
    """Others are removed for it first, which takes seconds; who stops it is the event loop."""
    begins, go = threading.Event(), threading.Event()

    class SlowTier(HookedTier):
        def begin(self, model: StoredModel, rank: int) -> SsdWrite | None:
            begins.set()
            assert go.wait(WAIT)
            return super().begin(model, rank)

    copy = _Copy(SlowTier(tmp_path / "ssd", lambda _: None), model, 0, 1)
    with memoryview(bytes(8)) as view, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(copy.write, 0, view)
        assert begins.wait(WAIT)
        stopping = threading.Thread(target=lambda: copy.stop(now=False), daemon=True)
        stopping.start()
        stopping.join(WAIT)
        assert not stopping.is_alive()
        go.set()
        writing.result(WAIT)
    copy.settle()
    assert not list((tmp_path / "ssd").iterdir())

"""From sources to memory and devices: each hop at once, other sources where one fails, orders that change, faults."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sllm_loaderd.chunk import ChunkState
from sllm_loaderd.devices.fake import FakeAllocation
from sllm_loaderd.loading import DeviceLoad
from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import (
    Conflict,
    CorruptCheckpoint,
    DeviceOutOfMemory,
    InvalidCheckpoint,
    PoolExhausted,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.loader import PREWARM
from tests.fixtures.waiting import until
from tests.unit.loaderd.node import CHUNK, WAIT, Node, RemoteSource, check_ready, in_memory, on_device, stored_model


@pytest.fixture
def node() -> Iterator[Node]:
    with contextlib.closing(Node(devices=2)) as made:
        yield made


def size_of(model: StoredModel) -> int:
    return len(model.index.partitions[0].digests)


# --- sources -----------------------------------------------------------------------------------------
def test_blocks_are_ready_in_order_and_right_and_the_second_load_needs_no_source(
    node: Node, model: StoredModel
) -> None:
    wish = node.wish(model, on_ready=check_ready)
    node.until(lambda: wish.ended)
    assert wish.ended == [None]
    assert sorted(wish.ready) == list(range(len(model.block_chunks[0])))
    assert wish.progress[-1] == (model.index.partitions[0].nbytes,) * 2
    again = node.wish(model, sources=[])
    assert (again.ready, again.ended) == ([], [None])


@pytest.mark.parametrize("fault", ["lost", "wrong"])
def test_a_chunk_that_one_source_cannot_bring_comes_from_the_next(node: Node, model: StoredModel, fault: str) -> None:
    first, second = RemoteSource(model, "peer a"), RemoteSource(model, "s3 b")
    getattr(first, fault).update({1, 3})
    wish = node.wish(model, sources=[first, second], on_ready=check_ready)
    node.until(lambda: wish.ended)
    assert wish.ended == [None]
    assert {1, 3} <= set(second.read_chunks)
    assert first.closed
    assert second.closed


def test_when_the_last_source_fails_the_load_does_and_frees_everything(node: Node, model: StoredModel) -> None:
    first, second = RemoteSource(model, "peer a"), RemoteSource(model, "s3 b")
    first.lost.add(2)
    second.wrong.add(2)
    wish = node.wish(model, sources=[first, second], holder="")
    node.until(lambda: wish.ended)
    (error,) = wish.ended
    assert isinstance(error, Unavailable | CorruptCheckpoint)
    assert "chunk 2" in error.message
    node.settle()
    node.residency.evict(model.checkpoint.digest)
    assert node.pool.status().used == 0
    assert first.closed
    assert second.closed


def test_two_paths_share_the_chunks_of_one_load(node: Node, model: StoredModel) -> None:
    slow, quick = RemoteSource(model, "s3 slow"), RemoteSource(model, "peer quick")
    slow.gate.clear()
    wish = node.wish(model, sources=[slow, quick])
    stuck = 2  # what the threads of the slow path have in their hands
    node.until(lambda: len(wish.job.lacking) == stuck)
    slow.gate.set()
    node.until(lambda: wish.ended)
    assert wish.ended == [None]
    assert len(set(slow.read_chunks)) == stuck
    assert set(slow.read_chunks).isdisjoint(quick.read_chunks)


def test_a_prefetch_that_a_start_waits_for_is_read_first(model: StoredModel, other: StoredModel) -> None:
    with contextlib.closing(Node(chunks=64, threads=1)) as node:
        gated = RemoteSource(model, "disk")
        gated.gate.clear()
        first = node.wish(model, sources=[gated], blocks=[(0, 0)], priority=PREWARM)
        later = [node.wish(each, priority=PREWARM) for each in (other, model)]
        start = node.wish(model, blocks=[(3, 3)])
        gated.gate.set()
        node.until(lambda: start.ended)
        assert not any(wish.ended for wish in later)
        node.until(lambda: all(wish.ended for wish in (first, *later)))


def test_the_order_of_blocks_may_change_while_the_load_runs(model: StoredModel) -> None:
    with contextlib.closing(Node(threads=1, devices=1)) as node:
        for device in (None, 0):
            gated = RemoteSource(model, "disk")
            gated.gate.clear()
            wish = node.wish(model, sources=[gated], device=device, holder="", on_ready=check_ready)
            assert wish.load is not None
            last = len(model.block_chunks[0]) - 1
            wish.load.reorder([(last, last), (2, 2)])
            with pytest.raises(InvalidCheckpoint, match="blocks"):
                wish.load.reorder([(0, 99)])
            gated.gate.set()
            node.until(lambda wish=wish: wish.ended)  # type: ignore[misc]
            assert wish.ready[:2] == [last, 2]
            node.settle()
            node.stage.evict(model.checkpoint.digest)
            node.residency.evict(model.checkpoint.digest)


# --- faults ------------------------------------------------------------------------------------------
def test_a_file_that_is_cut_short_or_changed_during_a_load_is_named(node: Node, tmp_path: Path) -> None:
    with stored_model(tmp_path / "m") as model:
        path = model.checkpoint.directory / partition_name(0)
        data = path.read_bytes()
        for spoil, says in ((lambda: os.truncate(path, CHUNK), "ends at byte|was changed"),
                            (lambda: path.write_bytes(data[:-1] + b"!"), "was changed")):  # fmt: skip
            sources = model.open_sources(0)
            spoil()
            wish = node.wish(model, sources=sources, holder="")
            node.until(lambda wish=wish: wish.ended)  # type: ignore[misc]
            (error,) = wish.ended
            assert isinstance(error, CorruptCheckpoint)
            with pytest.raises(CorruptCheckpoint, match=rf"partition_0\.bin.*({says})"):
                raise error
            path.write_bytes(data)
            node.settle()
        wish = node.wish(model)
        node.until(lambda: wish.ended)
        assert wish.ended == [None]


def test_a_pool_that_is_too_small_says_so_and_keeps_what_is_there(model: StoredModel, other: StoredModel) -> None:
    with contextlib.closing(Node(chunks=size_of(model) + 1)) as node:
        wish = node.wish(model)
        node.until(lambda: wish.ended)
        source = RemoteSource(other)
        with pytest.raises(PoolExhausted, match=r"held by 1"):
            node.wish(other, sources=[source])
        assert source.closed
        node.gone("w")
        second = node.wish(other)
        node.until(lambda: second.ended)
        assert node.residency.lacks(model, 0, [0])


# --- devices -----------------------------------------------------------------------------------------
def test_a_chunk_goes_to_its_device_while_others_are_still_read(node: Node, model: StoredModel) -> None:
    gated = RemoteSource(model, "disk")
    first = node.wish(model, sources=[gated], blocks=[(0, 0)])
    node.until(lambda: first.ended)
    slow = RemoteSource(model, "disk")
    slow.gate.clear()
    wish = node.wish(model, sources=[slow], device=0, on_ready=check_ready)
    node.until(lambda: wish.ready == [0])  # from DRAM, while the disk is stuck
    slow.gate.set()
    node.until(lambda: wish.ended)
    assert wish.ended == [None]
    assert all(on_device(wish, number) for number in range(size_of(model)))
    assert node.devices[0].used > 0
    node.gone("w")
    assert node.devices[0].used == 0
    node.settle()
    assert not node.residency.lacks(model, 0, range(size_of(model)))  # staging stays as the DRAM tier


def test_without_overlap_nothing_is_copied_before_all_is_in_memory(model: StoredModel) -> None:
    with contextlib.closing(Node(devices=1, overlap=False)) as node:
        slow = RemoteSource(model, "disk")
        slow.gate.clear()
        first = node.wish(model, sources=[slow], blocks=[(0, 0)], holder="")
        slow.gate.set()
        node.until(lambda: first.ended)
        slow = RemoteSource(model, "disk")
        slow.gate.clear()
        wish = node.wish(model, sources=[slow], device=0)
        assert not any(status.path.startswith("link") for status in node.paths.status())
        slow.gate.set()
        node.until(lambda: wish.ended)
        assert all(on_device(wish, number) for number in range(size_of(model)))


def test_without_overlap_what_had_landed_is_copied_when_another_load_fails(model: StoredModel) -> None:
    with contextlib.closing(Node(devices=1, overlap=False)) as node:
        first, second = RemoteSource(model, "disk"), RemoteSource(model, "disk")
        first.gate.clear()
        second.gate.clear()
        first.lost = second.lost = {size_of(model) - 1}
        some = node.wish(model, sources=[first], blocks=[(0, 0)], device=0)
        all_of_it = node.wish(model, sources=[second], device=0)
        first.gate.set()
        second.gate.set()
        node.until(lambda: some.ended and all_of_it.ended)
        assert some.ended == [None]
        assert isinstance(all_of_it.ended[0], SllmError)


def test_without_overlap_what_had_landed_is_let_go_with_its_load(model: StoredModel) -> None:
    with contextlib.closing(Node(devices=1, overlap=False)) as node:
        first = node.wish(model, blocks=[(0, 0)], holder="")
        node.until(lambda: first.ended)
        slow = RemoteSource(model, "disk")
        slow.gate.clear()
        wish = node.wish(model, sources=[slow], device=0, holder="")
        assert isinstance(wish.load, DeviceLoad)
        assert wish.load.part.landed == list(first.job.chunks)
        node.cancel(wish)
        slow.gate.set()
        node.settle()
        node.stage.evict(model.checkpoint.digest)
        node.residency.evict(model.checkpoint.digest)
        assert (node.pool.status().used, node.devices[0].used) == (0, 0)


def test_a_model_larger_than_the_pool_goes_to_a_device_in_parts(model: StoredModel) -> None:
    with contextlib.closing(Node(chunks=3, devices=1)) as node:
        wish = node.wish(model, device=0, on_ready=check_ready)
        node.until(lambda: wish.ended)
        assert wish.ended == [None]
        assert all(on_device(wish, number) for number in range(size_of(model)))
        node.settle()
        assert node.pool.status().used <= 3 * CHUNK
        with pytest.raises(PoolExhausted):
            node.wish(model)  # to memory it needs all of it


def test_a_pool_that_others_hold_fails_a_device_load_with_a_reason(model: StoredModel, other: StoredModel) -> None:
    with contextlib.closing(Node(chunks=size_of(model), devices=1)) as node:
        holding = node.wish(model)
        node.until(lambda: holding.ended)
        wish = node.wish(other, device=0)
        (error,) = wish.ended
        assert isinstance(error, PoolExhausted)
        assert "held by 1" in error.message
        node.gone("w")
        assert node.devices[0].used == 0


def test_device_memory_that_nobody_has_makes_room_and_what_somebody_has_does_not(
    model: StoredModel, other: StoredModel
) -> None:
    with contextlib.closing(Node(devices=1)) as node:
        for each in (model, other):  # 2 MiB hold one of them
            prefetch = node.wish(each, device=0, holder="", priority=PREWARM)
            node.until(lambda prefetch=prefetch: prefetch.ended)  # type: ignore[misc]
        mine = node.wish(other, device=0, holder="mine")
        assert mine.ended == [None]  # what was prefetched is taken over
        with pytest.raises(DeviceOutOfMemory):
            node.wish(model, device=0, holder="late")
        node.gone("mine")
        late = node.wish(model, device=0, holder="late")
        node.until(lambda: late.ended)
        assert late.ended == [None]


def test_what_one_sandbox_may_have_written_no_other_one_gets(model: StoredModel) -> None:
    with contextlib.closing(Node(devices=1, device_bytes=2**22, shareable=False)) as node:
        nobodys = node.wish(model, device=0, holder="")
        first, second = (node.wish(model, device=0, holder=holder) for holder in "ab")
        parts = [wish.load.part for wish in (nobodys, first, second) if isinstance(wish.load, DeviceLoad)]
        assert parts[0] is parts[1]
        assert parts[1] is not parts[2]
        node.gone("a")
        node.until(lambda: nobodys.ended and second.ended)
        assert isinstance(nobodys.ended[0], Unavailable)
        assert second.ended == [None]
        assert node.devices[0].used == 2**21


def test_shared_device_memory_serves_all_who_only_read_it(node: Node, model: StoredModel) -> None:
    nobodys = node.wish(model, device=0, holder="")
    first, second = (node.wish(model, device=0, holder=holder) for holder in "ab")
    node.gone("a")
    node.gone("b")
    node.until(lambda: nobodys.ended)
    assert nobodys.ended == first.ended == second.ended == [None]


def test_each_device_has_a_copy_of_its_own_and_makes_room_for_no_other(model: StoredModel, other: StoredModel) -> None:
    with contextlib.closing(Node(devices=2, chunks=32)) as node:
        for device in range(2):
            prefetch = node.wish(model, device=device, holder="", on_ready=check_ready)
            node.until(lambda prefetch=prefetch: prefetch.ended)  # type: ignore[misc]
        assert [device.used for device in node.devices] == [2**21] * 2
        late = node.wish(other, device=1)  # for which the copy on the other device, the older one, is of no use
        node.until(lambda: late.ended)
        assert late.ended == [None]
        assert node.stage.there(model, 0, node.devices[0], "w") == set(range(size_of(model)))
        assert node.stage.there(model, 0, node.devices[1], "w") == set()


def test_of_what_nobody_has_on_a_device_the_least_recently_used_goes(
    model: StoredModel, other: StoredModel, tmp_path: Path
) -> None:
    with stored_model(tmp_path / "m", seed=2) as third, contextlib.closing(Node(devices=1, device_bytes=2**22)) as node:
        for each in (model, other, model, third):
            prefetch = node.wish(each, device=0, holder="")
            node.until(lambda prefetch=prefetch: prefetch.ended)  # type: ignore[misc]
        assert [bool(node.stage.there(each, 0, node.devices[0], "")) for each in (model, other, third)] == [
            True,
            False,
            True,
        ]


def test_a_device_without_room_closes_the_sources_of_the_load_that_it_refuses(
    model: StoredModel, other: StoredModel
) -> None:
    with contextlib.closing(Node(devices=1)) as node:
        mine = node.wish(model, device=0)
        node.until(lambda: mine.ended)
        source = RemoteSource(other)
        with pytest.raises(DeviceOutOfMemory):
            node.wish(other, sources=[source], device=0, holder="late")
        assert source.closed


def test_evicting_a_model_leaves_a_sandbox_its_memory_on_a_device(node: Node, model: StoredModel) -> None:
    wish = node.wish(model, device=0, holder="mine")
    node.until(lambda: wish.ended)
    node.settle()
    node.stage.evict(model.checkpoint.digest)
    assert node.devices[0].used
    node.gone("mine")
    assert node.devices[0].used == 0


def test_memory_on_a_device_that_is_being_written_is_freed_behind_that_and_given_to_nobody(
    model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began, write = threading.Event(), threading.Event(), FakeAllocation.write

    def gated(allocation: FakeAllocation, offset: int, view: memoryview) -> None:
        began.set()
        assert gate.wait(WAIT)
        assert allocation._fd >= 0, "it was freed: this process would end by a fault"
        write(allocation, offset, view)

    monkeypatch.setattr(FakeAllocation, "write", gated)
    with contextlib.closing(Node(devices=1, device_bytes=2**22)) as node:
        wish = node.wish(model, device=0, holder="a")
        assert isinstance(wish.load, DeviceLoad)
        part = wish.load.part
        node.until(lambda: part.copies)
        try:
            assert began.wait(WAIT)
            node.cancel(wish)
            node.gone("a")
            assert node.devices[0].used == 2**21, "a thread writes there"
            again = node.wish(model, device=0, holder="b", on_ready=check_ready)
            assert node.devices[0].used == 2**22
        finally:
            gate.set()
        node.until(lambda: again.ended)
        assert again.ended == [None]
        node.settle()
        assert node.devices[0].used == 2**21


def test_a_chunk_that_goes_to_two_devices_stays_until_both_have_it(
    tmp_path: Path, model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them has no room for all at once, and when it was written to the SSD tier."""
    gate, write, tier = threading.Event(), FakeAllocation.write, SsdDirectory(tmp_path, 2**24)
    with contextlib.closing(Node(chunks=size_of(model) - 1, devices=2, ssd=tier)) as node:

        def gated(allocation: FakeAllocation, offset: int, view: memoryview) -> None:
            if allocation._device is node.devices[1]:
                assert gate.wait(WAIT)
            write(allocation, offset, view)

        monkeypatch.setattr(FakeAllocation, "write", gated)
        whole = node.wish(model, sources=[RemoteSource(model)], device=0, holder="")
        wishes = (whole, node.wish(model, device=1, blocks=[(0, 0)], holder=""))
        parts = [wish.load.part for wish in wishes if isinstance(wish.load, DeviceLoad)]
        resident = parts[0].resident
        try:
            node.until(lambda: parts[0].there & set(parts[1].copies))
            node.until(lambda: resident.write_back is not None and not resident.write_back.busy)
            assert set(parts[1].copies) <= set(resident.chunks)
        finally:
            gate.set()
        node.until(lambda: all(wish.ended for wish in wishes))
        assert [wish.ended for wish in wishes] == [[None], [None]]
        assert all(on_device(wish, number) for wish in wishes for number in wish.job.chunks)
        node.settle()


# --- room --------------------------------------------------------------------------------------------
def test_room_that_is_kept_for_one_model_is_kept_from_others_alone(model: StoredModel, other: StoredModel) -> None:
    nbytes, digest = model.index.nbytes, model.checkpoint.digest
    with contextlib.closing(Node(chunks=size_of(model) + 1)) as node:
        node.residency.reserve(digest, nbytes)
        with pytest.raises(PoolExhausted):
            node.residency.reserve(digest, 2 * nbytes)  # what was kept stays so
        assert node.residency.reserved_bytes == nbytes
        with pytest.raises(PoolExhausted, match=f"reserved {size_of(model) * CHUNK}"):
            node.wish(other, sources=[RemoteSource(other)])
        wish = node.wish(model)
        node.until(lambda: wish.ended)
        assert wish.ended == [None]
        node.residency.reserve(digest, nbytes)  # it has what it wants, and needs no more
        node.gone("w")
        node.residency.reserve(digest, 0)
        late = node.wish(other)
        node.until(lambda: late.ended)
        assert late.ended == [None]


def test_a_model_that_has_more_than_was_kept_for_it_gives_no_room_to_others(
    model: StoredModel, other: StoredModel
) -> None:
    with contextlib.closing(Node(chunks=size_of(model) + size_of(other) - 1)) as node:
        holding = node.wish(model)
        node.until(lambda: holding.ended)
        node.residency.reserve(model.checkpoint.digest, CHUNK)
        with pytest.raises(PoolExhausted, match="held by 1"):
            node.wish(other, sources=[RemoteSource(other)])


def test_what_is_pinned_stays_and_what_was_used_last_too(
    model: StoredModel, other: StoredModel, tmp_path: Path
) -> None:
    with stored_model(tmp_path / "m", seed=2) as third:
        sizes = size_of(model) + size_of(other)
        with contextlib.closing(Node(chunks=sizes)) as node:
            for each in (model, other, model, third):  # the other one is the oldest
                wish = node.wish(each, holder="")
                node.until(lambda wish=wish: wish.ended)  # type: ignore[misc]
            assert [r.model for r in node.residency.residents()] == [model, third]
            node.residency.pin(model.checkpoint.digest, True)
            late = node.wish(other, holder="")
            node.until(lambda: late.ended)
            assert [r.model for r in node.residency.residents()] == [model, other]


def test_memory_for_bytes_that_do_not_stay_is_what_nobody_has_to_leave_for(model: StoredModel) -> None:
    digest = model.checkpoint.digest
    with contextlib.closing(Node(chunks=size_of(model) + 2)) as node:
        wish = node.wish(model, holder="")
        node.until(lambda: wish.ended)
        some = node.residency.spare(4, CHUNK, "another")
        assert (len(some), node.residency.has(digest)) == (2, True)
        one = node.residency.spare(4, CHUNK, "another")
        assert (len(one), node.residency.has(digest)) == (1, False)
        node.pool.free([*some, *one])


# --- loads of one partition -----------------------------------------------------------------------------
def test_a_load_that_is_cancelled_takes_no_chunk_from_another(model: StoredModel) -> None:
    with contextlib.closing(Node(threads=1)) as node:
        source = RemoteSource(model)
        source.gate.clear()
        first = node.wish(model, sources=[source], holder="")
        second = node.wish(model, sources=[], blocks=[(0, 2)], holder="", on_ready=check_ready)
        node.cancel(first)
        source.gate.set()
        node.until(lambda: second.ended)
        assert second.ended == [None]
        node.settle()
        assert sorted(source.read_chunks) == sorted(second.job.chunks), "each once, and no other"
        assert source.closed


def test_a_chunk_that_was_another_at_an_earlier_load_is_given_to_nobody(
    node: Node, model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that came without digests, whose file has changed."""
    monkeypatch.setattr(model, "learn", lambda rank, number, found: CorruptCheckpoint(f"chunk {number} was another"))
    wish = node.wish(model, holder="")
    node.until(lambda: wish.ended)
    assert isinstance(wish.ended[0], CorruptCheckpoint)
    assert not wish.ready
    node.settle()
    assert node.pool.status().used == 0


async def test_a_chunk_that_nobody_waits_for_any_more_is_asked_of_no_other_source(
    node: Node, model: StoredModel
) -> None:
    block, chunks = next((block, chunks) for block, chunks in enumerate(model.block_chunks[0]) if len(chunks) == 1)
    first, second = RemoteSource(model, "peer a"), RemoteSource(model, "s3 b")
    first.lost.update(chunks)
    first.gate.clear()
    wish = node.wish(model, sources=[first, second], blocks=[(block, block)], holder="")
    await until(lambda: first.read_chunks, what="it is being read")
    node.cancel(wish)
    first.gate.set()
    node.settle()
    assert not second.read_chunks
    assert first.closed
    assert second.closed
    assert not node.residency.has(model.checkpoint.digest)


def test_a_model_that_is_on_its_way_is_not_evicted(node: Node, model: StoredModel) -> None:
    gated = RemoteSource(model, "disk")
    gated.gate.clear()
    wish = node.wish(model, sources=[gated], device=1, holder="")
    for evict in (node.residency.evict, node.stage.evict):
        with pytest.raises(Conflict, match="cancel the load first"):
            evict(model.checkpoint.digest)
    node.cancel(wish)
    gated.gate.set()
    node.settle()
    node.stage.evict(model.checkpoint.digest)
    node.residency.evict(model.checkpoint.digest)
    assert node.pool.status().used == 0
    assert node.devices[1].used == 0
    assert gated.closed


def test_an_adopted_chunk_serves_a_load_and_a_second_one_comes_back(node: Node, model: StoredModel) -> None:
    wish = node.wish(model, blocks=[(0, 0)], holder="")
    node.until(lambda: wish.ended)
    number = wish.job.chunks[0]
    (spare,) = node.pool.allocate(1)
    assert node.residency.adopt(model, 0, {number: spare}) == [spare]
    node.pool.free([spare])
    assert spare.state is ChunkState.FREE
    assert in_memory(wish, number)

"""The chunk pool with real memfds: limits, seals, and that nothing of one model is seen in another."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from sllm_loaderd import huge_pages
from sllm_loaderd import pool as sllm_pool
from sllm_loaderd.chunk import Chunk, ChunkState
from sllm_loaderd.client import memory
from sllm_loaderd.huge_pages import have_huge_pages
from sllm_loaderd.pool import ChunkPool
from sllm_runtime.protocol.errors import PoolExhausted, ProtocolError, Unavailable
from tests.fixtures.examples import examples
from tests.fixtures.waiting import GIVE_UP_S

SIZE = 16384
PAGE = 4096
WAIT = GIVE_UP_S


@contextlib.contextmanager
def pool_of(chunks: int, prefault: int = 0) -> Iterator[ChunkPool]:
    pool = ChunkPool(SIZE, chunks * SIZE, prefault * SIZE)
    try:
        yield pool
    finally:
        pool.close()


def test_a_chunk_is_sealed_against_every_way_of_writing_but_ours() -> None:
    with pool_of(1) as pool:
        (chunk,) = pool.allocate(1)
        chunk.view[:4] = b"ours"
        with pytest.raises(PermissionError):
            mmap.mmap(chunk.fd, SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(chunk.fd, b"theirs", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(chunk.fd, 0)
        reopened = os.open(f"/proc/self/fd/{chunk.fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(reopened, b"theirs", 0)
        os.close(reopened)
        chunk.view[4:8] = b"more"
        assert os.pread(chunk.fd, 8, 0) == b"oursmore"


def test_a_private_mapping_may_be_written_and_only_its_owner_sees_it() -> None:
    with pool_of(1) as pool:
        (chunk,) = pool.allocate(1)
        chunk.view[:4] = b"ours"
        with mmap.mmap(chunk.fd, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[:4] = b"mine"
            assert bytes(chunk.view[:4]) == b"ours"


def test_no_more_than_the_limit_and_all_or_nothing() -> None:
    with pool_of(3) as pool:
        taken = pool.allocate(2)
        with pytest.raises(PoolExhausted, match=f"{SIZE} bytes more than are free"):
            pool.allocate(2)
        assert pool.status().used == 2 * SIZE
        pool.free(taken)
        assert len(pool.allocate(3)) == 3


def test_what_a_sandbox_had_is_used_again_only_when_it_is_dead() -> None:
    with pool_of(2) as pool:
        chunks = pool.allocate(2)
        pool.hold(chunks[:1], "a")
        pool.hold(chunks[:1], "b")
        pool.free(chunks)
        assert [chunk.state for chunk in chunks] == [ChunkState.RETIRING, ChunkState.FREE]
        assert pool.shortage(2 * SIZE) == SIZE
        assert pool.status().retiring == SIZE
        assert pool.forget("a") == 0
        assert pool.forget("b") == 1
        assert pool.forget("b") == 0
        assert pool.shortage(2 * SIZE) == 0


def test_a_chunk_is_not_freed_twice() -> None:
    with pool_of(1) as pool:
        chunks = pool.allocate(1)
        pool.free(chunks)
        with pytest.raises(ProtocolError):
            chunks[0].move(ChunkState.RETIRING)


def test_the_tail_of_a_used_chunk_is_zeroed() -> None:
    with pool_of(1) as pool:
        (chunk,) = pool.allocate(1)
        chunk.zero_tail(SIZE)
        chunk.view[:] = b"s" * SIZE
        pool.free([chunk])
        assert pool.allocate(1) == [chunk]
        chunk.zero_tail(100)
        assert bytes(chunk.view[100:]) == bytes(SIZE - 100)


def test_free_chunks_get_their_pages_in_the_background_and_go_out_first() -> None:
    with pool_of(4, prefault=2) as pool:
        assert pool.wait_prefaulted(2 * SIZE, WAIT)
        chunks = pool.allocate(2)
        assert all(chunk.prefaulted for chunk in chunks)
        assert os.fstat(chunks[0].fd).st_blocks * 512 == SIZE
        assert pool.wait_prefaulted(2 * SIZE, WAIT)
        status = pool.status()
        assert (status.used, status.free, status.prefaulted) == (2 * SIZE, 2 * SIZE, 2 * SIZE)


def test_closing_gives_back_every_descriptor_and_mapping() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("sllm-chunk")

    gc.collect()  # a tensor of an earlier test may hold a mapping until then
    before = held()
    for _ in range(3):
        with pool_of(8, prefault=8) as pool:
            pool.hold(pool.allocate(3), "x")
    assert held() == before


def test_small_partitions_take_what_they_need_and_idle_chunks_go_for_them() -> None:
    with pool_of(2) as pool:
        assert [pool.size_for(nbytes) for nbytes in (0, PAGE, SIZE // 2, SIZE)] == [SIZE, PAGE, SIZE, SIZE]
        pool.free(pool.allocate(2))
        small = pool.allocate(4, PAGE)
        assert [os.fstat(chunk.fd).st_size for chunk in small] == [PAGE] * 4
        assert (pool.status().used, pool.status().free) == (SIZE, SIZE)
        with pytest.raises(PoolExhausted):
            pool.allocate(2)
        whole = pool.allocate(1)
        pool.hold(small[:1], "a")
        pool.free(small)
        assert [chunk.state for chunk in small] == [ChunkState.RETIRING] + [ChunkState.CLOSED] * 3
        assert pool.shortage(SIZE) == PAGE
        pool.forget("a")
        assert len(pool.allocate(1) + whole) == 2


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocating, giving out, freeing and dying keeps the books right."""

    taken = Bundle("taken")

    @initialize()
    def begin(self) -> None:
        self.pool = ChunkPool(SIZE, 6 * SIZE, 2 * SIZE)
        self.used: set[Chunk] = set()
        self.retired: set[Chunk] = set()

    @rule(target=taken, count=st.integers(0, 4), nbytes=st.sampled_from([PAGE, SIZE]))
    def allocate(self, count: int, nbytes: int) -> object:
        size = self.pool.size_for(nbytes)
        room = 6 * SIZE - sum(chunk.size for chunk in self.used | self.retired)
        if count * size > room:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count, size)
            return multiple()
        chunks = self.pool.allocate(count, size)
        assert len(set(chunks)) == count
        assert {chunk.size for chunk in chunks} <= {size}
        assert not set(chunks) & (self.used | self.retired)
        self.used.update(chunks)
        return multiple(*chunks)

    @rule(chunk=taken, holder=st.sampled_from("ab"))
    def hold(self, chunk: Chunk, holder: str) -> None:
        self.pool.hold([chunk], holder)

    @rule(chunk=consumes(taken))
    def free(self, chunk: Chunk) -> None:
        self.pool.free([chunk])
        self.used.discard(chunk)
        if chunk.holders:
            self.retired.add(chunk)

    @rule(holder=st.sampled_from("ab"))
    def die(self, holder: str) -> None:
        self.pool.forget(holder)
        self.retired = {chunk for chunk in self.retired if chunk.holders}

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        status = self.pool.status()
        assert status.used == sum(chunk.size for chunk in self.used)
        assert status.retiring == sum(chunk.size for chunk in self.retired)
        assert status.free == status.limit - status.used - status.retiring

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


PoolMachine.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPoolMachine = PoolMachine.TestCase


class PinningDevices:
    """Remembers what is pinned; refuses when told to, as a driver short of memory does."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pinned: set[int] = set()

    def register(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise Unavailable("no more memory can be pinned")
        assert address not in self.pinned
        self.pinned.add(address)

    def unregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.mark.parametrize("refuses", [False, True])
def test_chunks_are_pinned_once_and_unpinned_before_they_go(refuses: bool) -> None:
    devices = PinningDevices(refuses)
    pool = ChunkPool(SIZE, 4 * SIZE, 2 * SIZE, pinner=devices)
    assert pool.wait_prefaulted(2 * SIZE, WAIT)
    chunks = pool.allocate(4)
    for chunk in (*chunks, *chunks):
        pool.pin(chunk)
    assert devices.pinned == (set() if refuses else {chunk.address for chunk in chunks})
    pool.close()
    assert not devices.pinned


def test_what_was_pinned_is_unpinned_although_nothing_more_can_be() -> None:
    """A driver that still knows the address would read the old pages for whatever is mapped there next."""
    devices = PinningDevices()
    pool = ChunkPool(SIZE, 4 * SIZE, 0, pinner=devices)
    (small,) = pool.allocate(1, SIZE // 4)
    (whole,) = pool.allocate(1)
    pool.pin(small)
    devices.refuses = True
    pool.pin(whole)
    pool.free([small])  # its memory goes at once
    assert not devices.pinned
    pool.close()


def test_chunks_of_2_mib_lie_at_its_borders_and_ask_for_huge_pages() -> None:
    pool = ChunkPool(2 * memory.HUGE_PAGE, 2 * memory.HUGE_PAGE, 0, huge=True)
    try:
        (chunk,) = pool.allocate(1)
        assert chunk.address % memory.HUGE_PAGE == 0
        chunk.view[:4] = b"ours"
        with open("/proc/self/smaps") as maps:
            lines = iter(maps.read().splitlines())
        assert any(line.startswith(f"{chunk.address:x}-") for line in lines)
        flags = next(line for line in lines if line.startswith("VmFlags"))
        assert " hg " in flags + " "
        assert pool.status().huge_pages
    finally:
        pool.close()


@pytest.mark.parametrize(("huge", "given"), [(False, 0), (True, 0), (True, memory.HUGE_PAGE)])
def test_pages_made_ahead_are_made_huge(huge: bool, given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the fault has not ``given`` huge ones already."""
    asked: list[int] = []
    taken = iter((7, 7 + given))
    monkeypatch.setattr(huge_pages, "taken", lambda: next(taken))
    advise = memory.advise

    def noted(address: int, size: int, advice: int) -> bool:
        asked.append(advice)
        return advise(address, size, advice)

    monkeypatch.setattr(memory, "advise", noted)
    pool = ChunkPool(memory.HUGE_PAGE, memory.HUGE_PAGE, memory.HUGE_PAGE, huge=huge)
    try:
        assert pool.wait_prefaulted(memory.HUGE_PAGE, WAIT)
    finally:
        pool.close()
    ours = [memory.MADV_HUGEPAGE, memory.MADV_POPULATE_WRITE, memory.MADV_COLLAPSE]
    assert asked == (ours[: 2 if given else 3] if huge else ours[1:2])


def test_pages_are_made_ahead_when_nobody_has_taken_any_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sllm_pool, "QUIET_S", 2 * WAIT)
    pool = ChunkPool(SIZE, 8 * SIZE, 2 * SIZE)
    try:
        assert pool.wait_prefaulted(2 * SIZE, WAIT), "before the first start"
        pool.allocate(1)
        assert not pool.wait_prefaulted(2 * SIZE, 0.3), "while a start goes on"
        monkeypatch.setattr(sllm_pool, "QUIET_S", 0.05)
        pool.allocate(1)
        assert pool.wait_prefaulted(2 * SIZE, WAIT)
    finally:
        pool.close()


def test_pages_are_made_ahead_also_where_chunks_are_taken_all_the_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sllm_pool, "QUIET_S", 2 * WAIT)
    monkeypatch.setattr(sllm_pool, "LONGEST_S", 0.1)
    pool = ChunkPool(SIZE, 64 * SIZE, 2 * SIZE)
    try:
        for _ in range(3):
            pool.allocate(1)
            assert pool.wait_prefaulted(2 * SIZE, WAIT)
        monkeypatch.setattr(sllm_pool, "LONGEST_S", 0.0)
        pool.keep_ready(16 * SIZE)
        for _ in range(16):  # each time before there are enough
            pool.allocate(1)
        assert pool.wait_prefaulted(16 * SIZE, WAIT)
    finally:
        pool.close()


def test_pages_wait_also_for_a_load_of_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sllm_pool, "QUIET_S", 2 * WAIT)
    pool = ChunkPool(SIZE, 8 * SIZE, 0)
    try:
        pool.allocate(0)
        pool.keep_ready(2 * SIZE)
        assert not pool.wait_prefaulted(2 * SIZE, 0.3)
        monkeypatch.setattr(sllm_pool, "LONGEST_S", 0.0)
        pool.allocate(0)
        assert pool.wait_prefaulted(2 * SIZE, WAIT)
    finally:
        pool.close()


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_load_that_begins_does_not_share_the_cores_with_the_rest_of_a_chunk(
    waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sllm_pool, "QUIET_S", 2 * WAIT)
    monkeypatch.setattr(sllm_pool, "LONGEST_S", 2 * WAIT)
    began, go_on, faults = threading.Event(), threading.Event(), list[int]()
    advise = memory.advise

    def held(address: int, size: int, advice: int) -> bool:
        began.set()
        go_on.wait(WAIT)
        faults.append(address)
        return advise(address, size, advice)

    monkeypatch.setattr(memory, "advise", held)
    size = 4 * memory.HUGE_PAGE
    pool = ChunkPool(size, size, size)
    try:
        assert began.wait(WAIT)
        pool.allocate(0)
        go_on.set()
        if waited_for:
            assert [chunk.prefaulted for chunk in pool.allocate(1)] == [True]
            assert len(faults) == 4
        else:
            assert not pool.wait_prefaulted(size, 0.3)
            assert len(faults) == 1
    finally:
        pool.close()
    assert len(faults) == 4, "and who closes it does not wait for that"


@pytest.mark.parametrize("huge", [False, True])
def test_pages_that_came_with_a_read_are_made_huge_when_their_chunk_is_free(huge: bool) -> None:
    pool = ChunkPool(memory.HUGE_PAGE, memory.HUGE_PAGE, 0, huge=huge)
    try:
        (chunk,) = pool.allocate(1)
        chunk.zero_tail(memory.HUGE_PAGE)
        chunk.view[:4] = b"ours"
        pool.free([chunk])
        assert pool.status().prefaulted == (0 if huge else memory.HUGE_PAGE)
        pool.keep_ready(memory.HUGE_PAGE)
        assert pool.wait_prefaulted(memory.HUGE_PAGE, WAIT)
        assert pool.allocate(1) == [chunk]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("content", "have", "after"),
    [
        ("always within_size [advise] never deny force", True, None),
        ("always within_size advise [never] deny force", True, "advise"),
        ("rubbish", False, None),
    ],
)
def test_huge_pages_are_turned_on_where_allowed(tmp_path: Path, content: str, have: bool, after: str | None) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(content)
    assert have_huge_pages(setting) is have
    assert setting.read_text() == (after or content)
    assert not have_huge_pages(tmp_path / "none")


def test_how_much_is_in_huge_pages(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 9 kB\nShmemHugePages:    4096 kB\nShmemPmdMapped: 0 kB\n")
    assert huge_pages.taken(told) == 4 * 2**20
    told.write_text("MemTotal: 9 kB\n")
    assert huge_pages.taken(told) == 0
    assert huge_pages.taken(tmp_path / "none") == 0

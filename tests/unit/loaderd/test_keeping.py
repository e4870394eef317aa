"""What loaderd has kept and what its client keeps are the same, whatever is handed out, freed and acknowledged when."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sllm_loaderd.chunk import Chunk, ChunkState
from sllm_loaderd.client import KeptBatch, KeptChunks, memory
from sllm_loaderd.daemon.keeper import Handout, Keeper
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.sealed import create_sealed
from sllm_runtime.protocol.errors import PoolExhausted
from sllm_runtime.protocol.limits import MAX_FDS
from sllm_runtime.protocol.loader import Store, StoreDevice, Unstore
from tests.fixtures.examples import examples

SIZE = 4096
WINDOW = 1


class Keeping(RuleBasedStateMachine):
    """A pool, a keeper, and a client at the other end of a queue; descriptors travel as duplicates, as on a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ChunkPool(SIZE, 8 * SIZE, 0)
        self.sent: deque[tuple[Store | StoreDevice | Unstore, list[int]]] = deque()
        self.kept = KeptChunks()
        self.keeper = Keeper(self.say, WINDOW)
        self.pool.on_freed = self.keeper.freed
        self.used: list[Chunk] = []
        self.model: dict[int, set[str]] = {}
        """Holders by id of what was handed out and is not free yet."""

    def say(self, message: Store | StoreDevice | Unstore, fds: Sequence[int]) -> None:
        self.sent.append((message, [os.dup(fd) for fd in fds]))
        assert sum(isinstance(waiting, Store) for waiting, _ in self.sent) <= WINDOW, "few are under way"

    @rule(count=st.integers(1, 3))
    def load(self, count: int) -> None:
        with contextlib.suppress(PoolExhausted):
            self.used += self.pool.allocate(count)

    @precondition(lambda self: self.used)
    @rule(holder=st.sampled_from("abc"), data=st.data())
    def hand_out(self, holder: str, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.used), min_size=1, unique=True))
        new = tuple((chunk.id, chunk) for chunk in chosen if holder not in chunk.holders)
        self.keeper.keep(Handout(holder, "m", 0, SIZE, new))
        self.pool.hold(chosen, holder)
        for chunk in chosen:
            self.model.setdefault(chunk.id, set()).add(holder)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.used), min_size=1, unique=True))
        self.used = [chunk for chunk in self.used if chunk not in chosen]
        self.pool.free(chosen)
        for chunk in chosen:
            if chunk.state is not ChunkState.RETIRING:
                self.model.pop(chunk.id, None)

    @rule(holder=st.sampled_from("abc"))
    def die(self, holder: str) -> None:
        retiring = {id: names for id, names in self.model.items() if id not in {chunk.id for chunk in self.used}}
        self.pool.forget(holder)
        self.kept.gone(holder)
        for id, names in list(self.model.items()):
            names.discard(holder)
            if id in retiring and not names:
                del self.model[id]

    @rule(most=st.sampled_from([1, 1000]))
    def hear(self, most: int) -> None:
        while self.sent and most:
            most -= 1
            message, fds = self.sent.popleft()
            if isinstance(message, Unstore):
                self.kept.drop(message.ids)
            else:
                assert isinstance(message, Store)
                assert message.fds == len(fds) <= len(message.ids) <= MAX_FDS
                self.kept.store(message, fds)
                self.keeper.stored(message.batch)

    @invariant()
    def all_that_was_said_leads_to_the_same(self) -> None:
        if self.sent:
            return
        held = {id: (fd, holders) for batch in self.kept.batches() for id, fd, holders in each(batch)}
        assert set(held) == set(self.model)
        for id, (fd, holders) in held.items():
            assert os.fstat(fd).st_ino == id
            assert self.model[id] <= set(holders), "who died before it was heard of is told again by `gone`"

    def teardown(self) -> None:
        for _, fds in self.sent:
            for fd in fds:
                os.close(fd)
        self.kept.close()
        self.pool.close()


def each(batch: KeptBatch) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Id, descriptor and holders of each chunk."""
    for id, fd in zip(batch.ids, batch.fds, strict=True):
        yield id, fd, batch.holders


def test_both_ends_agree() -> None:
    run_state_machine_as_test(
        Keeping, settings=settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
    )


@pytest.fixture
def pool() -> Iterator[ChunkPool]:
    made = ChunkPool(SIZE, 4 * SIZE, 0)
    yield made
    made.close()


def outside(pool: ChunkPool) -> Chunk:
    """A chunk that another process made."""
    fd, address = create_sealed("chunk", SIZE)
    memory.unmap(address, SIZE)
    try:
        return pool.adopt(fd)[0]
    finally:
        os.close(fd)


def test_adopted_chunks_take_the_place_of_free_ones_and_may_exceed_the_limit(pool: ChunkPool) -> None:
    pool.free(pool.allocate(4))
    adopted = [outside(pool) for _ in range(6)]
    status = pool.status()
    assert (status.used, status.free) == (6 * SIZE, 0)
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    pool.free(adopted[:2])
    assert pool.shortage(SIZE) == SIZE, "there is room only below the limit"
    pool.free(adopted[2:3])
    (made,) = pool.allocate(1)
    assert not made.adopted
    pool.hold(adopted[3:], "h")
    pool.free([made, *adopted[3:]])
    assert (pool.status().retiring, pool.status().free) == (3 * SIZE, SIZE)
    assert pool.forget("h") == 3
    assert (pool.status().retiring, pool.status().free) == (0, 4 * SIZE)
    assert {chunk.state for chunk in adopted} == {ChunkState.CLOSED}


def test_a_chunk_is_adopted_once(pool: ChunkPool) -> None:
    (made,) = pool.allocate(1)
    assert pool.adopt(made.fd) == (made, False)
    adopted = outside(pool)
    assert pool.adopt(adopted.fd) == (adopted, False)
    pool.free([made, adopted])

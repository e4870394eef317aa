"""Any order of loads, cancels, faults, evictions, deaths and device loads keeps the books of the pipeline right."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.checkpoint import digest_hex, partition_name
from sllm_runtime.protocol.errors import Conflict, PoolExhausted, SllmError
from sllm_runtime.protocol.loader import PRIORITIES
from tests.fixtures.examples import examples
from tests.unit.loaderd.node import CHUNK, Node, RemoteSource, Wish, check_ready, stored_model

POOL = 9
"""Chunks: more than one of the models has, fewer than both."""
DEVICES = 2
HOLDERS = ("", "a", "b")
WHICH = st.integers(0, 1)


class ResidencyMachine(RuleBasedStateMachine):
    """Two models, a pool too small for both, two devices. Threads run free; a rule says when their ends are heard."""

    models: ClassVar[Sequence[StoredModel]] = ()

    @initialize(overlap=st.booleans(), shareable=st.booleans(), ssd=st.booleans(), threads=st.integers(1, 2))
    def begin(self, overlap: bool, shareable: bool, ssd: bool, threads: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        tier = SsdDirectory(self.directory, 2**30 if ssd else 0)
        self.node = Node(chunks=POOL, devices=DEVICES, overlap=overlap, shareable=shareable, threads=threads, ssd=tier)
        self.wishes: list[Wish] = []
        self.sources: list[RemoteSource] = []

    # --- what clients do ----------------------------------------------------------------------------
    @rule(
        which=WHICH,
        device=st.sampled_from((None, None, *range(DEVICES))),
        holder=st.sampled_from(HOLDERS),
        priority=st.sampled_from(PRIORITIES),
        blocks=st.lists(st.integers(0, 4), max_size=2, unique=True),
        paths=st.lists(st.sampled_from(("disk", "peer x", "s3 b")), min_size=1, max_size=3, unique=True),
        lost=st.sets(st.integers(0, 6), max_size=2),
        wrong=st.sets(st.integers(0, 6), max_size=2),
    )
    def load(
        self,
        which: int,
        device: int | None,
        holder: str,
        priority: str,
        blocks: list[int],
        paths: list[str],
        lost: set[int],
        wrong: set[int],
    ) -> None:
        sources = [RemoteSource(self.models[which], path) for path in paths]
        sources[0].lost, sources[-1].wrong = lost, wrong
        self.sources += sources
        with contextlib.suppress(PoolExhausted):  # of the pool or of a device; what was there stays
            wish = self.node.wish(
                self.models[which],
                sources=sources,
                blocks=[(block, block) for block in blocks],
                priority=priority,
                device=device,
                holder=holder,
                on_ready=check_ready,
            )
            self.wishes.append(wish)

    def running(self) -> list[Wish]:
        return [wish for wish in self.wishes if not wish.over]

    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        if self.wishes:
            self.node.cancel(self.wishes[number % len(self.wishes)])

    @rule(number=st.integers(0, 99), blocks=st.lists(st.integers(0, 4), max_size=3))
    def reorder(self, number: int, blocks: list[int]) -> None:
        if running := self.running():
            load = running[number % len(running)].load
            assert load is not None
            load.reorder([(block, block) for block in dict.fromkeys(blocks)])

    @rule(holder=st.sampled_from(HOLDERS[1:]))
    def die(self, holder: str) -> None:
        for wish in self.wishes:
            if wish.holder == holder and not wish.over:
                self.node.cancel(wish)
        self.node.gone(holder)

    @rule(which=WHICH)
    def evict(self, which: int) -> None:
        digest = self.models[which].checkpoint.digest
        for evict in (self.node.stage.evict, self.node.residency.evict):
            with contextlib.suppress(Conflict):
                evict(digest)

    @rule(which=WHICH, pinned=st.booleans())
    def pin(self, which: int, pinned: bool) -> None:
        self.node.residency.pin(self.models[which].checkpoint.digest, pinned)

    @rule(which=WHICH, chunks=st.integers(0, POOL))
    def reserve(self, which: int, chunks: int) -> None:
        with contextlib.suppress(PoolExhausted):
            self.node.residency.reserve(self.models[which].checkpoint.digest, chunks * CHUNK)

    # --- what time does -----------------------------------------------------------------------------
    @rule()
    def turn(self) -> None:
        self.node.turn()

    @rule()
    def settle(self) -> None:
        self.node.settle()
        assert not self.running(), "with nothing left to do, every load has ended"
        assert all(source.closed for source in self.sources), "what is not read from is closed"

    # --- what always holds --------------------------------------------------------------------------
    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "node"):
            return
        residents = self.node.residency.residents()
        chunks = [chunk for resident in residents for chunk in resident.chunks.values()]
        assert len(set(chunks)) == len(chunks), "a chunk is in one place"
        status = self.node.pool.status()
        assert status.used == len(chunks) * CHUNK
        assert status.used + status.retiring + status.free == POOL * CHUNK
        for resident in residents:
            assert set(resident.tasks) <= set(resident.chunks)
            assert set(resident.copying) <= set(resident.chunks) - set(resident.tasks)

    @invariant()
    def each_load_ends_once(self) -> None:
        for wish in getattr(self, "wishes", ()):
            assert len(wish.ended) <= 1
            assert not (wish.ended and wish.cancelled)
            assert len(set(wish.ready)) == len(wish.ready)
            for error in wish.ended:
                assert error is None or isinstance(error, SllmError)

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        with contextlib.closing(self.node), contextlib.ExitStack() as last:
            last.callback(shutil.rmtree, self.directory)
            self.settle()
            for holder in HOLDERS[1:]:
                self.node.gone(holder)
            for model in self.models:
                self.node.stage.evict(model.checkpoint.digest)
                self.node.residency.evict(model.checkpoint.digest)
            assert self.node.pool.status().used == 0
            assert self.node.pool.status().retiring == 0
            assert [device.used for device in self.node.devices] == [0] * DEVICES
            for copy in self.directory.iterdir():  # whole and right, or none
                model = next(
                    model for model in self.models if copy.name.startswith(digest_hex(model.checkpoint.digest))
                )
                assert copy.read_bytes() == (model.checkpoint.directory / partition_name(0)).read_bytes()


def test_any_order_keeps_the_books_right(tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        models = [opened.enter_context(stored_model(tmp_path / str(seed), seed=seed)) for seed in range(2)]
        ResidencyMachine.models = models
        run_state_machine_as_test(
            ResidencyMachine,
            settings=settings(
                max_examples=examples(60),
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )

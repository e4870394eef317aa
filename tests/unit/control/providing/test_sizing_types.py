"""What broken nodes of a pool, nodes of two types, and those of the type before do to it. No I/O."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.placement import unsatisfiable
from sllm_runtime.control.providing.provider import Offer
from sllm_runtime.control.providing.sizing import need_at
from sllm_runtime.protocol.node import Gpu
from tests.unit.control.providing.supply import TIMING, Supplied
from tests.unit.control.providing.test_sizing_broken import KEY, Flaky
from tests.unit.control.providing.test_sizing_shape import CHAT, LARGE, Retyped
from tests.unit.control.world import GIB, deployed, manifest


def test_a_broken_node_behind_a_good_one_makes_way_for_another() -> None:
    world = Flaky(most=1)
    world.broken_nodes = frozenset({"p2"})
    world.view = deployed(world.view, manifest("chat", cpu=1.0, gpu=["L4"], concurrency=1, keep_alive=5.0))
    world.supply()
    world.wait_for(KEY, 1)
    world.live_for(40)
    assert world.live(KEY)
    world.all_end()
    world.live_for(3 * TIMING.idle + 5 * TIMING.cooldown)
    assert not world.nodes
    world.wait_for(KEY, 1)
    world.live_for(3000)
    assert world.live(KEY), f"it waits for what never comes: {set(world.nodes)}"


def test_a_broken_node_beside_a_good_one_makes_way_for_another() -> None:
    world = Flaky(most=2)
    world.broken_nodes = frozenset({"p2"})
    wanted = manifest("chat", cpu=1.0, gpu=["L4"], concurrency=1, max_instances=3, keep_alive=5.0)
    world.view = deployed(world.view, wanted)
    world.supply()
    world.wait_for(KEY, 2)
    world.live_for(3000)
    assert len(world.live(KEY)) == 2, f"it waits for what never comes: {set(world.nodes)}"


def test_a_node_of_the_type_before_that_was_booting_says_nothing_of_the_new_one() -> None:
    world = Retyped()
    world.view = deployed(world.view, manifest("chat", cpu=2.0, concurrency=1, keep_alive=5.0))
    world.supply()
    world.wait_for(CHAT, 1)
    world.live_for(10)
    assert world.booting
    world.supply()
    assert world.pool.record.members == ("p1",)
    world.cores = 48.0
    world.new_leader()
    world.view = deployed(world.view, manifest("large", cpu=16.0, concurrency=1, keep_alive=5.0))
    world.live_for(60)
    assert world.nodes
    assert unsatisfiable(need_at(world.view, LARGE), world.view) == ""


def test_settings_that_change_with_the_release() -> None:
    """As stored by a controller of before: without ``seen``."""
    world = Retyped()
    world.view = deployed(world.view, manifest("chat", cpu=2.0, concurrency=1, keep_alive=5.0))
    world.view = deployed(world.view, manifest("large", cpu=16.0, concurrency=1, keep_alive=5.0))
    world.supply()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    world.view = replace(world.view, pool=world.pool.with_record(seen=()))
    world.cores = 48.0
    world.new_leader()
    world.live_for(30)
    assert unsatisfiable(need_at(world.view, LARGE), world.view) == ""


class Mixed(Flaky):
    """Its settings say four accelerators of each node; it is of two types, which have two and one."""

    def offer(self) -> Offer:
        made = super().offer()
        return replace(made, shape=replace(made.shape, gpus=four(4)))

    def hear(self, name: str) -> None:
        self.nodes[name].gpus = four(1 + int(name[1:]) % 2)
        Supplied.hear(self, name)


def four(number: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=index, kind="L4", memory=24 * GIB) for index in range(number))


def test_a_pool_of_two_types_that_both_have_fewer_does_not_grow_to_its_most_for_what_neither_has() -> None:
    world = Mixed(most=8)
    world.view = deployed(world.view, manifest("chat", cpu=1.0, gpu=["L4:4"], concurrency=1))
    world.supply()
    world.wait_for(KEY, 1)
    world.live_for(600)
    assert world._made <= 2

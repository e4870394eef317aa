"""One node of a pool comes without its accelerators (its driver did not load). No I/O."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.placement import unsatisfiable
from sllm_runtime.control.providing.provider import Offer
from sllm_runtime.control.providing.sizing import need_at
from sllm_runtime.protocol.node import Gpu
from tests.unit.control.providing.supply import TIMING, Supplied
from tests.unit.control.world import GIB, deployed, manifest

KEY = ("chat", 1)
L4 = Gpu(index=0, kind="L4", memory=24 * GIB)


class Flaky(Supplied):
    """Of its nodes those in ``broken_nodes`` see no accelerator."""

    broken_nodes: frozenset[str] = frozenset({"p2"})

    def offer(self) -> Offer:
        made = super().offer()
        return replace(made, shape=replace(made.shape, gpus=(L4,)))

    def hear(self, name: str) -> None:
        self.nodes[name].gpus = () if name in self.broken_nodes else (L4,)
        super().hear(name)


def test_one_node_without_its_accelerators_does_not_end_the_pool() -> None:
    world = Flaky()
    world.view = deployed(
        world.view, manifest("chat", cpu=1.0, gpu=["L4"], concurrency=1, max_instances=3, keep_alive=5.0)
    )
    world.supply()
    world.wait_for(KEY, 1)
    world.live_for(40)
    world.wait_for(KEY, 1)
    world.live_for(40)
    assert {"p1", "p2"} <= set(world.nodes)
    world.all_end()
    world.live_for(3 * TIMING.idle + 5 * TIMING.cooldown)
    assert not world.nodes
    world.new_leader()
    world.supply()
    assert unsatisfiable(need_at(world.view, KEY), world.view) == ""
    world.wait_for(KEY, 1)
    world.live_for(60)
    assert world.live(KEY)


def test_a_pool_whose_nodes_have_none_does_not_grow_to_its_most_for_them() -> None:
    world = Flaky(most=8)
    world.broken_nodes = frozenset(f"p{number}" for number in range(1, 9))
    world.view = deployed(world.view, manifest("chat", cpu=1.0, gpu=["L4"], concurrency=1))
    world.supply()
    world.wait_for(KEY, 1)
    world.live_for(600)
    assert world._made <= 2

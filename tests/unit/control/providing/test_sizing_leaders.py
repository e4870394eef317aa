"""What a controller that takes over knows of what the nodes of its pool have. No I/O."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.placement import unsatisfiable
from sllm_runtime.control.providing.provider import Offer
from sllm_runtime.control.providing.sizing import need_at
from tests.unit.control.providing.supply import Supplied
from tests.unit.control.world import deployed, manifest

LARGE = ("large", 1)


class Smaller(Supplied):
    """Its settings say 8 cores of each node, which turns out to have 4."""

    def offer(self) -> Offer:
        made = super().offer()
        return replace(made, shape=replace(made.shape, cpu=8.0))


def test_of_a_node_that_came_under_a_controller_of_the_release_before_it_knows_what_that_knew() -> None:
    world = Smaller()
    world.view = deployed(world.view, manifest("large", cpu=6.0, concurrency=1))
    world.supply()
    world.wait_for(LARGE, 1)
    world.live_for(60)
    assert world.pool.record.cpu == 4.0
    assert unsatisfiable(need_at(world.view, LARGE), world.view)
    world.view = replace(world.view, pool=world.pool.with_record(said="", gpus=None))  # as that one stored it
    assert world.pool.record.cpu == 4.0
    world.new_leader()
    world.live_for(10)
    assert unsatisfiable(need_at(world.view, LARGE), world.view), "a node is made for it in vain"


def test_of_a_node_that_was_booting_when_another_controller_took_over_it_learns_what_it_has() -> None:
    world = Smaller(most=1)
    world.view = deployed(world.view, manifest("large", cpu=6.0, concurrency=1))
    world.supply()
    world.wait_for(LARGE, 1)
    world.live_for(10)
    assert world.booting
    assert not world.nodes
    world.new_leader()
    world.live_for(60)
    assert world.nodes
    assert not world.booting
    assert unsatisfiable(need_at(world.view, LARGE), world.view), "it waits for what never comes"

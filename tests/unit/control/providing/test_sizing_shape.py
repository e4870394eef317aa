"""A pool whose nodes are made of another type from now on. No I/O."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.placement import unsatisfiable
from sllm_runtime.control.providing.provider import Offer
from sllm_runtime.control.providing.sizing import SetDesired, need_at
from tests.unit.control.providing.supply import TIMING, Supplied
from tests.unit.control.world import deployed, manifest

CHAT, LARGE = ("chat", 1), ("large", 1)


class Retyped(Supplied):
    """``cores``: what its settings say of each node."""

    cores = 4.0

    def offer(self) -> Offer:
        made = super().offer()
        return replace(made, shape=replace(made.shape, cpu=self.cores))


def test_nodes_of_a_larger_type_are_asked_for_once_the_settings_say_so() -> None:
    world = Retyped()
    world.view = deployed(world.view, manifest("chat", cpu=2.0, concurrency=1, keep_alive=5.0))
    world.supply()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    world.all_end()
    world.live_for(2 * TIMING.idle + 5 * TIMING.cooldown)
    assert (world.desired, world.pool.record.cpu) == (0, 4.0)

    # `terraform apply` with larger instance types: controllers are rolled, with the new shape in their settings.
    world.cores = 48.0
    world.new_leader()
    world.view = deployed(world.view, manifest("large", cpu=16.0, concurrency=1, keep_alive=5.0))
    world.supply()
    assert unsatisfiable(need_at(world.view, LARGE), world.view) == ""
    world.actions.clear()
    world.wait_for(LARGE, 1)
    world.live_for(10)
    assert [action.nodes for _, action in world.actions if isinstance(action, SetDesired)] == [1]


def test_nodes_of_the_smaller_type_that_are_still_there_do_not_count() -> None:
    world = Retyped()
    world.view = deployed(world.view, manifest("chat", cpu=2.0, concurrency=1, keep_alive=5.0))
    world.view = deployed(world.view, manifest("large", cpu=16.0, concurrency=1, keep_alive=5.0))
    world.supply()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    world.cores = 48.0
    world.new_leader()
    world.live_for(5)
    world.actions.clear()
    world.wait_for(LARGE, 1)
    world.live_for(10)
    assert [action.nodes for _, action in world.actions if isinstance(action, SetDesired)] == [2]

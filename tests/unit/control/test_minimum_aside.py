"""Idle instances that versions want in any case, and a start that would have room but for where they are."""

from __future__ import annotations

from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import FakeNode, World, deployed, manifest

KEPT, WIDE = ("kept", 1), ("wide", 1)


def live_for(world: World, seconds: int) -> int:
    """Starts succeed. How few instances of ``kept`` there were."""
    least = 99
    for _ in range(seconds):
        world.turn(1.0)
        for node in world.nodes.values():
            for name, status in tuple(node.instances.items()):
                if status.state is InstanceState.STARTING:
                    node.set(name, InstanceState.READY)
        least = min(least, len(world.live(KEPT)))
    return least


def two_nodes(least: int) -> World:
    world = World(FakeNode("a", 8.0, 2), FakeNode("b", 8.0, 2))
    world.hear_all()
    kept = manifest("kept", cpu=1.0, gpu=["L4"], min_instances=least, max_instances=least, keep_alive=5.0)
    world.view = deployed(world.view, kept)
    live_for(world, 10)
    world.view = deployed(world.view, manifest("wide", cpu=1.0, gpu=["L4:2"]))
    world.wait_for(WIDE, 1)
    return world


def test_a_start_that_needs_two_of_a_node_gets_them_though_each_node_has_one_that_idles() -> None:
    world = two_nodes(2)
    live_for(world, 60)
    (wide,) = world.live(WIDE)
    where = {world.view.instances[name].record.node for name in world.live(KEPT)}
    assert len(world.live(KEPT)) == 2
    assert where == {"a", "b"} - {world.view.instances[wide].record.node}
    assert len(world.started) == 4, "one goes, once"


def test_none_goes_that_has_no_room_elsewhere() -> None:
    world = two_nodes(3)
    assert live_for(world, 60) == 3
    assert not world.live(WIDE)
    assert len(world.started) == 3

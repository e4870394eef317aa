"""A pool of one node at most, which comes without what its settings say. No I/O."""

from __future__ import annotations

from tests.unit.control.providing.test_sizing_broken import KEY, Flaky
from tests.unit.control.world import deployed, manifest


def test_a_broken_node_that_is_the_only_one_makes_way_for_another() -> None:
    world = Flaky(most=1)
    world.broken_nodes = frozenset({"p1"})
    world.view = deployed(world.view, manifest("chat", cpu=1.0, gpu=["L4"], concurrency=1, keep_alive=5.0))
    world.supply()
    world.wait_for(KEY, 1)
    world.live_for(3000)
    assert world.live(KEY), f"it waits for what never comes: {set(world.nodes)}"

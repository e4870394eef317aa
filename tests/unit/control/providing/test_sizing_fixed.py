"""Pools that have as many nodes at most as at least, one of which is broken. No I/O."""

from __future__ import annotations

import pytest

from sllm_runtime.control.providing.sizing import Action, Remove
from tests.unit.control.providing.supply import TIMING
from tests.unit.control.providing.test_sizing_broken import KEY, Flaky
from tests.unit.control.world import deployed, manifest

WANTED = {"cpu": 1.0, "gpu": ["L4"], "concurrency": 1, "max_instances": 3, "keep_alive": 5.0}


class Kept(Flaky):
    """Its provider makes another one itself where it has fewer than its least, as an auto scaling group does."""

    def _tell(self, action: Action) -> None:
        super()._tell(action)
        self.desired = max(self.desired, self.least)


@pytest.mark.parametrize("kind", [Flaky, Kept])
def test_a_broken_node_of_a_pool_of_fixed_size_makes_way_for_another(kind: type[Flaky]) -> None:
    world = kind(least=2, most=2)
    world.broken_nodes = frozenset({"p2"})
    world.view = deployed(world.view, manifest("chat", **WANTED))
    world.supply()
    world.wait_for(KEY, 2)
    world.live_for(3000)
    assert len(world.live(KEY)) == 2, f"it waits for what never comes: {set(world.nodes)}"
    assert world.harmed == []


def test_where_every_node_that_comes_is_broken_that_ends() -> None:
    world = Flaky(least=2, most=2)
    world.broken_nodes = frozenset(f"p{number}" for number in range(2, 99))
    world.view = deployed(world.view, manifest("chat", **WANTED))
    world.supply()
    world.wait_for(KEY, 2)
    world.live_for(100 * TIMING.idle)
    assert len([action for _, action in world.actions if isinstance(action, Remove)]) <= 2

"""Idle instances that versions want in any case, and a start that would have room but for where they are."""

from __future__ import annotations

from typing import Any

import pytest

from sllm_runtime.control import patience
from sllm_runtime.control.turns import MOST
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import ERROR, FakeNode, World, deployed, manifest

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


def test_none_goes_for_what_is_less_urgent() -> None:
    world = World(FakeNode("a", 8.0, 2), FakeNode("b", 8.0, 2))
    world.hear_all()
    urgent = manifest("kept", cpu=1.0, gpu=["L4"], min_instances=2, max_instances=2, keep_alive=5.0, priority=1)
    world.view = deployed(world.view, urgent)
    live_for(world, 10)
    world.view = deployed(world.view, manifest("wide", cpu=1.0, gpu=["L4:2"]))
    world.wait_for(WIDE, 1)
    assert live_for(world, 60) == 2
    assert not world.live(WIDE)


def test_none_goes_that_has_no_room_elsewhere() -> None:
    world = two_nodes(3)
    assert live_for(world, 60) == 3
    assert not world.live(WIDE)
    assert len(world.started) == 3


def test_short_calls_elsewhere_keep_nobody_from_stepping_aside() -> None:
    """They are over long before 10 s: then a place would be kept, and there is none to keep but that one."""
    world = World(FakeNode("a", 8.0, 2), FakeNode("b", 8.0, 2), FakeNode("c", 8.0, 0))
    world.hear_all()
    kept = manifest("kept", cpu=1.0, gpu=["L4"], min_instances=2, max_instances=2, keep_alive=5.0)
    world.view = deployed(world.view, kept)
    live_for(world, 10)
    world.view = deployed(world.view, manifest("short", cpu=1.0, timeout=5.0))
    world.wait_for(("short", 1), 1)
    live_for(world, 2)
    world.wait_for(("short", 1), 0)
    (busy,) = world.live(("short", 1))
    node = world.nodes[world.view.instances[busy].record.node]
    node.set(busy, InstanceState.READY, running=1)
    world.view = deployed(world.view, manifest("wide", cpu=1.0, gpu=["L4:2"]))
    world.wait_for(WIDE, 1)
    live_for(world, 120)
    assert world.live(WIDE)


@pytest.mark.parametrize("roomy", [False, True])
def test_one_whose_version_cannot_start_now_stays(*, roomy: bool) -> None:
    """Its secret is gone, or its image: the one that runs is the last one there will be."""
    world = World(FakeNode("a", 8.0, 2), FakeNode("b", 8.0, 3 if roomy else 2), FakeNode("c", 8.0, 0))
    world.hear_all()
    world.view = deployed(
        world.view, manifest("kept", cpu=1.0, gpu=["L4"], min_instances=2, max_instances=2, keep_alive=5.0)
    )
    live_for(world, 10)
    first, second = sorted(world.live(KEPT), key=lambda name: world.view.instances[name].record.node)

    def on(seconds: int) -> int:
        least = 99
        for _ in range(seconds):
            world.turn(1.0)
            for node in world.nodes.values():
                for name, status in tuple(node.instances.items()):
                    if status.state is InstanceState.STARTING:
                        ready = (InstanceState.READY, None)
                        end = (InstanceState.FAILED, ERROR) if status.function == "kept" else ready
                        node.set(name, *end)
            least = min(least, sum(world.view.instances[name].ready for name in world.live(KEPT)))
        return least

    world.finish(second, InstanceState.FAILED, ERROR)
    full = 2 if roomy else 1
    world.view = deployed(world.view, manifest("full", cpu=1.0, gpu=["L4"], min_instances=full, max_instances=full))
    assert on(60) == 1
    world.view = deployed(world.view, manifest("wide", cpu=1.0, gpu=["L4:2"]))
    world.wait_for(WIDE, 1)
    assert on(60) == 1, "the last one that works has gone, and no other one comes"
    assert world.view.instances[first].ready


NODES, WAITING = 40, 60


def test_a_plan_in_which_many_wait_looks_for_few_that_step_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at all nodes, and from each at all others: on forty nodes such a plan took 0.7 to 1.5 s."""
    world = World(*(FakeNode(f"n{number}", 8.0, 2) for number in range(NODES)))
    world.hear_all()
    for name in ("kept", "more"):
        what = manifest(name, cpu=1.0, gpu=["L4"], min_instances=NODES, max_instances=NODES, keep_alive=5.0)
        world.view = deployed(world.view, what)
    live_for(world, 5)
    for number in range(WAITING):
        world.view = deployed(world.view, manifest(f"w{number}", cpu=1.0, gpu=["L4:2"]))
        world.wait_for((f"w{number}", 1), 1)
    world.turn(patience.ASIDE_S + 1.0)
    real, looked = patience._stepped_aside, list[Any]()

    def aside(*given: Any) -> Any:
        looked.append(given)
        return real(*given)

    monkeypatch.setattr(patience, "_stepped_aside", aside)
    world.now += 0.5
    world.hear_all()
    world.plan()
    assert 0 < len(looked) <= MOST // 2


def test_a_start_that_failed_once_and_that_nobody_wants_any_more_holds_nobody_up_for_ever() -> None:
    """Two are wanted and there; a third was, for a moment, and did not start. Nobody starts one since, so nobody will
    ever know that it can."""
    world = World(FakeNode("a", 8.0, 2), FakeNode("b", 8.0, 2))
    world.hear_all()
    kept = manifest("kept", cpu=1.0, gpu=["L4"], min_instances=2, max_instances=3, keep_alive=5.0)
    world.view = deployed(world.view, kept)
    live_for(world, 10)
    there = world.live(KEPT)
    world.wait_for(KEPT, 3)
    world.plan()
    (third,) = [name for name in world.live(KEPT) if name not in there]
    world.finish(third, InstanceState.FAILED, ERROR)
    world.wait_for(KEPT, 0)
    live_for(world, 1200)
    assert world.live(KEPT) == there
    world.view = deployed(world.view, manifest("wide", cpu=1.0, gpu=["L4:2"]))
    world.wait_for(WIDE, 1)
    live_for(world, 120)
    assert world.live(WIDE)
    assert len(world.live(KEPT)) == 2

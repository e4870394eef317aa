"""What a function may ask of its place, and who is served first. No I/O."""

import pytest

from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import ERROR, FakeNode, World, deployed, manifest

Key = tuple[str, int]
CHAT, OTHER = ("chat", 1), ("other", 1)


def world_of(*nodes: FakeNode) -> World:
    world = World(*nodes)
    world.hear_all()
    return world


def wanted(world: World, key: Key, calls: int = 1, **fields: object) -> None:
    world.view = deployed(world.view, manifest(key[0], **fields))
    world.wait_for(key, calls)


def places(world: World, key: Key) -> list[tuple[str, tuple[int, ...]]]:
    live = [world.view.instances[name] for name in world.live(key)]
    return sorted((instance.record.node, instance.gpus) for instance in live)


def test_several_accelerators_are_those_of_one_node() -> None:
    world = world_of(FakeNode("n1", cpu=8.0, gpus=1), FakeNode("n2", cpu=8.0, gpus=3))
    wanted(world, CHAT, gpu="L4:2")
    world.plan()
    assert places(world, CHAT) == [("n2", (0, 1))]
    world.hear_all()
    wanted(world, OTHER, gpu="L4:2")
    world.plan()
    assert places(world, OTHER) == []
    assert world.view.why(OTHER).startswith("all capacity is in use: needs 2 x L4")


def test_labels_choose_the_node() -> None:
    near, far = FakeNode("n1", cpu=8.0, gpus=0), FakeNode("n2", cpu=8.0, gpus=0)
    near.labels, far.labels = {"zone": "near"}, {"zone": "far", "disk": "fast"}
    world = world_of(near, far)
    wanted(world, CHAT, labels={"zone": "far"})
    wanted(world, OTHER, labels={"zone": "near", "disk": "fast"})
    world.plan()
    assert places(world, CHAT) == [("n2", ())]
    assert places(world, OTHER) == []
    assert "label disk=fast" in world.view.why(OTHER)


@pytest.mark.parametrize(("mine", "theirs", "first"), [(5, 0, CHAT), (0, 5, OTHER), (-5, 0, OTHER), (0, 0, CHAT)])
def test_the_more_urgent_is_served_first(mine: int, theirs: int, first: Key) -> None:
    world = world_of(FakeNode("n1", cpu=1.0, gpus=0))
    wanted(world, CHAT, priority=mine)
    wanted(world, OTHER, priority=theirs)
    world.plan()
    assert [key for key in (CHAT, OTHER) if places(world, key)] == [first]


def test_who_waits_is_told_why_and_starts_when_something_is_released() -> None:
    world = world_of(FakeNode("n1", cpu=1.0, gpus=0))
    wanted(world, CHAT, keep_alive=60)
    world.plan()
    world.hear_all()
    (running,) = world.live(CHAT)
    world.nodes["n1"].set(running, InstanceState.READY, running=1)
    world.hear_all()
    world.wait_for(CHAT, 0)
    wanted(world, OTHER)
    world.plan()
    assert places(world, OTHER) == []
    assert world.view.why(OTHER) == "all capacity is in use: needs 1 CPUs (has 0) on n1"
    world.finish(running, InstanceState.STOPPED)
    world.plan()
    assert places(world, OTHER) == [("n1", ())]
    assert OTHER not in world.view.pending


def test_a_function_that_fails_to_start_holds_back_no_other() -> None:
    world = world_of(FakeNode("n1", cpu=8.0, gpus=0))
    wanted(world, CHAT)
    world.plan()
    world.hear_all()
    world.finish(world.live(CHAT)[0], InstanceState.FAILED, ERROR)
    wanted(world, OTHER)
    world.plan()
    assert (places(world, CHAT), places(world, OTHER)) == ([], [("n1", ())])
    world.turn(1.5)
    assert places(world, CHAT) == [("n1", ())], "its own back-off is over"


def test_calls_are_shared_out_by_concurrency_up_to_the_most_instances() -> None:
    world = world_of(FakeNode("n1", cpu=8.0, gpus=0))
    wanted(world, CHAT, calls=5, concurrency=2, max_instances=4)
    world.plan()
    assert len(places(world, CHAT)) == 3
    world.wait_for(CHAT, 50)
    world.plan()
    assert len(places(world, CHAT)) == 4

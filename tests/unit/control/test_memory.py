"""Memory is promised once: an instance holds its own and its model's, and a node offers what loaderd's pool leaves."""

from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control import registry
from sllm_runtime.control.plan import SendStart, SendStop
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import GIB, FakeNode, World, deployed, manifest, version

MODEL = ModelRecord(digest="sha256:m", uri="/m", nbytes=10 * GIB, partitions=(10 * GIB,))


class Offering(FakeNode):
    """A node whose report says what it offers once its pool is left out: as the invoker's does."""

    def __init__(self, name: str, offered: int) -> None:
        super().__init__(name, cpu=64.0, gpus=0)
        self.offered = offered
        self.claims: dict[str, int] = {}

    def report(self) -> NodeStatus:
        held = sum(self.claims.get(name, 0) for name in self.holds)
        return msgspec.structs.replace(super().report(), memory=self.offered, free_memory=self.offered - held)


def large(world: World, name: str) -> None:
    """A function whose model has 10 GiB, deployed."""
    described = manifest(name, model="/m")
    record = msgspec.structs.replace(version(described), model=MODEL.digest)
    world.view = registry.activate(registry.create(world.view, record, MODEL), (name, 1))


def placed(world: World, key: tuple[str, int]) -> list[str]:
    return [instance.record.node for instance in world.view.of(key) if instance.live]


def test_a_model_goes_where_its_bytes_fit_beside_the_pool() -> None:
    """Both nodes have 16 GiB; the pool of the first may take 8 of them."""
    world = World(Offering("n1", 8 * GIB), Offering("n2", 16 * GIB))
    world.hear_all()
    large(world, "chat")
    world.wait_for(("chat", 1), 1)
    world.plan()
    assert placed(world, ("chat", 1)) == ["n2"]
    # What was placed and no report shows yet is counted with its model too: 16 - 11 is not enough for another one.
    large(world, "other")
    world.wait_for(("other", 1), 1)
    assert world.plan(deliver=False) == ()
    assert "11.0 GiB of memory (has 5.0 GiB)" in world.view.why(("other", 1))


def test_room_is_made_by_what_an_idle_instance_really_holds() -> None:
    """The node refuses by the bytes of the model; so the plan must see that one has to go."""
    node = Offering("n1", 16 * GIB)
    world = World(node)
    world.hear_all()
    for name in ("first", "second"):
        large(world, name)
    world.wait_for(("first", 1), 1)
    (start,) = world.plan()
    node.claims[start.instance] = 11 * GIB
    world.finish(start.instance, InstanceState.READY)
    world.wait_for(("first", 1), 0)
    world.turn(5.0)
    world.wait_for(("second", 1), 1)
    (stop,) = world.plan()
    assert isinstance(stop, SendStop)
    assert stop.instance == start.instance
    world.finish(start.instance, InstanceState.STOPPED)
    (again,) = world.plan()
    assert isinstance(again, SendStart)
    assert placed(world, ("second", 1)) == ["n1"]


@pytest.mark.parametrize(("offered", "refused"), [(10 * GIB, True), (11 * GIB, False)])
def test_what_no_node_can_ever_offer_is_said(offered: int, refused: bool) -> None:
    world = World(Offering("n1", offered))
    world.hear_all()
    large(world, "chat")
    world.wait_for(("chat", 1), 1)
    world.plan()
    why = world.view.why(("chat", 1))
    assert ("no node can run it" in why and "11.0 GiB of memory (has 10.0 GiB)" in why) == refused
    assert bool(placed(world, ("chat", 1))) != refused


def test_without_a_model_nothing_changes() -> None:
    world = World(Offering("n1", GIB))
    world.hear_all()
    world.view = deployed(world.view, manifest("small"))
    world.view = replace(world.view, models={MODEL.digest: MODEL})
    world.wait_for(("small", 1), 1)
    world.plan()
    assert placed(world, ("small", 1)) == ["n1"]

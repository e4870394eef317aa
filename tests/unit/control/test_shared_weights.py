"""A model is promised once on a node, however many instances use it. The judge is the invoker's own ledger."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_invoker.admission import Claim, Ledger
from sllm_runtime.control import registry
from sllm_runtime.control.fits import free, need_in
from sllm_runtime.control.minimums import crowded
from sllm_runtime.control.plan import Action, SendStart, SendStop
from sllm_runtime.control.providing.packing import nodes_for
from sllm_runtime.control.providing.provider import Shape
from sllm_runtime.control.scheduling.policies import POLICIES
from sllm_runtime.control.scheduling.startup import Preemption
from sllm_runtime.control.view import CARRIES
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import GIB, FakeNode, World, manifest, version

MODELS = {name: ModelRecord(digest=name, uri=f"/{name}", nbytes=size * GIB, partitions=(size * GIB,))
          for name, size in {"large": 10, "small": 3, "lora": 1}.items()}  # fmt: skip
FUNCTIONS = {"chat": ("large", ()), "also": ("large", ()), "tuned": ("large", ("lora",)), "mini": ("small", ("lora",)),
             "plain": (None, ())}  # fmt: skip


class Sharing(FakeNode):
    """A node that admits by the invoker's ledger and reports what that says."""

    def __init__(self, name: str, memory: int) -> None:
        super().__init__(name, cpu=64.0, gpus=0)
        self.ledger = Ledger(cpu=self.cpu, memory=memory * GIB)

    def left(self) -> Ledger:
        for name in self.ledger.claims.keys() - self.holds.keys():
            self.ledger = self.ledger.release(name)
        return self.ledger

    def report(self) -> NodeStatus:
        ledger = self.left()
        return msgspec.structs.replace(
            super().report(), memory=ledger.offered_memory, free_memory=ledger.free_memory, shared=ledger.shared
        )


class Shared(World):
    """All functions are there; what is started must be admitted."""

    def __init__(self, *nodes: Sharing, **more: object) -> None:
        super().__init__(*nodes)
        self.hear_all()
        for name, (model, adapters) in FUNCTIONS.items():
            described = manifest(name, model=model, max_instances=10, concurrency=1, engine=model is not None, **more)
            record = msgspec.structs.replace(
                version(described), model=model, adapters={each: each for each in adapters}
            )
            self.view = registry.activate(registry.create(self.view, record, None), (name, 1))
        self.view = replace(self.view, models=MODELS)

    def deliver(self, action: Action) -> None:
        super().deliver(action)
        if isinstance(action, SendStart):
            instance = self.view.instances[action.instance]
            node, need = self.nodes[instance.record.node], need_in(self.view, instance.key, instance.manifest)
            assert isinstance(node, Sharing)
            if action.instance not in node.ledger.claims:
                claim = Claim(need.cpu, need.own, instance.gpus, dict(need.weights))
                node.ledger = node.left().admit(action.instance, claim)

    def began(self, name: str, count: int) -> list[str]:
        """``count`` more instances of a function, as waiting calls have started them, ready now and idle."""
        before = set(self.live((name, 1)))
        self.wait_for((name, 1), len(before) + count)
        self.plan()
        self.wait_for((name, 1), 0)
        made = [instance for instance in self.live((name, 1)) if instance not in before]
        for instance in made:
            self.finish(instance, InstanceState.READY)
        return made


def test_instances_of_one_model_take_it_once() -> None:
    """Ten of 1 GiB beside a model of 10: 20 GiB, also those that no report shows yet, and of several functions."""
    node = Sharing("n1", 20)
    world = Shared(node)
    assert len(world.began("chat", 4)) == 4
    assert len(world.began("also", 4)) == 4
    assert len(world.began("chat", 2)) == 2
    assert node.ledger.free_memory == 0
    world.wait_for(("also", 1), 5)
    assert world.plan() == ()
    assert "1.0 GiB of memory (has 0 B)" in world.view.why(("also", 1))


def test_another_model_and_an_adapter_are_counted_beside_it() -> None:
    node = Sharing("n1", 17)
    world = Shared(node)
    assert world.began("chat", 1)
    assert world.began("tuned", 1)
    assert node.ledger.free_memory == 4 * GIB
    world.wait_for(("mini", 1), 1)
    assert world.plan(), "3 GiB, 1 of its own, and the adapter is there"
    assert node.left().free_memory == 0


def test_a_model_is_given_back_by_the_last_that_uses_it() -> None:
    """Two idle instances are ended for a start that needs the room of their model, none for one that uses it."""
    world = Shared(Sharing("n1", 13), keep_alive=600.0)
    both = world.began("chat", 2)
    assert len(both) == 2
    world.turn(5.0)
    world.wait_for(("tuned", 1), 1)
    (stop,) = world.plan()
    assert isinstance(stop, SendStop), "it lacks 1 GiB beside the model that it shares, so one is enough"
    world.wait_for(("tuned", 1), 0)
    world = Shared(Sharing("n1", 13), keep_alive=600.0)
    both = world.began("chat", 2)
    world.turn(5.0)
    world.wait_for(("mini", 1), 1)
    stops = world.plan()
    assert sorted(each.instance for each in stops) == sorted(both)


def at_work(memory: int, instances: int) -> Shared:
    """A node of so many GiB with instances of ``chat`` at work on calls that could go on elsewhere."""
    world = Shared(Sharing("n1", memory), keep_alive=600.0)
    world.policy = Preemption()
    for instance in world.began("chat", instances):
        node = world.nodes["n1"]
        node.set(instance, InstanceState.READY, running=1)
        node.instances[instance] = msgspec.structs.replace(node.instances[instance], capabilities=(CARRIES,))
    for known in tuple(world.view.instances.values()):
        able = msgspec.structs.replace(known.record, capabilities=(CARRIES,))
        world.view = world.view.put_instance(replace(known, record=able))
    world.turn(40.0)
    return world


@pytest.mark.parametrize(("name", "stopped"), [("mini", 2), ("also", 1)])
def test_what_works_is_stopped_together_where_only_that_gives_the_model_back(name: str, stopped: int) -> None:
    world = at_work(12, 2)
    world.wait_for((name, 1), 1)
    stops = world.plan()
    assert [type(each) for each in stops] == [SendStop] * stopped


def test_the_last_user_of_a_model_gives_nothing_of_it_to_a_start_that_needs_it_too() -> None:
    """Of 11 GiB: it would need 12, without the other as well."""
    world = at_work(11, 1)
    world.wait_for(("tuned", 1), 1)
    assert world.plan() == ()


def test_an_earlier_node_sets_them_aside_for_each() -> None:
    """Its report says nothing of what is shared, and it refuses what its own sum does not allow."""
    world = Shared(Sharing("n1", 21))
    world.began("chat", 1)
    node = world.view.nodes["n1"]
    assert node.status is not None
    world.view = world.view.put_node(replace(node, status=msgspec.structs.replace(node.status, shared=None)))
    world.wait_for(("chat", 1), 1)
    world.wait_for(("also", 1), 1)
    assert world.plan(deliver=False) == ()
    assert "11.0 GiB of memory (has 10.0 GiB)" in world.view.why(("also", 1))


def test_nodes_to_come_and_minimums_are_counted_alike() -> None:
    world = Shared(Sharing("n1", 16), min_instances=1)
    need = need_in(world.view, ("chat", 1), world.view.versions["chat", 1].manifest)
    shape = Shape(cpu=64.0, memory=16 * GIB)
    assert [nodes_for([need] * count, shape) for count in (6, 7)] == [1, 2]
    assert "room for 4 of the 5 instances" in crowded(world.view, ("chat", 1))


STEPS = st.one_of(
    st.tuples(st.just("want"), st.sampled_from(sorted(FUNCTIONS)), st.integers(0, 6)),
    st.tuples(st.just("hear"), st.sampled_from(["n1", "n2"]), st.just(0)),
    st.tuples(st.sampled_from(["ready", "work", "end"]), st.just(""), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.just(""), st.integers(1, 12)),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.lists(STEPS, max_size=25), st.integers(11, 30), st.integers(4, 20))
def test_what_is_placed_is_admitted(policy: str, steps: list[tuple[str, str, int]], one: int, two: int) -> None:
    """Whatever comes and goes, by every policy, with reports that are late: a node never has to refuse."""
    world = Shared(Sharing("n1", one), Sharing("n2", two), keep_alive=5.0)
    world.policy = POLICIES[policy]()
    for what, name, number in steps:
        running = [(node, each) for node in world.nodes.values() for each in node.instances.values()]
        there = [(node, each) for node, each in running if each.state in (InstanceState.STARTING, InstanceState.READY)]
        if what == "want":
            world.wait_for((name, 1), number)
        elif what == "hear":
            world.hear(name)
        elif what == "wait":
            world.turn(float(number))
        elif there:
            node, each = there[number % len(there)]
            node.set(each.instance, InstanceState.STOPPED if what == "end" else InstanceState.READY)
            if what == "work":
                node.set(each.instance, InstanceState.READY, running=1)
        world.plan()
    world.hear_all()
    as_seen(world)


def as_seen(world: Shared) -> None:
    """When everybody has reported the controller takes for free what the ledger does, now and when all have gone."""
    for name, fake in world.nodes.items():
        assert isinstance(fake, Sharing)
        ledger, node = fake.left(), world.view.nodes[name]
        assert ledger.free_memory >= 0
        now = free(world.view, node)
        assert now is not None
        assert (now.memory, dict(now.shared)) == (ledger.free_memory, ledger.shared)
        empty = free(world.view, node, [each for each in world.view.on(name).values() if not each.ended])
        assert empty is not None
        assert (empty.memory, dict(empty.shared)) == (ledger.offered_memory, {})

"""When calls that wait begin at the instances that there are, and what is not started for them then."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control import instances
from sllm_runtime.control.plan import SendStart
from sllm_runtime.control.scheduling.learned import COLD_SANDBOX_S, INIT_S
from sllm_runtime.control.scheduling.serving import MOST, last_begins_s
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import FakeNode, World, deployed, manifest

CHAT = ("chat", 1)
TAKES = 0.2
LONG = 60.0
START_S = COLD_SANDBOX_S + INIT_S
"""That a start is expected to take there."""


def at_work(instances: int = 1, concurrency: int = 1, call_s: float = TAKES) -> World:
    """Instances that work on as many calls as they take, of which each is known to take ``call_s``."""
    world = World(FakeNode("n1", cpu=64.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", concurrency=concurrency, max_instances=8))
    world.wait_for(CHAT, instances * concurrency)
    world.plan()
    world.hear_all()
    for name in world.live(CHAT):
        world.nodes["n1"].set(name, InstanceState.READY, served=4, worked_s=4 * call_s, running=concurrency)
    world.hear_all()
    return world


def begins_s(world: World, waiting: int) -> float:
    world.wait_for(CHAT, waiting)
    return last_begins_s(world.view, CHAT, world.now)


@pytest.mark.parametrize(
    ("instances", "concurrency", "waiting", "after"),
    [(1, 1, 1, 1.0), (1, 1, 3, 3.0), (2, 1, 3, 2.0), (1, 4, 1, 0.25), (1, 4, 5, 1.25), (2, 2, 5, 1.5)],
)
def test_calls_begin_as_others_end(instances: int, concurrency: int, waiting: int, after: float) -> None:
    assert begins_s(at_work(instances, concurrency, call_s=1.0), waiting) == pytest.approx(after)


def test_a_call_that_takes_longer_than_usual_is_expected_to_take_as_long_again() -> None:
    world = at_work(call_s=1.0)
    found = []
    for _ in range(4):
        world.now += 0.5
        found.append(begins_s(world, 1))
    assert found == [pytest.approx(each) for each in (0.5, 1.0, 1.5, 2.0)]


def test_a_call_that_ends_is_a_new_turn() -> None:
    world = at_work(call_s=1.0)
    world.now += 3.0
    (name,) = world.live(CHAT)
    world.nodes["n1"].set(name, InstanceState.READY, served=5, worked_s=5.0, running=1)
    world.hear_all()
    assert begins_s(world, 1) == pytest.approx(1.0)


def test_nobody_knows_of_calls_of_which_none_has_ended() -> None:
    world = World(FakeNode("n1", cpu=64.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", max_instances=8))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    world.finish(world.live(CHAT)[0], InstanceState.READY)
    assert begins_s(world, 1) == inf


@pytest.mark.parametrize("why", ["suspect", "moves", "ends"])
def test_an_instance_that_takes_no_calls_does_not_count(why: str) -> None:
    world = at_work()
    (name,) = world.live(CHAT)
    instance = world.view.instances[name]
    if why == "suspect":
        world.view = replace(world.view, suspects={name: 1})
    elif why == "moves":
        record = msgspec.structs.replace(instance.record, moves_to="another")
        world.view = world.view.put_instance(replace(instance, record=record))
    else:
        world.view = instances.stop(world.view, instance, "because", 1.0)
    assert begins_s(world, 1) == inf


def test_so_many_are_not_waited_for() -> None:
    assert begins_s(at_work(concurrency=MOST, call_s=0.001), MOST + 1) == inf


def test_an_instance_that_would_find_nobody_waiting_is_not_started() -> None:
    world = at_work(call_s=START_S / 2)
    world.wait_for(CHAT, 1)
    assert world.plan() == ()
    assert "all its calls are expected to begin at instances that it has" in world.view.why(CHAT)
    assert CHAT not in world.view.put_off, "it waits for no place"
    world.wait_for(CHAT, 3)
    assert [type(action) for action in world.plan()] == [SendStart]


def test_one_that_starts_counts_from_when_it_will_be_ready() -> None:
    world = at_work(call_s=START_S / 4)
    world.now += LONG  # what runs is expected to go on for a minute
    world.hear_all()
    world.wait_for(CHAT, 1)
    assert [type(action) for action in world.plan()] == [SendStart]
    assert world.plan() == ()
    world.wait_for(CHAT, 2)
    assert [type(action) for action in world.plan()] == [SendStart], "two calls, of which it takes one"


def test_no_call_waits_much_longer_than_for_the_start_that_was_not_made() -> None:
    """Though the call before it never ends."""
    world = at_work(call_s=START_S / 2)
    world.wait_for(CHAT, 1)
    began = world.now
    while not (actions := world.plan()):
        world.now += 0.01
        world.hear_all()
    assert [type(action) for action in actions] == [SendStart]
    assert world.now - began <= START_S + 0.02


def test_what_is_wanted_without_a_call_is_started_all_the_same() -> None:
    world = at_work(call_s=START_S / 2)
    world.view = replace(world.view, warm={CHAT: {2: world.now + LONG}})
    world.wait_for(CHAT, 1)
    assert [type(action) for action in world.plan()] == [SendStart]
    assert world.plan() == ()


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 30),
    st.floats(0.01, 10.0),
)
def test_more_calls_begin_later_and_more_instances_sooner(counts: list[int], waiting: int, call_s: float) -> None:
    found = [begins_s(at_work(instances, call_s=call_s), waiting) for instances in sorted(counts)]
    assert found == sorted(found, reverse=True)
    world = at_work(counts[0], call_s=call_s)
    assert begins_s(world, waiting) <= begins_s(world, waiting + 1)

"""Instances that are there before anybody calls."""

import asyncio

import pytest

from sllm_runtime.control import autoscale, warmup
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import FunctionNotFound, InvalidRequest, StartFailed
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.bench import Bench
from tests.unit.control.bench import manifest as deployable
from tests.unit.control.world import ERROR, FakeNode, World, deployed, manifest

CHAT = ("chat", 1)


@pytest.fixture
def world() -> World:
    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", max_instances=3, keep_alive=3))
    return world


def ask(world: World, instances: int, seconds: float = 60.0) -> None:
    world.view = warmup.asked(world.view, CHAT, instances, world.now + seconds)
    world.plan()
    world.hear_all()


def test_so_many_are_started_for_no_call_and_live_by_their_keep_alive(world: World) -> None:
    ask(world, 2)
    first, second = world.live(CHAT)
    world.finish(first, InstanceState.READY)
    assert warmup.answer(world.view, CHAT, 2, world.now) is None
    world.turn(10.0)
    assert first in world.live(CHAT), "it is waited for together with the other one"
    world.finish(second, InstanceState.READY)
    told = warmup.answer(world.view, CHAT, 2, world.now)
    assert told == ctl.Warmed(function="chat", version=1, wanted=2, ready=2)
    world.view = warmup.granted(world.view, CHAT, 2)
    world.turn(1.0)
    assert world.live(CHAT) == [second], "the first has been idle for longer than its keep-alive"
    world.turn(3.0)
    assert world.live(CHAT) == []


def test_who_stops_asking_wants_nothing_any_more(world: World) -> None:
    ask(world, 3, seconds=2.0)
    for name in world.live(CHAT):
        world.finish(name, InstanceState.READY)
    world.turn(8.0)
    assert not world.view.warm
    assert world.live(CHAT) == []


def test_of_two_who_want_as_many_the_one_who_waits_longer_is_heeded(world: World) -> None:
    """Who comes later, and is less patient, shortens nobody's wish."""
    ask(world, 2, seconds=30.0)
    ask(world, 2, seconds=1.0)
    for name in world.live(CHAT):
        world.finish(name, InstanceState.READY)
    world.turn(20.0)
    assert len(world.live(CHAT)) == 2


def test_a_start_that_fails_ends_it(world: World) -> None:
    ask(world, 1)
    (name,) = world.live(CHAT)
    world.finish(name, InstanceState.FAILED, ERROR)
    with pytest.raises(StartFailed, match="it does not import"):
        warmup.answer(world.view, CHAT, 1, world.now)


def test_of_two_who_ask_at_once_both_get_theirs(world: World) -> None:
    ask(world, 3, seconds=20.0)
    ask(world, 1, seconds=2.0)
    first, second, third = world.live(CHAT)
    for name in (first, second):
        world.finish(name, InstanceState.READY)
    assert warmup.answer(world.view, CHAT, 1, world.now) is not None
    world.view = warmup.granted(world.view, CHAT, 1)
    world.turn(5.0)
    assert set(world.live(CHAT)) == {first, second, third}, "the other one waits for them"
    world.finish(third, InstanceState.READY)
    world.view = warmup.granted(world.view, CHAT, 3)
    assert not world.view.warm


def test_it_is_said_what_is_waited_for(world: World) -> None:
    world.view = deployed(world.view, manifest("wide", cpu=4.0, max_instances=3))
    world.view = warmup.asked(world.view, ("wide", 1), 3, world.now + 60.0)
    world.plan()
    told = warmup.so_far(world.view, ("wide", 1), 3)
    assert told.ready == 0
    assert told.progress is not None
    assert "4 CPUs" in told.progress.message


@pytest.mark.parametrize("instances", [0, -1, 4])
def test_no_more_than_it_may_have(world: World, instances: int) -> None:
    with pytest.raises(InvalidRequest, match="max_instances is 3"):
        warmup.asked(world.view, CHAT, instances, world.now)


async def test_over_the_bus(bench: Bench) -> None:
    await bench.gateway.deploy(deployable(max_instances=2, keep_alive=600, memory="1GiB"))
    bench.node.behave = lambda command: InstanceState.STARTING
    wish = ctl.Warmup(function="chat", instances=2, wait_s=0.2)
    told: ctl.Warmed = await bench.gateway.ask("warmup", wish)
    assert told.ready == 1
    assert told.progress is not None
    asked = asyncio.create_task(bench.gateway.ask("warmup", ctl.Warmup(function="chat", instances=2, wait_s=15.0)))
    bench.node.put(bench.node.held[-1].instance, InstanceState.READY)
    assert (await asked).ready == 2
    for started in bench.node.held:
        bench.node.put(started.instance, InstanceState.READY, idle_s=1000.0)
    await bench.none_left()
    with pytest.raises(FunctionNotFound):
        await bench.gateway.ask("warmup", ctl.Warmup(function="nobody"))


def test_a_wish_that_was_given_up_is_not_kept_up_by_who_wants_fewer(world: World) -> None:
    world.view = warmup.asked(world.view, CHAT, 3, world.now + 2.0)  # Ctrl-C: three were too many
    world.view = warmup.asked(world.view, CHAT, 1, world.now + 60.0)
    world.now += 8.0
    world.view = warmup.lapsed(world.view, world.now)
    assert autoscale.floor(world.view, CHAT, world.view.versions[CHAT].manifest) == 1

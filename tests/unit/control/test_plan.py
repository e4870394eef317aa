"""The plan, example by example: starts, back-off, keep-alive, room, losses. No I/O."""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control import instances, registry, warmup
from sllm_runtime.control.autoscale import HANDOVER_S, keep_s
from sllm_runtime.control.changes import writes
from sllm_runtime.control.draining import cordon
from sllm_runtime.control.fits import free
from sllm_runtime.control.loop import refused
from sllm_runtime.control.placement import Decision, Request, Wait, evictable, may_start
from sllm_runtime.control.plan import REPEAT_DRAIN_S, REPEAT_S, TAKE_S, SendStart, SendStop
from sllm_runtime.control.reports import departed, suspect
from sllm_runtime.control.routes import route
from sllm_runtime.control.scheduling.learned import Recent
from sllm_runtime.control.scheduling.policies import POLICIES, Random
from sllm_runtime.control.view import Failure, Node, View
from sllm_runtime.protocol.errors import NoCapacity, ProtocolError
from sllm_runtime.protocol.limits import LOST_AFTER_S, OVERDUE_S
from sllm_runtime.protocol.node import NodeRecord
from sllm_runtime.protocol.records import InstanceRecord, ModelRecord
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.subjects import instance_key
from sllm_runtime.protocol.timeline import Span
from tests.unit.control.world import ERROR, GIB, FakeNode, World, deployed, manifest, version

CHAT = ("chat", 1)


@pytest.fixture
def world() -> World:
    world = World(FakeNode("n1", cpu=4.0, gpus=1), FakeNode("n2", cpu=4.0, gpus=0))
    world.hear_all()
    return world


def test_nothing_runs_until_somebody_calls(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    assert world.plan() == ()
    world.wait_for(CHAT, 7)
    assert [type(action) for action in world.plan()] == [SendStart]
    assert world.plan() == ()


def test_a_start_is_repeated_until_the_node_shows_it(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    first = world.plan(deliver=False)
    world.now += 1.0
    world.hear_all()
    assert world.plan() == first
    world.hear_all()
    world.now += 1.0
    world.hear_all()
    assert world.plan() == ()


def test_an_instance_that_its_node_does_not_take_fails(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    deadline = world.now + TAKE_S + 1
    while world.now < deadline:
        world.now += 0.5
        world.hear_all()
        world.plan(deliver=False)
    assert "did not begin" in world.view.failures[CHAT].error.message


def test_a_failed_start_is_left_alone_twice_as_long_each_time(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    for _ in range(4):
        world.plan()
        while not world.live(CHAT):
            world.turn(0.25)
        world.hear_all()
        world.finish(world.live(CHAT)[0], InstanceState.FAILED, ERROR)
    times = [when for when, _ in world.started]
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(times)]
    assert gaps == [1, 2, 4]


def test_ready_ends_the_back_off_and_a_crash_does_not_hold_back_a_caller(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    world.plan()
    (name,) = world.live(CHAT)
    world.hear_all()
    world.finish(name, InstanceState.READY)
    world.finish(name, InstanceState.LOST)
    assert not world.view.failures[CHAT].blocking
    assert [type(action) for action in world.plan()] == [SendStart]


def test_a_crash_holds_back_the_restart_that_nobody_asked_for(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", min_instances=1))
    world.plan()
    (name,) = world.live(CHAT)
    world.hear_all()
    world.finish(name, InstanceState.READY)
    world.finish(name, InstanceState.LOST)
    assert world.plan() == ()
    world.turn(1.5)
    assert len(world.live(CHAT)) == 1


@pytest.mark.parametrize("who", ["nobody", "caller", "warmup", "deployment"])
def test_a_crash_holds_back_nobody_who_asks(world: World, who: str) -> None:
    world.view = deployed(world.view, manifest("chat", min_instances=1))
    crash = Failure(error=ERROR, attempts=5, at=world.now, until=world.now + 16.0, blocking=False)
    world.view = world.view.put_failure(CHAT, crash)
    if who == "caller":
        world.wait_for(CHAT, 1)
    elif who == "warmup":
        world.view = warmup.asked(world.view, CHAT, 1, world.now + 60.0)
    elif who == "deployment":
        world.view = world.view.put_trial(CHAT, True)
    world.plan()
    assert bool(world.live(CHAT)) is (who != "nobody")


def test_idle_past_keep_alive_is_stopped_and_not_before(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", keep_alive=10))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    world.finish(world.live(CHAT)[0], InstanceState.READY)
    world.wait_for(CHAT, 0)
    world.turn(9.0)
    assert len(world.live(CHAT)) == 1
    world.turn(2.0)
    assert world.live(CHAT) == []
    assert world.nodes["n1"].holds == world.nodes["n2"].holds == {}


def started(world: World, took: float, key: tuple[str, int] = CHAT) -> str:
    """The one instance of a version, ready after ``took`` seconds and idle from then on."""
    world.wait_for(key, 1)
    world.plan()
    (name,) = world.live(key)
    world.turn(took)
    world.finish(name, InstanceState.READY)
    world.wait_for(key, 0)
    return name


def test_a_keep_alive_of_load_time_is_what_its_start_was_expected_to_take(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", keep_alive="load-time"))
    slow = replace(world.view.learned, imports={CHAT: Recent((20.0,), 20.0)})
    world.view = replace(world.view, learned=slow)
    name = started(world, 5.0)
    expected = world.view.instances[name].predicted
    assert expected is not None
    assert expected.seconds > 20.0
    world.turn(20.0)
    assert world.live(CHAT) == [name]
    world.turn(expected.seconds - 20.0 + 1.0)
    assert world.live(CHAT) == []


@pytest.mark.parametrize(("took_ms", "kept"), [(0.0, HANDOVER_S), (7000.0, 8.0)])
def test_where_no_start_was_expected_it_is_what_it_took(world: World, took_ms: float, kept: float) -> None:
    world.policy = Random()
    world.view = deployed(world.view, manifest("chat", keep_alive="load-time"))
    name = started(world, 3.0)
    instance = world.view.instances[name]
    assert instance.predicted is None
    told = replace(instance, spans=(Span("sandbox", 0.0, 1.0), Span("weights", 1000.0, took_ms)) if took_ms else ())
    assert keep_s(told) == kept


def test_one_that_is_idle_stays_while_somebody_waits_and_takes_the_call_that_is_on_its_way(world: World) -> None:
    name = _ready(world, keep_alive=2)
    world.turn(5.0)
    assert world.live(CHAT) == [name]
    world.wait_for(CHAT, 0)
    (stop,) = world.plan()
    assert isinstance(stop, SendStop)
    assert (stop.instance, stop.grace_s) == (name, 300.0)


def test_without_a_keep_alive_it_is_there_for_the_call_that_it_was_started_for(world: World) -> None:
    name = _ready(world, keep_alive=0)
    world.wait_for(CHAT, 0)
    world.turn(HANDOVER_S - 0.5)
    assert world.live(CHAT) == [name]
    world.turn(0.5)
    assert world.live(CHAT) == []


def test_the_minimum_stays_however_idle(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", keep_alive=2, min_instances=1, max_instances=2))
    world.wait_for(CHAT, 2)
    world.plan()
    world.hear_all()
    for name in world.live(CHAT):
        world.finish(name, InstanceState.READY)
    assert len(world.live(CHAT)) == 2
    world.wait_for(CHAT, 0)
    world.turn(10.0)
    assert len(world.live(CHAT)) == 1
    assert len(world.started) == 2, "it is the one that was there, not a new one"


@pytest.mark.parametrize(("least", "waiting", "may"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_what_is_idle_and_wanted_makes_no_room(world: World, least: int, waiting: int, may: bool) -> None:
    name = _ready(world, keep_alive=60, min_instances=least)
    world.turn(5.0)
    world.wait_for(CHAT, waiting)
    other = Request(("other", 1), manifest("other"))
    assert evictable(other, world.view, world.view.instances[name], world.now) is may


def test_a_retired_version_keeps_no_minimum(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", min_instances=1, keep_alive=2))
    world.plan()
    world.hear_all()
    world.finish(world.live(CHAT)[0], InstanceState.READY)
    world.view = deployed(world.view, manifest("chat", keep_alive=2), 2)
    world.turn(3.0)
    assert world.live(CHAT) == []


def test_a_deployment_takes_the_place_of_the_version_before_it(world: World) -> None:
    """One GPU, held by the idle active version: the new one's trial must not wait for ever."""
    world.view = deployed(world.view, manifest("chat", gpu="L4", min_instances=1))
    world.plan()
    world.hear_all()
    world.finish(world.live(CHAT)[0], InstanceState.READY)
    world.turn(2.0)
    record = manifest("chat", gpu="L4", min_instances=1)
    world.view = registry.create(world.view, version(record, 2), None)
    world.turn(1.0)
    assert world.live(CHAT) == []
    assert len(world.live(("chat", 2))) == 1
    world.turn(3.0)
    assert world.live(CHAT) == [], "the one that made room does not take it back"


def test_a_busy_instance_is_never_moved_for_another(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", gpu="L4"))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    (name,) = world.live(CHAT)
    world.nodes["n1"].set(name, InstanceState.READY, running=1)
    world.wait_for(CHAT, 0)
    world.view = deployed(world.view, manifest("other", gpu="L4"))
    world.wait_for(("other", 1), 1)
    world.turn(5.0)
    assert world.live(CHAT) == [name]
    assert world.view.why(("other", 1)) == "all capacity is in use: needs 1 x L4 (has none) on n1"


def test_the_words_for_what_no_node_has(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", gpu="H100:2"))
    world.wait_for(CHAT, 1)
    world.plan()
    assert world.view.why(CHAT) == "no node can run it; the nearest, n1, lacks 2 x H100 (has 1 x L4)"


def test_a_refusal_is_no_failure_and_another_node_is_asked(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    (action,) = world.plan(deliver=False)
    node = world.view.instances[action.instance].record.node
    world.view = refused(world.view, action, NoCapacity("full"), world.now)
    (again,) = world.plan()
    assert world.view.instances[again.instance].record.node != node
    assert world.view.failures == {}


def test_what_its_node_never_began_has_ended_once_the_node_has_heard_that_it_is_to(world: World) -> None:
    """No report will ever say so."""
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    world.plan(deliver=False)
    (name,) = world.live(CHAT)
    world.wait_for(CHAT, 0)
    world.view = instances.stop(world.view, world.view.instances[name], "the function is deleted", 0.0)
    (stop,) = world.plan(deliver=False)
    world.view = refused(world.view, stop, ProtocolError("not now"), world.now)
    assert not world.view.instances[name].ended, "it may have begun"
    world.deliver(stop)
    assert world.view.instances[name].ended
    assert not world.view.failures


def test_what_its_node_has_shown_is_there_whatever_it_answers_to_its_start(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    (start,) = world.plan()
    world.hear_all()
    assert refused(world.view, start, NoCapacity("it is full"), world.now) is world.view


def test_what_its_node_has_not_shown_yet_gives_nothing_back(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", cpu=1.0))
    world.wait_for(CHAT, 1)
    world.plan(deliver=False)
    (name,) = world.live(CHAT)
    instance = world.view.instances[name]
    node = world.view.nodes[instance.record.node]
    for leaving, cpu in (((), 3.0), ((instance,), 4.0)):
        left = free(world.view, node, leaving)
        assert left is not None
        assert left.cpu == cpu


def test_another_error_of_the_node_is_a_failed_start(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    (action,) = world.plan(deliver=False)
    world.view = refused(world.view, action, ProtocolError("what is this"), world.now)
    assert world.view.failures[CHAT].error.code == "protocol_error"
    assert world.plan() == ()


def _ready(world: World, **fields: object) -> str:
    """An instance that somebody waited for, and waits for still."""
    world.view = deployed(world.view, manifest("chat", **fields))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    (name,) = world.live(CHAT)
    world.finish(name, InstanceState.READY)
    return name


def test_a_silent_node_loses_its_instances_only_if_we_listened(world: World) -> None:
    name = _ready(world)
    world.now += LOST_AFTER_S + 1
    world.reset_listening()
    world.plan()
    assert world.live(CHAT) == [name]
    world.now += LOST_AFTER_S + 1
    world.plan()
    assert name not in world.live(CHAT)


def test_a_node_that_has_left_loses_its_instances_until_it_is_heard_again(world: World) -> None:
    name = _ready(world)
    node = world.view.instances[name].record.node
    assert departed(world.view, "nobody") is world.view
    world.view = departed(world.view, node)
    assert departed(world.view, node) is world.view
    assert world.view.silent(node, world.now)
    assert not world.view.alive(node, world.now)
    assert not may_start(world.view, CHAT, world.now)(world.view.nodes[node])
    world.plan()
    assert name not in world.live(CHAT)
    world.view = cordon(world.view, node, cordoned=True, drain=False)
    assert world.view.silent(node, world.now), "what an operator decides does not bring it back"
    world.view = cordon(world.view, node, cordoned=False, drain=False)
    world.hear_all()
    assert world.view.alive(node, world.now)
    assert may_start(world.view, CHAT, world.now)(world.view.nodes[node])


def test_who_is_overdue_was_to_be_heard_while_we_listened(world: World) -> None:
    world.hear_all()
    everybody = set(world.view.nodes)
    assert world.view.overdue(world.now) == ()
    world.now += OVERDUE_S
    assert set(world.view.overdue(world.now)) == everybody
    first, *others = sorted(everybody)
    world.hear(first)
    assert set(world.view.overdue(world.now)) == set(others)
    world.now += OVERDUE_S
    world.view = departed(world.view, first)
    assert set(world.view.overdue(world.now)) == set(others), "it has left already"
    world.reset_listening()
    assert world.view.overdue(world.now) == ()
    world.now += OVERDUE_S
    assert set(world.view.overdue(world.now)) == set(others)
    world.now += LOST_AFTER_S
    assert world.view.overdue(world.now) == (), "they are silent already"


def test_one_that_this_controller_never_heard_is_overdue_too() -> None:
    record = NodeRecord(node="n1", first_seen=1.0)
    view = View(listening_since=100.0).put_node(Node(record))
    assert view.overdue(100.0) == ()
    assert view.overdue(100.0 + OVERDUE_S) == ("n1",)
    assert departed(view, "n1").silent("n1", 100.0 + OVERDUE_S)
    assert view.overdue(100.0 + LOST_AFTER_S) == ()


def test_what_a_node_does_and_nobody_knows_is_ended(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    (name,) = world.live(CHAT)
    world.view = registry.remove(world.view, "chat")
    world.view = instances.withdraw(world.view, world.view.instances[name])
    (action,) = world.plan()
    assert isinstance(action, SendStop)
    assert action.instance == name
    assert action.resume, "calls that run there were cancelled by nobody: they go on elsewhere"
    world.hear_all()
    assert world.plan() == ()
    assert world.view.orphans == {}


def _ready_and_forgotten(world: World, **fields: object) -> str:
    """An instance that works on a call and no record names, under a controller that has just begun."""
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", **fields))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    (name,) = world.live(CHAT)
    world.nodes["n1"].set(name, InstanceState.READY, running=1)
    world.view = deployed(View(listening_since=world.now), manifest("chat", **fields))
    return name


def test_what_a_leader_before_began_and_did_not_record_is_taken_in() -> None:
    """A call may have been routed there before it died."""
    world = World(FakeNode("n1", 4, 0))
    name = _ready_and_forgotten(world)
    before = world.view
    world.hear_all()
    assert world.view.instances[name].ready
    assert world.plan() == ()
    (written,) = (write for write in writes(before, world.view, {}, {}) if write.key == instance_key(name))
    assert isinstance(written.record, InstanceRecord)
    assert (written.record.node, written.record.state) == ("n1", InstanceState.READY)
    found = route(world.view, CHAT)
    assert found is not None
    assert [entry.instance for entry in found.entries] == [name]
    world.turn(2.0)
    assert world.live(CHAT) == [name], "it is an instance as any other"


def test_one_that_has_no_room_in_its_version_ends_after_its_calls() -> None:
    world = World(FakeNode("n1", 4, 0), FakeNode("n2", 4, 0))
    name = _ready_and_forgotten(world, max_instances=1)
    world.hear("n2")
    world.wait_for(CHAT, 1)
    world.plan()
    (other,) = world.live(CHAT)
    world.hear("n1")
    stops = [action for action in world.plan() if isinstance(action, SendStop)]
    assert [(stop.instance, stop.grace_s, stop.resume) for stop in stops] == [(name, 300.0, True)]
    assert world.live(CHAT) == [other]


def test_one_that_still_starts_and_has_no_room_in_its_version_ends_at_once() -> None:
    """Nobody was ever sent there."""
    world = World(FakeNode("n1", 4, 0), FakeNode("n2", 4, 0))
    name = _ready_and_forgotten(world, max_instances=1)
    world.nodes["n1"].set(name, InstanceState.STARTING, running=0)
    world.hear("n2")
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear("n1")
    stops = [action for action in world.plan() if isinstance(action, SendStop)]
    assert [(stop.instance, stop.grace_s) for stop in stops] == [(name, 0.0)]


def test_an_end_is_told_again_soon_until_its_node_has_taken_it_and_then_now_and_then(world: World) -> None:
    name = _ready(world)
    world.wait_for(CHAT, 0)
    node = world.nodes[world.view.instances[name].record.node]
    node.set(name, InstanceState.READY, running=1)
    world.hear(node.name)
    world.view = instances.stop(world.view, world.view.instances[name], "its node is drained", 60.0)
    assert len(world.plan(deliver=False)) == 1
    node.set(name, InstanceState.DRAINING)  # the command has come, its answer has not
    for passed, told in ((REPEAT_S - 0.1, 0), (0.1, 1), (REPEAT_S, 0), (REPEAT_DRAIN_S - REPEAT_S, 1)):
        world.now += passed
        world.hear_all()
        assert len(world.plan()) == told


def test_one_that_comes_back_from_a_silence_ends_after_its_calls() -> None:
    """It was told to be lost: it is not called any more, and what still runs there has its time."""
    world = World(FakeNode("n1", 4, 0))
    name = _ready_and_forgotten(world)
    world.hear_all()
    world.now += LOST_AFTER_S + 1
    world.plan()
    assert world.live(CHAT) == []
    world.hear_all()
    stops = [action for action in world.plan() if isinstance(action, SendStop)]
    assert [(stop.instance, stop.grace_s, stop.resume) for stop in stops] == [(name, 300.0, True)]
    assert world.live(CHAT) == []


def test_what_is_on_a_node_that_no_record_names_is_lost(world: World) -> None:
    """Nobody would ever miss its reports."""
    name = _ready(world)
    world.view = world.view.drop_nodes([world.view.instances[name].record.node])
    world.plan()
    assert world.view.instances[name].state is InstanceState.LOST


def test_a_node_that_was_silent_is_not_taken_to_live_since_we_may_have_missed_something(world: World) -> None:
    """A reconnect, or a loop that stood still, made it alive for five seconds more, with its old report."""
    name = _ready(world)
    node = world.view.instances[name].record.node
    world.nodes[node].alive = False
    world.turn(LOST_AFTER_S + 1)
    assert world.view.silent(node, world.now)
    world.reset_listening()
    assert world.view.silent(node, world.now)
    assert not world.view.alive(node, world.now)
    assert not may_start(world.view, CHAT, world.now)(world.view.nodes[node])
    world.nodes[node].alive = True
    world.hear_all()
    assert world.view.alive(node, world.now)


def test_a_node_that_was_not_heard_since_a_reconnect_may_have_taken_its_start(world: World) -> None:
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    world.plan(deliver=False)
    world.now += TAKE_S + 1
    world.reset_listening()
    world.plan(deliver=False)
    assert CHAT not in world.view.failures


def test_after_a_failed_start_the_next_is_made_on_another_node() -> None:
    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    world.nodes["n1"].models = ("sha256:m",)
    world.hear_all()
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    used = []
    for attempt in range(3):
        world.turn(2.0**attempt + 0.5)
        (name,) = world.live(CHAT)
        used.append(world.view.instances[name].record.node)
        world.finish(name, InstanceState.FAILED, ERROR)
    assert used[0] != used[1] == used[2], "where it has failed as well it is tried again: no other one is left"
    assert "a start failed there" in world.view.refused[CHAT, used[0]].reason


def test_where_the_other_node_is_full_the_one_where_it_failed_is_tried_again_after_the_back_off() -> None:
    """And the other one is preferred as soon as it has room."""
    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    world.nodes["n1"].models = ("sha256:m",)
    world.hear_all()
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    (name,) = world.live(CHAT)
    first = world.view.instances[name].record.node
    (other,) = {"n1", "n2"} - {first}
    world.nodes[other].holds["another"] = (4.0, ())
    world.hear(other)
    world.finish(name, InstanceState.FAILED, ERROR)
    world.turn(0.5)
    assert not world.live(CHAT), "the version is in its back-off"
    world.turn(1.0)
    (name,) = world.live(CHAT)
    assert world.view.instances[name].record.node == first
    assert CHAT not in world.view.pending
    world.finish(name, InstanceState.FAILED, ERROR)
    del world.nodes[other].holds["another"]
    world.turn(2.5)
    (name,) = world.live(CHAT)
    assert world.view.instances[name].record.node == other


def failed_on(world: World, **fields: object) -> str:
    """Where a start of ``chat`` was made, and failed: of its two nodes one is full."""
    world.nodes["n2"].holds["another"] = (4.0, ())
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", **fields))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    (instance,) = world.live(CHAT)
    world.finish(instance, InstanceState.FAILED, ERROR)
    return world.view.instances[instance].record.node


def other_on_n2(world: World) -> str:
    """In place of what fills it there is an instance of another function, which is ready."""
    del world.nodes["n2"].holds["another"]
    world.nodes["n2"].labels = {"zone": "b"}
    world.view = deployed(world.view, manifest("other", cpu=4.0, labels={"zone": "b"}))
    world.wait_for(("other", 1), 1)
    world.hear_all()
    world.plan()
    (name,) = world.live(("other", 1))
    world.wait_for(("other", 1), 0)
    world.finish(name, InstanceState.READY)
    return name


@pytest.mark.parametrize("policy", ["startup-time", "availability"])
def test_what_is_being_ended_for_a_start_is_waited_for_before_the_node_where_it_failed_is_asked(policy: str) -> None:
    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    world.policy = POLICIES[policy]()
    assert failed_on(world, cpu=4.0) == "n1"
    idle = other_on_n2(world)
    world.nodes["n2"].set(idle, InstanceState.READY, idle_s=100.0, served=1)
    world.now += 1.5
    world.hear_all()
    world.plan(deliver=False)
    assert world.view.instances[idle].stop is not None
    for _ in range(8):
        world.now += 0.25
        world.hear_all()
        world.plan(deliver=False)
        assert not world.live(CHAT)
    world.finish(idle, InstanceState.STOPPED)
    world.plan()
    (name,) = world.live(CHAT)
    assert world.view.instances[name].record.node == "n2"


def test_calls_that_were_to_end_and_do_not_are_not_waited_for_where_another_node_has_room() -> None:
    """Though the start has failed there, once."""
    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    view = world.view.put_model(ModelRecord(digest="sha256:m", uri="s3://m/m", nbytes=GIB, partitions=(GIB,)))
    for node in world.nodes.values():
        node.models = ("sha256:m",)
    world.view = replace(view, learned=view.learned.called(("other", 1), 3.0))
    assert failed_on(world, cpu=4.0) == "n1"
    world.view = world.view.put_version(msgspec.structs.replace(world.view.versions[CHAT], model="sha256:m"))
    busy = other_on_n2(world)
    world.nodes["n2"].set(busy, InstanceState.READY, running=1)
    world.turn(2.0)
    assert "waits for calls to end on n2" in world.view.why(CHAT)
    assert not world.live(CHAT)
    for _ in range(60):  # each is followed by another one
        served = world.nodes["n2"].instances[busy].served + 1
        world.nodes["n2"].set(busy, InstanceState.READY, running=1, served=served, worked_s=float(served))
        world.turn(0.5)
    (name,) = world.live(CHAT)
    assert world.view.instances[name].record.node == "n1"


def test_a_node_that_is_full_for_a_moment_is_still_the_last_to_be_asked_where_a_start_failed() -> None:
    """And is left alone for as long as any other that is full."""
    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    assert failed_on(world) == "n1"
    world.nodes["n1"].cpu = 0.0  # of which its last report says nothing yet
    world.now += 1.5
    (action,) = world.plan()
    assert isinstance(action, SendStart)
    assert world.refusals == 1
    world.nodes["n1"].cpu = 4.0
    assert not world.plan(), "it has just refused"
    world.now += 1.1
    del world.nodes["n2"].holds["another"]
    world.hear_all()
    world.plan()
    (name,) = world.live(CHAT)
    assert world.view.instances[name].record.node == "n2"


def test_where_a_start_failed_the_policy_is_asked_about_the_same_view() -> None:
    """What it has made of that for all starts of a plan holds."""
    asked = list[tuple[bool, View]]()

    class Nowhere:
        def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
            asked.append((request.failed, view))
            return Wait("there is no room")

    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    failed_on(world)
    world.policy = Nowhere()
    world.now += 1.5
    world.plan()
    assert [failed for failed, _ in asked] == [False, True]
    assert asked[0][1] is asked[1][1]


def test_where_no_other_node_could_run_it_the_same_is_tried_again(world: World) -> None:
    world.view = deployed(world.view, manifest("chat", gpu=["L4"]))
    world.wait_for(CHAT, 1)
    world.plan()
    world.hear_all()
    (name,) = world.live(CHAT)
    world.finish(name, InstanceState.FAILED, ERROR)
    assert not world.view.refused


def test_what_a_gateway_could_not_use_on_an_overdue_node_is_not_counted_on() -> None:
    """Its calls wait for another instance, which is not to be started on that node either."""
    world = World(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))
    world.hear_all()
    name = _ready(world)
    node = world.view.instances[name].record.node
    (other,) = {"n1", "n2"} - {node}
    world.wait_for(CHAT, 1)
    world.view = suspect(world.view, (name,))
    world.plan()
    assert world.live(CHAT) == [name], "its node was heard just now"
    world.nodes[node].alive = False
    world.turn(OVERDUE_S + 0.5)
    (started,) = [each for each in world.live(CHAT) if each != name]
    assert world.view.instances[started].record.node == other
    assert not may_start(world.view, CHAT, world.now)(world.view.nodes[node])
    assert world.view.instances[name].live, "nobody has said that it is dead"
    world.hear_all()
    world.finish(started, InstanceState.READY)
    world.wait_for(CHAT, 0)
    for each in (name, started):
        world.nodes[world.view.instances[each].record.node].set(each, InstanceState.READY, running=1)
    world.turn(0.5)
    assert set(world.live(CHAT)) == {name, started}, "which of them is there is not known yet"
    world.nodes[node].alive = True
    world.turn(0.5)
    assert world.live(CHAT) == [name], "no more than max_instances"
    stop = world.view.instances[started].stop
    assert stop is not None
    assert stop.grace_s == world.view.versions[CHAT].manifest.timeout, "its calls may end"


def test_what_a_controller_before_had_moved_is_not_ended_before_that_is_asked_for_again(world: World) -> None:
    """It finds two, and does not know that one is to relieve the other."""
    name = _ready(world)
    there = world.view.instances[name]
    twin = replace(there, record=msgspec.structs.replace(there.record, instance="twin"))
    node = world.nodes[there.record.node]
    node.instances["twin"] = msgspec.structs.replace(node.instances[name], instance="twin")
    world.view = world.view.put_instance(twin)
    world.reset_listening()
    world.turn(LOST_AFTER_S - 0.5)
    assert set(world.live(CHAT)) == {name, "twin"}
    world.turn(1.0)
    assert world.live(CHAT) == [name]


def test_an_overdue_node_is_counted_on_where_no_gateway_complains(world: World) -> None:
    name = _ready(world)
    world.nodes[world.view.instances[name].record.node].alive = False
    world.wait_for(CHAT, 1)
    world.turn(OVERDUE_S + 0.5)
    assert world.live(CHAT) == [name]

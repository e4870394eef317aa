"""Nodes that are cordoned and drained. No I/O."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import msgspec
import pytest

from sllm_runtime.control import backoff, draining, minimums
from sllm_runtime.control.changes import Write, decided
from sllm_runtime.control.deletion import leaving
from sllm_runtime.control.events import events
from sllm_runtime.control.migration import PLACE_S, so_far
from sllm_runtime.control.plan import SendStop
from sllm_runtime.control.providing.pool import Pool
from sllm_runtime.control.scheduling.learned import EVERY_NODE
from sllm_runtime.control.scheduling.policies import POLICIES
from sllm_runtime.control.view import Claim, Node
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import Conflict, NodeNotFound, Unavailable
from sllm_runtime.protocol.limits import LOST_AFTER_S
from sllm_runtime.protocol.records import PoolRecord
from sllm_runtime.protocol.states import InstanceState, MigrationState
from tests.unit.control.test_migration import CHAT, ask, entries, ready, running, works
from tests.unit.control.world import ERROR, FakeNode, World, deployed, manifest


def cordon(world: World, name: str, *, cordoned: bool = False, drain: bool = False) -> None:
    world.view = draining.cordon(world.view, name, cordoned=cordoned, drain=drain)


def test_nothing_starts_on_a_cordoned_node_and_what_runs_goes_on() -> None:
    world, source = running(max_instances=3, cpu=2.0)
    cordon(world, "n1", cordoned=True)
    world.wait_for(CHAT, 20)
    world.turn(1)
    placed = {world.view.instances[name].record.node for name in world.live(CHAT) if name != source}
    assert placed == {"n2"}
    assert world.view.instances[source].ready
    cordon(world, "n1")
    assert not world.view.nodes["n1"].record.cordoned


def test_minimums_have_no_room_on_a_cordoned_node() -> None:
    world, _ = running(min_instances=1, cpu=3.0)
    world.view = deployed(world.view, manifest("other", cpu=3.0, min_instances=1))
    assert minimums.crowded(world.view, CHAT) == ""
    cordon(world, "n2", cordoned=True)
    assert "room for 1 of the 2 instances" in minimums.crowded(world.view, CHAT)


def test_calls_of_a_drained_node_move() -> None:
    world, source = running()
    cordon(world, "n1", drain=True)
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    assert world.view.instances[destination].record.node == "n2"
    world.hear_all()
    ready(world, destination)
    world.plan()
    assert entries(world)[source].moves_to == destination
    world.hear_all()
    works(world, source, 0)
    world.finish(source, InstanceState.STOPPED)
    world.turn(1)
    assert world.live(CHAT) == [destination]
    assert not [name for name in world.view.on("n1")]


def test_to_cordon_what_is_drained_ends_no_drain() -> None:
    world, _ = running()
    cordon(world, "n1", drain=True)
    cordon(world, "n1", cordoned=True)
    assert world.view.nodes["n1"].record.draining
    world.plan()
    assert len(world.live(CHAT)) == 2, "its calls move"
    cordon(world, "n1")
    assert not world.view.nodes["n1"].record.cordoned
    assert not world.view.nodes["n1"].record.draining


def test_an_idle_instance_ends_and_one_that_must_be_there_moves() -> None:
    for least, moves in ((0, False), (1, True)):
        world, source = running(min_instances=least)
        works(world, source, 0)
        world.now += draining.SURE_S
        cordon(world, "n1", drain=True)
        stops = [action for action in world.plan() if isinstance(action, SendStop)]
        assert bool(stops) is not moves
        assert (source in world.view.migrations) is moves


def test_one_that_may_have_a_call_nobody_told_of_is_not_taken_for_idle() -> None:
    """It would be waited for where it is, which it need not be."""
    world, source = running()
    works(world, source, 0)
    cordon(world, "n1", drain=True)
    assert not [action for action in world.plan() if isinstance(action, SendStop)]
    world.now += draining.SURE_S / 2
    works(world, source, 1)
    world.plan()
    assert source in world.view.migrations


def test_calls_that_cannot_be_carried_end_where_they_are() -> None:
    world, source = running(resumable=False, timeout=77)
    cordon(world, "n1", drain=True)
    (stop,) = [action for action in world.plan() if isinstance(action, SendStop)]
    assert (stop.instance, stop.grace_s) == (source, 77)


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("why", ["drained", "idle"])
def test_a_call_that_outlives_the_grace_goes_on_elsewhere_if_it_can(why: str, carries: bool) -> None:
    """It may have been on its way when its instance was thought idle."""
    world, source = running(resumable=carries, keep_alive=2)
    works(world, source, 0)
    world.now += 3.0 if why == "idle" else draining.SURE_S
    if why == "drained":
        cordon(world, "n1", drain=True)
    (stop,) = [action for action in world.plan() if isinstance(action, SendStop)]
    assert (stop.instance, stop.resume) == (source, carries)


def test_one_that_finds_no_room_goes_on_and_is_asked_for_again() -> None:
    world, source = running(cpu=4.0)
    world.nodes["n2"].holds["other"] = (4.0, ())
    world.hear_all()
    cordon(world, "n1", drain=True)
    world.turn(61)
    assert world.view.instances[source].ready
    assert so_far(world.view, source).state is MigrationState.PREPARING
    world.nodes["n2"].holds.clear()
    world.turn(2)
    assert len(world.live(CHAT)) == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_idle_elsewhere_ends_for_one_that_has_to_go(policy: str) -> None:
    world, source = running(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=1.0, gpus=0))
    world.policy = POLICIES[policy]()
    world.view = deployed(world.view, manifest("old", labels={}, cpu=1.0))
    cordon(world, "n1", cordoned=True)
    world.wait_for(("old", 1), 1)
    world.plan()
    (old,) = world.live(("old", 1))
    ready(world, old)
    world.wait_for(("old", 1), 0)
    world.turn(2)
    cordon(world, "n1", drain=True)
    world.plan()
    stop = world.view.instances[old].stop
    assert stop is not None
    assert stop.reason == "makes room for chat"
    assert world.view.claims == {old: Claim(inf, source)}
    world.turn(1)
    assert [world.view.instances[name].record.node for name in world.live(CHAT) if name != source] == ["n2"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("to", ["", "n2"])
def test_what_is_idle_ends_before_a_call_that_is_to_end_is_waited_for(policy: str, to: str) -> None:
    """What drains or people move has 60 s to find a place; such a call may take for as long as any."""
    world, source = running(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=2.0, gpus=0))
    world.policy = POLICIES[policy]()
    cordon(world, "n1", cordoned=True)
    for name, calls in (("gone", 1), ("old", 0)):
        world.view = deployed(world.view, manifest(name, cpu=1.0, keep_alive=600.0))
        world.wait_for((name, 1), 1)
        world.plan()
        (there,) = world.live((name, 1))
        ready(world, there)
        works(world, there, calls)
        world.wait_for((name, 1), 0)
    world.turn(2)
    world.view = leaving(world.view, "gone", force=False)
    world.turn(1)
    if to:
        ask(world, source, to)
    else:
        cordon(world, "n1", drain=True)
    world.turn(2)
    assert [world.view.instances[name].record.node for name in world.live(CHAT) if name != source] == ["n2"]
    assert not world.live(("old", 1))
    assert [each.running for each in world.view.of(("gone", 1))] == [1]


@pytest.mark.parametrize("how", ["it computes other bits", "it does not start"])
def test_a_destination_without_hope_is_not_started_again_while_the_call_runs(how: str) -> None:
    """Another node is tried; when there is none, the call ends where it is."""
    three = [FakeNode(name, cpu=4.0, gpus=0) for name in ("n1", "n2", "n3")]
    world, source = running(*three)
    cordon(world, "n1", drain=True)
    tried = []
    for _ in range(2):
        world.turn(2)  # longer than the back-off after a start that failed
        (destination,) = [name for name in world.live(CHAT) if name != source]
        tried.append(world.view.instances[destination].record.node)
        if how == "it does not start":
            world.finish(destination, InstanceState.FAILED, ERROR)
        else:
            ready(world, destination, fingerprint="g")
        world.plan()
        world.hear_all()
    assert sorted(tried) == ["n2", "n3"]
    world.turn(200)
    assert len(world.started) == 3
    assert world.view.instances[source].ready
    works(world, source, 0)
    world.turn(draining.SURE_S + 1)
    assert not world.live(CHAT)


def test_a_start_that_failed_holds_back_the_next_one() -> None:
    world, source = running(*(FakeNode(name, cpu=4.0, gpus=0) for name in ("n1", "n2", "n3")))
    cordon(world, "n1", drain=True)
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    world.hear_all()
    world.finish(destination, InstanceState.FAILED, ERROR)
    for _ in range(3):
        world.plan()
    assert world.live(CHAT) == [source]
    world.turn(backoff.FIRST_S + 1)
    assert len(world.live(CHAT)) == 2


def test_one_that_must_be_there_and_has_no_call_is_replaced_where_bits_are_others() -> None:
    world, source = running(min_instances=1)
    cordon(world, "n1", drain=True)
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    world.hear_all()
    ready(world, destination, fingerprint="g")
    world.turn(2)
    assert world.view.instances[source].ready, "it has calls"
    works(world, source, 0)
    world.turn(PLACE_S + draining.SURE_S)
    (other,) = world.live(CHAT)
    assert world.view.instances[other].record.node == "n2"


def test_one_that_must_be_there_and_has_no_call_any_more_is_taken_by_another_node_of_its_class() -> None:
    """Its last call ends as it turns out that the first one computes other bits: it ends when no other node has taken
    it in 60 s, and not before, or nobody is there for the next call."""
    world, source = running(*(FakeNode(name, cpu=4.0, gpus=0) for name in ("n1", "n2", "n3")), min_instances=1)
    cordon(world, "n1", drain=True)
    tried = []
    for fingerprint in ("g", "f"):
        world.turn(1)
        assert [each.ready for each in world.view.of(CHAT)].count(True) == 1
        (destination,) = [name for name in world.live(CHAT) if name != source]
        tried.append(world.view.instances[destination].record.node)
        ready(world, destination, fingerprint=fingerprint)
        world.plan()
        works(world, source, 0)
    assert sorted(tried) == ["n2", "n3"]
    world.turn(1)
    assert world.live(CHAT) == [destination], "it has moved"


def test_calls_of_a_node_that_says_it_is_stopped_move() -> None:
    world, source = running()
    world.nodes["n1"].draining = True
    world.hear_all()
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    assert world.view.instances[destination].record.node == "n2"


def test_a_node_that_is_not_there() -> None:
    world, _ = running()
    with pytest.raises(NodeNotFound):
        cordon(world, "n9", drain=True)


def test_only_a_node_that_has_gone_is_forgotten() -> None:
    world, source = running()
    cordon(world, "n1", cordoned=True)
    with pytest.raises(Conflict, match="n1 lives: `sllm node drain n1`"):
        draining.forget(world.view, "n1", world.now)
    world.nodes["n1"].alive = False
    world.now += LOST_AFTER_S + 1
    world.hear("n2")
    with pytest.raises(Unavailable, match="not known yet"):  # its instances are still to be given up
        draining.forget(world.view, "n1", world.now)
    world.turn(1)
    assert source not in world.view.instances
    known = world.view.learned.served("n1", 1e9).served("n2", 2e9)
    world.view = replace(world.view, learned=known)
    theirs = replace(world.view, pool=Pool(record=PoolRecord(members=("n1",))))
    with pytest.raises(Conflict, match="n1 is its provider's"):
        draining.forget(theirs, "n1", world.now)
    after = draining.forget(world.view, "n1", world.now)
    assert list(after.nodes) == ["n2"]
    assert after.learned.disk.keys() == {"n2", EVERY_NODE}, "another machine may have its name next"
    assert decided(world.view, after) == [Write(subjects.node_key("n1"), None)]
    assert [(event.kind, event.node) for event in events(world.view, after, 0.0)] == [("node.removed", "n1")]
    with pytest.raises(NodeNotFound, match="there is no node n1"):
        draining.forget(after, "n1", world.now)
    world.view, world.nodes["n1"].alive = after, True
    world.hear("n1")
    assert not world.view.nodes["n1"].record.cordoned, "it has joined as a new one"


def test_a_controller_that_has_just_begun_forgets_no_node() -> None:
    world, _ = running()
    world.reset_listening()
    world.view = world.view.put_node(Node(world.view.nodes["n1"].record))
    with pytest.raises(Unavailable, match="not known yet") as found:
        draining.forget(world.view, "n1", world.now)
    assert found.value.retry_after_s == LOST_AFTER_S
    world.nodes["n1"].alive = False
    world.turn(LOST_AFTER_S + 1)
    assert list(draining.forget(world.view, "n1", world.now).nodes) == ["n2"]


@pytest.mark.parametrize("kind", ["RTX-PRO-6000-Blackwell-Server-Edition", "RTX 4090"])
def test_calls_on_an_accelerator_of_whatever_name_move(kind: str) -> None:
    """A kind that no function could ask for by its name kept every plan from being made."""
    nodes = [FakeNode(name, cpu=4.0, gpus=1) for name in ("n1", "n2")]
    for each in nodes:
        each.gpus = (msgspec.structs.replace(each.gpus[0], kind=kind),)
    world, source = running(*nodes, gpu=["any"])
    cordon(world, "n1", drain=True)
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    assert world.view.instances[destination].record.node == "n2"


def test_calls_on_accelerators_of_several_kinds_end_with_their_node_and_begin_again() -> None:
    """That they cannot move must not keep plans from being made."""
    node = FakeNode("n1", cpu=4.0, gpus=2)
    node.gpus = (node.gpus[0], msgspec.structs.replace(node.gpus[1], kind="T4"))
    world, source = running(node, FakeNode("n2", cpu=4.0, gpus=0), gpu=["any:2"])
    cordon(world, "n1", drain=True)
    (stop,) = [action for action in world.plan() if isinstance(action, SendStop)]
    assert (stop.instance, stop.resume) == (source, True)


def test_of_idle_instances_as_many_move_as_must_be_there() -> None:
    world, first = running(min_instances=1, max_instances=2, cpu=1.0)
    cordon(world, "n2", cordoned=True)
    world.wait_for(CHAT, 16)
    world.plan()
    (second,) = [name for name in world.live(CHAT) if name != first]
    world.wait_for(CHAT, 0)
    world.hear_all()
    ready(world, second)
    works(world, first, 0)
    cordon(world, "n2")
    world.turn(draining.SURE_S)
    cordon(world, "n1", drain=True)
    world.plan()
    assert len(world.view.migrations) == 1
    assert [name for name in (first, second) if world.view.instances[name].stop] == [
        name for name in (first, second) if name not in world.view.migrations
    ]


def test_an_idle_instance_of_a_retired_version_does_not_move() -> None:
    world, source = running(min_instances=1)
    works(world, source, 0)
    world.view = deployed(world.view, world.view.versions[CHAT].manifest, 2)
    world.now += draining.SURE_S
    cordon(world, "n1", drain=True)
    assert source in [action.instance for action in world.plan() if isinstance(action, SendStop)]
    assert source not in world.view.migrations


@pytest.mark.parametrize("how", ["long ago", "named"])
def test_what_a_move_that_was_not_the_drains_did_not_find_says_nothing_of_what_is_there_now(how: str) -> None:
    """Calls were to move yesterday, or to a node that was named, and there was no room then: now there is."""
    world, source = running(*(FakeNode(name, cpu=4.0, gpus=0) for name in ("n1", "n2", "n3")), min_instances=1)
    ask(world, source, "n2")
    world.plan()
    (other,) = [name for name in world.live(CHAT) if name != source]
    ready(world, other, fingerprint="g")
    world.turn(1)
    cordon(world, "n3", cordoned=True)
    if how == "named":
        world.view = draining.cordon(world.view, "n3", cordoned=False, drain=False)
        ask(world, source, "n3")
        cordon(world, "n3", cordoned=True)
    else:
        ask(world, source)
    world.turn(PLACE_S + 1)
    known = world.view.migrations[source]
    assert (known.state, known.destination) == (MigrationState.ABANDONED, "")
    works(world, source, 0)
    cordon(world, "n3")  # it has room
    world.turn(3600.0 if how == "long ago" else 5.0)
    assert world.view.instances[source].ready
    cordon(world, "n1", drain=True)
    world.turn(1)
    assert world.view.instances[source].ready, "ended, and nobody is there for the next call"
    (destination,) = [name for name in world.live(CHAT) if name != source]
    assert world.view.instances[destination].record.node == "n3"
    ready(world, destination)
    world.turn(1)
    assert world.live(CHAT) == [destination], "it has moved"

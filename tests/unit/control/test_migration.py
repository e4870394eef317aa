"""Which instance's calls go where, step by step. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import msgspec
import pytest

from sllm_runtime.control import draining, fits, instances, migration
from sllm_runtime.control.events import events
from sllm_runtime.control.loop import REFUSED_S, refused
from sllm_runtime.control.placement import Wait
from sllm_runtime.control.plan import SendStart
from sllm_runtime.control.reports import departed, suspect
from sllm_runtime.control.routes import route
from sllm_runtime.control.scheduling import startup
from sllm_runtime.control.scheduling.moving import carried_s
from sllm_runtime.control.turns import Turns
from sllm_runtime.control.view import TOKEN_S, Key, Move, Refusal, Stop, View, without
from sllm_runtime.protocol.errors import (
    Conflict,
    InstanceNotFound,
    InvalidRequest,
    NoCapacity,
    NodeNotFound,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.events import Event
from sllm_runtime.protocol.limits import LOST_AFTER_S, OVERDUE_S
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.records import ModelRecord, RouteEntry
from sllm_runtime.protocol.states import InstanceState, MigrationState
from tests.unit.control.world import ERROR, GIB, FakeNode, World, deployed, manifest

CHAT: Key = ("chat", 1)
OTHER: Key = ("other", 1)
EXACT = ("engine:ours", "exact_resume")


def running(*nodes: FakeNode, capabilities: tuple[str, ...] = EXACT, **fields: Any) -> tuple[World, str]:
    """An instance on n1 that works on three calls, and a free node n2."""
    world = World(*(nodes or (FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=4.0, gpus=0))))
    world.hear_all()
    options = {"engine": True, "model": "sha256:m", "concurrency": 8, **fields}
    world.view = deployed(world.view, manifest("chat", **{k: v for k, v in options.items() if v is not None}))
    world.wait_for(CHAT, 3)
    world.plan()
    (name,) = world.live(CHAT)
    ready(world, name, capabilities=capabilities)
    works(world, name, 3)
    world.wait_for(CHAT, 0)
    return world, name


def ready(world: World, name: str, *, fingerprint: str = "f", capabilities: tuple[str, ...] = EXACT) -> None:
    node = world.nodes[world.view.instances[name].record.node]
    status = node.instances[name]
    node.instances[name] = msgspec.structs.replace(
        status, state=InstanceState.READY, fingerprint=fingerprint, capabilities=capabilities
    )
    world.hear(node.name)


def works(world: World, name: str, calls: int) -> None:
    node = world.nodes[world.view.instances[name].record.node]
    node.instances[name] = msgspec.structs.replace(node.instances[name], running=calls)
    world.hear(node.name)


def ask(world: World, name: str, to: str = "") -> None:
    world.view = migration.ask(world.view, name, to, world.now)


def begun(to: str = "n2", **fields: Any) -> tuple[World, str, str]:
    """As ``running``, its calls on their way to a destination that starts."""
    world, source = running(**fields)
    ask(world, source, to)
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    world.hear_all()
    return world, source, destination


def entries(world: World) -> dict[str, RouteEntry]:
    found = route(world.view, CHAT)
    assert found is not None
    return {entry.instance: entry for entry in found.entries}


def state(world: World, source: str) -> MigrationState:
    return migration.so_far(world.view, source).state


@pytest.mark.parametrize("to", ["n2", ""])
def test_it_goes_to_accelerators_of_its_own_kind_whatever_its_version_may_use(to: str) -> None:
    """On others the same model draws other tokens: what was loaded there would be given up."""
    nodes = [FakeNode(name, cpu=4.0, gpus=count) for name, count in (("n1", 1), ("n2", 2))]
    first, second = nodes[1].gpus
    nodes[1].gpus = (msgspec.structs.replace(first, kind="T4"), second)
    world, source = running(*nodes, gpu=["L4", "T4"])
    world.view = world.view.put_instance(replace(world.view.instances[source], manifest=prefers(world, "T4", "L4")))
    ask(world, source, to)
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    assert world.view.instances[destination].gpus == (1,)


def test_what_has_no_accelerator_of_its_kind_is_refused() -> None:
    nodes = [FakeNode(name, cpu=4.0, gpus=1) for name in ("n1", "n2")]
    nodes[1].gpus = (msgspec.structs.replace(nodes[1].gpus[0], kind="T4"),)
    world, source = running(*nodes, gpu=["L4", "T4"])
    with pytest.raises(InvalidRequest, match=r"n2 can never run it: it lacks 1 x L4 \(has 1 x T4\)"):
        ask(world, source, "n2")


def prefers(world: World, *kinds: str) -> Manifest:
    return world.view.versions[CHAT].manifest.model_copy(update={"gpu": kinds})


@pytest.mark.parametrize("to", ["n2", ""])
def test_the_destination_starts_then_the_calls_go_there_then_the_source_ends(to: str) -> None:
    world, source, destination = begun(to)
    assert world.view.instances[destination].record.node == "n2"
    assert state(world, source) is MigrationState.PREPARING
    assert [entry.moves_to for entry in entries(world).values()] == [""]
    ready(world, destination)
    assert set(entries(world)) == {source}, "who waits would have its slots"
    world.plan()
    assert state(world, source) is MigrationState.MOVING
    assert {name: entry.moves_to for name, entry in entries(world).items()} == {source: destination, destination: ""}
    world.hear_all()
    assert world.view.instances[source].state is InstanceState.DRAINING
    assert source in entries(world)
    assert migration.outcome(world.view, source) is None
    works(world, source, 0)
    world.finish(source, InstanceState.STOPPED)
    world.plan()
    done = migration.outcome(world.view, source)
    assert done is not None
    assert (done.state, done.destination, done.node, done.note) == (MigrationState.DONE, destination, "n2", "")
    assert set(entries(world)) == {destination}
    world.turn(migration.KEEP_S + 1)
    with pytest.raises(InstanceNotFound):
        migration.so_far(world.view, source)


def test_it_goes_to_another_node_however_much_room_its_own_has() -> None:
    world, source = running(FakeNode("n1", cpu=4.0, gpus=0), cpu=1.0, max_instances=2)
    ask(world, source)
    world.plan()
    assert world.live(CHAT) == [source]
    assert not world.view.migrations[source].destination


def test_who_asks_again_joins() -> None:
    world, source, _ = begun()
    ask(world, source, "n2")
    world.plan()
    assert len(world.live(CHAT)) == 2
    assert len(world.view.migrations) == 1


def test_who_names_another_node_is_told_where_it_goes() -> None:
    world, source, _ = begun("")
    with pytest.raises(Conflict, match=f"{source} moves to node n2 already"):
        ask(world, source, "n3")
    ask(world, source, "n2")
    assert len(world.live(CHAT)) == 2


def test_who_names_a_node_while_the_policy_has_none_gets_it() -> None:
    world, source = running(cpu=4.0)
    world.nodes["n2"].holds["other"] = (4.0, ())
    world.hear_all()
    ask(world, source)
    world.plan()
    with pytest.raises(NodeNotFound):
        ask(world, source, "n9")
    ask(world, source, "n2")
    assert migration.so_far(world.view, source).node == "n2"
    with pytest.raises(Conflict, match="n2"):
        ask(world, source, "n1")


def another(world: World, source: str, **how: Any) -> str:
    """An instance of the version beside ``source``, ready and idle."""
    world.wait_for(CHAT, 8)
    world.plan()
    (name,) = [each for each in world.live(CHAT) if each != source]
    world.wait_for(CHAT, 0)
    world.hear_all()
    ready(world, name, **how)
    return name


def test_an_idle_instance_is_taken() -> None:
    world, source = running(max_instances=2, cpu=3.0)
    idle = another(world, source)
    assert world.view.instances[idle].record.node == "n2"
    ask(world, source)
    assert set(entries(world)) == {source, idle}, "it goes on serving"
    world.plan()
    assert set(entries(world)) == {source, idle}
    assert set(world.live(CHAT)) == {idle}
    assert entries(world)[source].moves_to == idle


def test_one_that_works_is_no_destination() -> None:
    """Both would be short of room for their calls."""
    world, source = running(max_instances=3, cpu=1.0)
    busy = another(world, source)
    works(world, busy, 1)
    ask(world, source, "n2")
    world.plan()
    (destination,) = world.view.destinations
    assert destination not in (source, busy)


def test_an_idle_instance_is_taken_by_one_move_alone() -> None:
    world, first = running(max_instances=4, cpu=1.0)
    idle = another(world, first)
    there, node = world.view.instances[first], world.nodes["n1"]
    node.instances["twin"] = msgspec.structs.replace(node.instances[first], instance="twin")
    twin = replace(there, record=msgspec.structs.replace(there.record, instance="twin"))
    world.view = world.view.put_instance(twin)
    for source in (first, "twin"):
        ask(world, source, "n2")
    world.plan()
    found = [world.view.migrations[source].destination for source in (first, "twin")]
    assert found[0] == idle
    assert found[1] not in ("", idle)


def test_who_waits_while_a_call_moves_has_an_instance_started() -> None:
    """The destination's slots are for the calls that move: it counts as one with its source, at each step."""
    world, source, destination = begun(concurrency=3, max_instances=4)
    there = {source, destination}
    world.wait_for(CHAT, 1)
    world.plan()
    (started,) = set(world.live(CHAT)) - there
    world.turn(5)
    assert {i.record.instance for i in world.view.of(CHAT)} == {*there, started}, "no more than one is wanted"
    ready(world, destination)
    world.plan()
    assert state(world, source) is MigrationState.MOVING
    world.turn(1)
    works(world, destination, 3)  # before the source says that they have left
    world.turn(1)
    assert {i.record.instance for i in world.view.of(CHAT)} == {*there, started}


def test_one_that_calls_move_to_is_no_reason_to_start_none() -> None:
    world, source, destination = begun(concurrency=3, max_instances=4)
    ready(world, destination)
    world.plan()
    assert state(world, source) is MigrationState.MOVING
    world.wait_for(CHAT, 1)
    world.plan()
    assert len(set(world.live(CHAT)) - {source, destination}) == 1


def test_a_destination_is_not_ended_for_being_idle() -> None:
    world, source, destination = begun(keep_alive=0)
    ready(world, destination)
    world.turn(10)
    assert world.view.instances[destination].ready
    assert state(world, source) is MigrationState.MOVING


def test_a_destination_does_not_make_room_for_another_function() -> None:
    world, source, destination = begun(cpu=4.0)
    ready(world, destination)
    world.turn(10)
    assert state(world, source) is MigrationState.MOVING
    world.nodes["n2"].set(destination, InstanceState.READY, idle_s=100.0)
    world.nodes["n2"].labels = {"only": "here"}
    world.hear("n2")
    world.view = deployed(world.view, manifest("other", cpu=4.0, labels={"only": "here"}))
    world.wait_for(("other", 1), 1)
    world.plan()
    assert world.view.instances[destination].ready


@pytest.mark.parametrize("younger", [True, False])
def test_a_destination_does_not_go_where_there_are_more_than_there_may_be(younger: bool) -> None:
    """Nor what it relieves."""
    world, source = running(max_instances=1, cpu=1.0)
    there, node = world.view.instances[source], world.nodes["n1"]
    node.instances["twin"] = msgspec.structs.replace(node.instances[source], instance="twin")
    world.view = world.view.put_instance(replace(there, record=msgspec.structs.replace(there.record, instance="twin")))
    relieved = "twin" if younger else source
    ask(world, relieved, "n2")
    world.plan()
    (destination,) = world.view.destinations
    assert set(world.live(CHAT)) == {relieved, destination}


@pytest.mark.parametrize("when", [MigrationState.PREPARING, MigrationState.MOVING])
def test_a_destination_that_dies_leaves_the_calls_at_the_source(when: MigrationState) -> None:
    world, source, destination = begun()
    if when is MigrationState.MOVING:
        ready(world, destination)
        world.plan()
        world.hear_all()
    world.finish(destination, InstanceState.FAILED)
    world.plan()
    told = migration.outcome(world.view, source)
    assert told is not None
    assert told.state is MigrationState.ABANDONED
    assert destination in told.note
    assert not world.view.instances[source].record.moves_to
    assert world.view.instances[source].ready is (when is MigrationState.PREPARING)
    assert not any(entry.moves_to for entry in entries(world).values())


@pytest.mark.parametrize("when", [MigrationState.PREPARING, MigrationState.MOVING])
def test_a_destination_that_is_to_end_takes_no_more_calls(when: MigrationState) -> None:
    world, source, destination = begun()
    if when is MigrationState.MOVING:
        ready(world, destination)
        world.plan()
        world.hear_all()
    world.view = instances.stop(world.view, world.view.instances[destination], "its node is drained", 60.0)
    world.plan()
    told = migration.outcome(world.view, source)
    assert told is not None
    assert (told.state, told.note) == (MigrationState.ABANDONED, f"instance {destination}: its node is drained")
    assert not world.view.instances[source].record.moves_to


@pytest.mark.parametrize("when", [MigrationState.PREPARING, MigrationState.MOVING])
def test_a_source_that_dies_ends_it(when: MigrationState) -> None:
    world, source, destination = begun()
    if when is MigrationState.MOVING:
        ready(world, destination)
        world.plan()
        world.hear_all()
    world.finish(source, InstanceState.LOST)
    world.plan()
    assert state(world, source) is MigrationState.ABANDONED
    assert not world.view.instances[destination].ended


@pytest.mark.parametrize("why", ["nobody", "calls", "demand", "minimum"])
def test_a_destination_ends_with_a_source_whose_calls_have_ended_unless_it_is_wanted(why: str) -> None:
    world, source, destination = begun(min_instances=int(why == "minimum"))
    works(world, source, 2 if why == "calls" else 0)
    if why == "demand":
        world.wait_for(CHAT, 1)
    world.view = instances.stop(world.view, world.view.instances[source], "makes room for another", 60.0)
    world.plan()
    assert state(world, source) is MigrationState.ABANDONED
    assert (world.view.instances[destination].stop is not None) is (why == "nobody")


def test_other_bits_are_not_moved_to() -> None:
    world, source, destination = begun()
    ready(world, destination, fingerprint="g")
    world.plan()
    assert state(world, source) is MigrationState.ABANDONED
    assert world.view.instances[source].ready
    assert world.view.instances[destination].stop is not None


def test_where_other_bits_are_computed_is_refused_before_it_begins() -> None:
    """An instance of the version is there, or one was started in vain."""
    world, source = running(max_instances=2, cpu=3.0)
    another(world, source, fingerprint="g")
    with pytest.raises(InvalidRequest, match="cannot go on at node n2: it computes other bits"):
        ask(world, source, "n2")
    ask(world, source)
    before = len(world.started)
    world.turn(migration.PLACE_S + 1)
    assert state(world, source) is MigrationState.ABANDONED
    assert len(world.started) == before


def test_where_another_context_was_served_on_an_accelerator_of_its_kind_it_is_tried_again_later() -> None:
    """Less of its memory may have been free at that start."""
    world, source = running(*(FakeNode(name, cpu=4.0, gpus=1) for name in ("n1", "n2")), gpu="L4")
    ask(world, source, "n2")
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    world.hear_all()
    ready(world, destination, fingerprint="g")
    world.plan()
    assert "or serves another context" in migration.so_far(world.view, source).note
    world.hear_all()
    world.plan()
    assert world.live(CHAT) == [source]
    with pytest.raises(InvalidRequest, match="cannot go on at node n2"):
        ask(world, source, "n2")
    world.now += migration.FAILED_S
    world.hear_all()
    ask(world, source, "n2")
    assert state(world, source) is MigrationState.PREPARING


def test_a_node_that_was_tried_in_vain_is_refused_and_no_policy_has_it_tried_again() -> None:
    world, source, destination = begun()
    ready(world, destination, fingerprint="g")
    world.plan()
    world.hear_all()
    with pytest.raises(InvalidRequest, match="cannot go on at node n2"):
        ask(world, source, "n2")
    world.now += 1.0
    world.view = replace(world.view, moves={source: Move(source, "n2", 1.0, ("other", 1), world.now)})
    world.plan()
    assert world.live(CHAT) == [source]
    assert state(world, source) is MigrationState.ABANDONED
    assert not world.view.moves


def test_whoever_names_a_node_where_it_did_not_start_has_it_tried_again() -> None:
    world, source, destination = begun()
    world.finish(destination, InstanceState.FAILED, ERROR)
    world.turn(2)
    ask(world, source, "n2")
    world.turn(1)
    assert len(world.live(CHAT)) == 2


def test_a_node_without_room_is_waited_for_and_then_not() -> None:
    world, source = running(cpu=4.0)
    world.nodes["n2"].holds["other"] = (4.0, ())
    world.hear_all()
    ask(world, source, "n2")
    world.turn(migration.PLACE_S / 2)
    assert state(world, source) is MigrationState.PREPARING
    world.turn(migration.PLACE_S / 2 + 1)
    told = migration.so_far(world.view, source)
    assert told.state is MigrationState.ABANDONED
    assert "n2 lacks 4 CPUs (has 0)" in told.note


def full() -> tuple[World, str, str]:
    """As ``running``, and n2 has no room beside an idle instance of another function, the third."""
    world, source = running(cpu=4.0)
    world.view = deployed(world.view, manifest("other", cpu=4.0, keep_alive=600.0))
    world.wait_for(("other", 1), 1)
    world.plan()
    (other,) = world.live(("other", 1))
    ready(world, other)
    world.wait_for(("other", 1), 0)
    return world, source, other


@pytest.mark.parametrize("idle", [True, False])
def test_what_is_idle_on_the_node_that_is_named_ends_for_it(idle: bool) -> None:
    world, source, other = full()
    works(world, other, 0 if idle else 1)
    ask(world, source, "n2")
    world.turn(1)
    assert (world.view.instances[other].stop is not None) is idle
    if idle:
        world.finish(other, InstanceState.STOPPED)
        world.turn(1)
    assert len(world.live(CHAT)) == 1 + idle
    assert state(world, source) is MigrationState.PREPARING


@pytest.mark.parametrize("how", ["cordoned", "silent"])
def test_nothing_ends_on_a_node_that_takes_no_starts_any_more(how: str) -> None:
    world, source, other = full()
    works(world, other, 1)
    ask(world, source, "n2")
    world.turn(1)
    idles(world, other)
    if how == "cordoned":
        world.view = draining.cordon(world.view, "n2", cordoned=True, drain=False)
    else:
        world.nodes["n2"].alive = False
        world.now += LOST_AFTER_S
        world.hear("n1")
    view = migration.advance(world.view, world.now, never, never, Turns(world.view, frozenset()))
    assert view.instances[other].stop is None
    assert view.migrations[source].state is MigrationState.PREPARING


def idles(world: World, name: str) -> None:
    """For a while already."""
    world.nodes["n2"].set(name, InstanceState.READY, idle_s=100.0)
    works(world, name, 0)
    world.hear_all()


def never(*_: Any) -> Any:
    raise AssertionError("nothing is chosen or made")


def test_nothing_ends_for_a_move_that_is_given_up() -> None:
    world, source, other = full()
    works(world, other, 1)
    ask(world, source, "n2")
    world.turn(migration.PLACE_S - 1)
    world.now += 1
    idles(world, other)
    world.plan()
    told = migration.so_far(world.view, source)
    assert told.state is MigrationState.ABANDONED
    assert "ending 1 idle instance" in told.note
    assert world.view.instances[other].stop is None


def test_a_move_is_not_given_up_while_what_ended_for_it_gives_back_what_it_held() -> None:
    world, source, other = full()
    works(world, other, 1)
    ask(world, source, "n2")
    world.turn(migration.PLACE_S - 1)
    idles(world, other)
    world.plan()
    assert world.view.instances[other].stop is not None
    world.now += 2
    world.plan()
    assert state(world, source) is MigrationState.PREPARING
    world.finish(other, InstanceState.STOPPED)
    world.turn(1)
    assert len(world.live(CHAT)) == 2


@pytest.mark.parametrize("to", ["", "n2"])
def test_a_version_that_is_gone_is_not_moved(to: str) -> None:
    """It is ended, but behind this in a plan."""
    world, source = running(cpu=4.0)
    world.nodes["n2"].holds["other"] = (4.0, ())
    world.hear_all()
    ask(world, source, to)
    world.view = replace(world.view, versions=without(world.view.versions, [CHAT]))
    world.plan()
    assert world.view.instances[source].stop is not None


def test_nothing_ends_for_what_a_policy_wants_moved() -> None:
    world, source, other = full()
    world.view = replace(world.view, moves={source: Move(source, "n2", 1.0, ("third", 1), world.now)})
    world.plan()
    assert world.view.instances[other].stop is None
    assert state(world, source) is MigrationState.ABANDONED


def test_what_a_policy_wants_moved_does_not_wait_for_room_that_is_gone() -> None:
    """It is decided on anew, by what is known then."""
    world, source = running(cpu=4.0)
    world.nodes["n2"].holds["other"] = (4.0, ())
    world.hear_all()
    world.view = replace(world.view, moves={source: Move(source, "n2", 1.0, ("other", 1), world.now)})
    world.plan()
    assert state(world, source) is MigrationState.ABANDONED
    world.plan()
    assert not world.view.moves


def test_a_new_controller_goes_on_with_it() -> None:
    world, source, destination = begun()
    ready(world, destination)
    world.plan()
    world.followed()
    world.hear_all()
    world.plan()
    assert state(world, source) is MigrationState.MOVING
    assert entries(world)[source].moves_to == destination
    assert world.view.instances[source].stop is not None


def test_what_a_move_took_that_a_controller_before_began_is_not_told() -> None:
    """Nobody here knows when that was: what it took since this one leads is another number."""
    world, source, destination = begun()
    ready(world, destination)
    world.plan()
    world.turn(20)
    world.followed()
    world.hear_all()
    world.finish(source, InstanceState.STOPPED)
    before = world.view
    world.plan()
    (event,) = [each for each in events(before, world.view, 0.0) if each.kind == "migration.done"]
    assert event.fields == {"destination": destination}
    assert event.node == "n2"


def test_what_a_placement_wants_moved_is_moved() -> None:
    world, source = running()
    move = Move(source, "n2", 1.0, ("other", 1), world.now)
    world.view = replace(world.view, moves={source: move, "gone": replace(move, instance="gone")})
    world.plan()
    assert set(world.view.moves) == {source}
    assert state(world, source) is MigrationState.PREPARING
    (destination,) = [name for name in world.live(CHAT) if name != source]
    world.hear_all()
    ready(world, destination)
    world.plan()
    world.hear_all()
    works(world, source, 0)
    world.finish(source, InstanceState.STOPPED)
    world.plan()
    world.plan()
    assert not world.view.moves
    assert state(world, source) is MigrationState.DONE


def wanted(*, there: tuple[str, ...] = (), late: bool = True, **fields: Any) -> tuple[World, str, str]:
    """A policy has the calls of the source moved for a start of ``other``, which waits; the destination starts, and is
    ``late``. n1 is full, with ``there`` beside the source, which work."""
    options = {"cpu": 1.0 + 3.0 * (not there), "max_instances": 4, "keep_alive": 600.0, **fields}
    world, source = running(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=8.0, gpus=0), **options)
    for each in there:
        copied(world, source, each)
    world.view = deployed(world.view, manifest("other", cpu=4.0, labels={"only": "here"}))
    world.nodes["n1"].labels = {"only": "here"}
    world.hear_all()
    world.turn(2)
    world.wait_for(OTHER, 1)
    moves = {name: Move(name, "n2", 3.0, OTHER, world.now) for name in (source, *there)}
    world.view = replace(world.view, moves=moves)
    world.plan()
    world.now += 3.0 + (startup.OVERDUE_S if late else 0.0) + 0.1
    world.hear_all()
    return world, source, world.view.migrations[source].destination


def copied(world: World, source: str, name: str) -> None:
    """Another instance like ``source``, beside it."""
    there, node = world.view.instances[source], world.nodes["n1"]
    node.instances[name] = msgspec.structs.replace(node.instances[source], instance=name)
    node.holds[name] = node.holds[source]
    twin = replace(there, record=msgspec.structs.replace(there.record, instance=name))
    world.view = world.view.put_instance(twin)


def rests(world: World, name: str, seconds: float) -> None:
    """Its calls have ended so long ago."""
    world.nodes["n1"].set(name, InstanceState.READY, running=0, idle_s=seconds, served=3)
    world.hear("n1")


@pytest.mark.parametrize(("seconds", "ends"), [(0.2, False), (0.25, True)])
def test_what_a_policy_has_moved_is_ended_for_the_start_instead_once_it_is_idle(seconds: float, ends: bool) -> None:
    """Not while its next call may be on its way. The destination is nobody's."""
    world, source, destination = wanted()
    rests(world, source, seconds)
    world.plan()
    assert (state(world, source) is MigrationState.ABANDONED) is ends
    assert [world.view.instances[name].stop is not None for name in (source, destination)] == [ends, ends]
    if ends:
        assert "its calls have ended" in migration.so_far(world.view, source).note
        assert world.view.instances[source].stop == Stop("makes room for other", 300.0, resume=True)
        world.finish(source, InstanceState.STOPPED)
        world.plan()
        assert [world.view.instances[name].record.node for name in world.live(OTHER)] == ["n1"]


def test_what_a_policy_has_moved_is_ended_before_its_destination_is_looked_for() -> None:
    world, source = running(cpu=4.0)
    world.turn(2)
    world.view = deployed(world.view, manifest("other", cpu=4.0, keep_alive=600.0))
    since = world.now - 1.1 - startup.OVERDUE_S
    world.view = replace(world.view, moves={source: Move(source, "n2", 1.0, OTHER, since)})
    rests(world, source, 1.0)
    world.view = migration.advance(world.view, world.now, never, never, Turns(world.view, frozenset()))
    assert state(world, source) is MigrationState.ABANDONED
    assert not world.view.moves


@pytest.mark.parametrize(
    "why", ["asked", "joined", "drained", "demand", "minimum", "ready", "not enough", "late", "in time", "kept"]
)
def test_an_idle_instance_moves_all_the_same(why: str) -> None:
    """People have asked for it too, or its node is drained; its version has calls, or must be there, so that it could
    not be ended; its destination is ready, so that it is ended at once; it would not be enough to end it, or not before
    a call ends; it goes on as was expected; or its node is kept for another start."""
    beside = ("twin", "third", "fourth") if why in ("not enough", "late") else ()
    world, source, destination = wanted(min_instances=int(why == "minimum"), there=beside, late=why != "in time")
    if why == "asked":
        asked = without(world.view.moves, [source])
        by = replace(world.view.migrations[source], by=None)
        world.view = replace(world.view, moves=asked, migrations={source: by})
    elif why == "joined":
        ask(world, source, "n2")
    elif why == "drained":
        world.view = draining.cordon(world.view, "n1", cordoned=True, drain=True)
    elif why == "demand":
        world.wait_for(CHAT, 1)
    elif why == "kept":
        world.view = replace(world.view, kept={"n1": ("third", 1)})
    elif why == "late":
        world.view = instances.stop(world.view, world.view.instances["twin"], "its node is drained", 60.0)
        for name in beside[1:]:
            rests(world, name, 0.3)
    rests(world, source, 0.3)
    if why == "ready":
        ready(world, destination)
    world.plan()
    assert state(world, source) is (MigrationState.MOVING if why == "ready" else MigrationState.PREPARING)
    assert world.view.instances[destination].stop is None


def test_what_several_moves_make_room_for_together_has_all_of_them_ended_once_they_are_idle() -> None:
    """Until then each keeps its place for it."""
    world, source, _ = wanted(there=("twin", "third", "fourth"))
    sources = (source, "twin", "third", "fourth")
    for name in sources[:-1]:
        rests(world, name, 1.0)
    world.plan()
    assert {state(world, name) for name in sources} == {MigrationState.PREPARING}
    rests(world, sources[-1], 1.0)
    world.plan()
    assert {state(world, name) for name in sources} == {MigrationState.ABANDONED}
    assert all(each.stop is not None for each in world.view.of(CHAT))


def test_a_place_is_promised_to_a_move_until_its_destination_has_it() -> None:
    world, source = running(cpu=1.0)
    move = Move(source, "n2", 1.0, ("other", 1), world.now)
    for moves, cpu in (({}, 4.0), ({source: move}, 3.0)):
        world.view = replace(world.view, moves=moves)
        left = fits.free(world.view, world.view.nodes["n2"])
        assert left is not None
        assert left.cpu == cpu
    world.plan()
    assert world.view.destinations
    left = fits.free(world.view, world.view.nodes["n2"])
    assert left is not None
    assert left.cpu == 3.0, "it takes it once"


@pytest.mark.parametrize(
    ("context", "tokens"), [(2_345, 2_345.0), (0, 20.0 / TOKEN_S)], ids=["tokens are said", "a node of before"]
)
def test_a_move_that_is_over_teaches_how_long_its_calls_took(context: int, tokens: float) -> None:
    """By their tokens, whoever asked for it; what the source frees then is learned apart."""
    world, source = running()
    world.nodes["n1"].instances[source] = msgspec.structs.replace(world.nodes["n1"].instances[source], context=context)
    world.view = world.view.put_model(ModelRecord(digest="sha256:m", uri="/m", nbytes=1, partitions=(1,)))
    world.view = world.view.put_version(msgspec.structs.replace(world.view.versions[CHAT], model="sha256:m"))
    world.turn(20.0)
    ask(world, source, "n2")
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    world.hear_all()
    ready(world, destination)
    world.plan()
    world.now += 3.0
    node = world.nodes["n1"]
    node.instances[source] = msgspec.structs.replace(node.instances[source], running=0, release_s=1.0)
    world.finish(source, InstanceState.STOPPED)
    world.plan()
    assert state(world, source) is MigrationState.DONE
    fitted = world.view.learned.moves["sha256:m"]
    assert fitted.n == 1.0
    assert fitted.x == pytest.approx(tokens)
    assert fitted.y == pytest.approx(2.0)
    assert world.view.learned.release_s(CHAT) == 1.0
    world.plan()
    assert world.view.learned.moves["sha256:m"] is fitted, "once"


@pytest.mark.parametrize(
    ("calls", "served"), [(0, 0), (3, 1), (3, 0)], ids=["none runs by then", "one ends there", "all move"]
)
def test_a_move_teaches_nothing_where_nothing_moved_or_a_call_ended_meanwhile(calls: int, served: int) -> None:
    world, source, destination = begun()
    world.view = world.view.put_model(ModelRecord(digest="sha256:m", uri="/m", nbytes=1, partitions=(1,)))
    world.view = world.view.put_version(msgspec.structs.replace(world.view.versions[CHAT], model="sha256:m"))
    node = world.nodes["n1"]
    said = {"running": calls, "served": 5, "context": 9 if calls else 0}
    node.instances[source] = msgspec.structs.replace(node.instances[source], **said)
    world.hear_all()
    ready(world, destination)
    world.plan()
    world.now += 30.0
    node.instances[source] = msgspec.structs.replace(node.instances[source], running=0, served=5 + served)
    world.finish(source, InstanceState.STOPPED)
    world.plan()
    assert state(world, source) is MigrationState.DONE
    assert ("sha256:m" in world.view.learned.moves) == (calls == 3 and not served)


@pytest.mark.parametrize("to", ["n2", ""])
def test_what_people_move_has_a_prediction_too(to: str) -> None:
    world, source = running()
    ask(world, source, to)
    world.now += 2.0
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    start = world.view.instances[destination].predicted
    assert start is not None
    (move,) = world.view.migrations.values()
    carried = carried_s(world.view, world.view.instances[source], world.now)
    assert move.expected == pytest.approx(2.0 + start.seconds + carried)


def test_each_step_of_a_move_is_an_event_and_its_expectation_stands_beside_what_it_took() -> None:
    world, source = running()
    told: list[Event] = []

    def step(act: Callable[[], object]) -> None:
        before = world.view
        act()
        told.extend(each for each in events(before, world.view, 0.0) if each.kind.startswith("migration."))

    move = Move(source, "n2", 1.5, ("other", 1), world.now)
    world.view = replace(world.view, moves={source: move})
    step(world.plan)
    (destination,) = [name for name in world.live(CHAT) if name != source]
    world.hear_all()
    ready(world, destination)
    step(world.plan)
    world.hear_all()
    world.now += 4.0
    works(world, source, 0)
    world.finish(source, InstanceState.STOPPED)
    step(world.plan)
    assert [each.kind for each in told] == ["migration.preparing", "migration.moving", "migration.done"]
    assert {(each.function, each.instance, each.node) for each in told} == {("chat", source, "n2")}
    assert told[-1].fields == {"destination": destination, "expected_s": "1.500000", "took_s": "4.000000"}


# --- what is refused before the move -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "to", "error", "word"),
    [
        ({"engine": None, "model": None}, "n2", InvalidRequest, "not engine-backed"),
        ({"resumable": False}, "n2", InvalidRequest, "resumable=False"),
        ({"capabilities": ("engine:transformers",)}, "n2", InvalidRequest, "does not resume exactly"),
        ({}, "n1", InvalidRequest, "already"),
        ({}, "n9", NodeNotFound, "no node n9"),
        ({"memory": 65 * GIB}, "n2", InvalidRequest, "can never run it"),
    ],
)
def test_what_cannot_be_carried_is_refused(fields: Any, to: str, error: type[SllmError], word: str) -> None:
    large = fields.pop("memory", None)
    world, source = running(**fields)
    if large is not None:
        instance = world.view.instances[source]
        grown = replace(instance, manifest=instance.manifest.model_copy(update={"memory": large}))
        world.view = world.view.put_instance(grown)
    with pytest.raises(error, match=word):
        ask(world, source, to)
    assert not world.view.migrations


def test_an_instance_that_is_not_ready_or_not_there_is_refused() -> None:
    world, source, destination = begun()
    with pytest.raises(Conflict, match="it is STARTING"):
        ask(world, destination)
    ready(world, destination)
    world.plan()
    with pytest.raises(InstanceNotFound, match="no instance nothing"):
        ask(world, "nothing")
    ask(world, source)  # goes on


def test_a_node_that_takes_no_starts_is_refused() -> None:
    world, source = running()
    node = world.view.nodes["n2"]
    world.view = world.view.put_node(replace(node, record=msgspec.structs.replace(node.record, cordoned=True)))
    with pytest.raises(Unavailable, match="cordoned"):
        ask(world, source, "n2")
    world.nodes["n2"].alive = False
    world.turn(10)
    with pytest.raises(Unavailable, match="not heard"):
        ask(world, source, "n2")


@pytest.mark.parametrize("why", ["cordoned", "left", "suspect", "in doubt"])
def test_an_idle_instance_on_a_node_that_is_to_be_left_is_not_taken(why: str) -> None:
    world, source = running(max_instances=2, cpu=3.0)
    idle = another(world, source)
    if why == "cordoned":
        world.view = draining.cordon(world.view, "n2", cordoned=True, drain=False)
    elif why == "left":
        world.view = departed(world.view, "n2")
    elif why == "in doubt":  # by what a gateway says of another one there
        there = world.view.instances[idle]
        other = replace(there, record=msgspec.structs.replace(there.record, instance="other"))
        world.view = suspect(world.view.put_instance(other), ("other",))
        world.now += OVERDUE_S
        world.hear("n1")
    else:
        world.view = suspect(world.view, (idle,))
    ask(world, source)
    world.view = migration.advance(world.view, world.now, nowhere, never, Turns(world.view, frozenset()))
    assert world.view.migrations[source].destination == ""


@pytest.mark.parametrize("yields", [0.0, inf], ids=["failed", "refused"])
def test_an_idle_instance_is_taken_where_another_start_of_its_version_found_no_room_or_failed(yields: float) -> None:
    """That says nothing of one that is ready."""
    world, source = running(max_instances=3, cpu=3.0)
    idle = another(world, source)
    world.view = replace(world.view, refused={(CHAT, "n2"): Refusal(world.now + 60.0, "no", yields)})
    ask(world, source, "n2")
    world.plan()
    assert world.view.migrations[source].destination == idle
    assert state(world, source) is MigrationState.MOVING


def nowhere(*_: Any) -> Wait:
    """What a policy says that has no place."""
    return Wait("there is none")


def of_moves(old: View, world: World) -> list[tuple[str, str | None]]:
    """What is told of moves since ``old``."""
    told = events(old, world.view, 0.0)
    return [(event.kind, event.instance) for event in told if event.kind.startswith("migration")]


def test_a_move_that_a_controller_before_has_told_of_is_not_told_again() -> None:
    world, source, destination = begun()
    ready(world, destination)
    world.plan()
    stored = world.followed()
    world.plan()
    assert state(world, source) is MigrationState.MOVING
    assert of_moves(stored, world) == []


@pytest.mark.parametrize(
    ("whose", "ended", "told"),
    [
        ("source", InstanceState.STOPPED, "migration.done"),
        ("source", InstanceState.LOST, "migration.abandoned"),
        ("destination", InstanceState.LOST, "migration.abandoned"),
    ],
)
def test_what_became_of_a_move_while_nobody_led_is_told(whose: str, ended: InstanceState, told: str) -> None:
    """Its node may be heard before the next controller has planned."""
    world, source, destination = begun()
    ready(world, destination)
    world.plan()
    stored = world.followed()
    world.hear_all()
    world.finish(source if whose == "source" else destination, ended)
    world.plan()
    assert of_moves(stored, world) == [(told, source)]


def test_a_source_that_is_forgotten_by_its_node_while_nobody_led_has_ended_as_was_wanted() -> None:
    """A node tells of one that has ended for a minute. Nothing is wrong with its version."""
    world, source, destination = begun()
    ready(world, destination)
    world.plan()
    stored = world.followed()
    world.nodes["n1"].instances.pop(source)
    world.hear_all()
    world.plan()
    assert of_moves(stored, world) == [("migration.done", source)]
    assert not world.view.failures


def test_of_a_move_whose_version_is_gone_nothing_is_taken_over() -> None:
    """It was cut, not moved."""
    world, _, destination = begun()
    ready(world, destination)
    world.plan()
    world.view = replace(world.view, functions={})
    stored = world.followed()
    world.plan()
    assert of_moves(stored, world) == []


def test_a_move_that_waited_for_an_idle_instance_teaches_what_it_took_from_then_on() -> None:
    """There is no room for a new one, until one of the version that worked elsewhere is idle: that the calls waited for
    it is nothing that moves take."""
    world, source = running(FakeNode("n1", cpu=4.0, gpus=0), FakeNode("n2", cpu=1.0, gpus=0), cpu=1.0, max_instances=2)
    world.view = world.view.put_model(ModelRecord(digest="sha256:m", uri="/m", nbytes=1, partitions=(1,)))
    world.view = world.view.put_version(msgspec.structs.replace(world.view.versions[CHAT], model="sha256:m"))
    world.turn(20.0)
    node = world.nodes["n1"]
    node.instances[source] = msgspec.structs.replace(node.instances[source], context=100)
    world.view = draining.cordon(world.view, "n1", cordoned=True, drain=False)
    world.wait_for(CHAT, 20)
    world.plan()
    world.hear_all()
    (other,) = [name for name in world.live(CHAT) if name != source]
    assert world.view.instances[other].record.node == "n2"
    ready(world, other)
    works(world, other, 1)
    world.wait_for(CHAT, 0)
    ask(world, source)
    for _ in range(40):
        world.turn(1.0)
        assert state(world, source) is MigrationState.PREPARING, "no room, and none is idle"
    works(world, other, 0)
    world.plan()
    assert world.view.instances[source].record.moves_to == other
    world.now += 2.0
    node.instances[source] = msgspec.structs.replace(node.instances[source], running=0, release_s=1.0)
    world.finish(source, InstanceState.STOPPED)
    world.plan()
    assert state(world, source) is MigrationState.DONE
    assert world.view.learned.moves["sha256:m"].y == pytest.approx(1.0)


@pytest.mark.parametrize("who", ["a person", "a policy"])
def test_that_a_node_computes_other_bits_is_known_for_as_long_as_the_source_is_there(who: str) -> None:
    """Longer than what came of the move is told: each start there would be in vain again."""
    world, source, destination = begun()
    ready(world, destination, fingerprint="g")
    world.plan()
    world.hear_all()
    world.turn(migration.KEEP_S + 2)
    assert world.view.instances[source].ready
    started = len(world.started)
    if who == "a person":
        with pytest.raises(InvalidRequest, match="cannot go on at node n2"):
            ask(world, source, "n2")
    else:
        world.view = replace(world.view, moves={source: Move(source, "n2", 1.0, ("other", 1), world.now)})
    world.plan()
    assert len(world.started) == started
    assert not world.view.moves


def test_what_has_no_accelerator_is_never_tried_again_where_other_bits_were_computed() -> None:
    """Only of an accelerator may there have been less memory free (for 5 minutes)."""
    world, source, destination = begun()
    ready(world, destination, fingerprint="g")
    world.plan()
    world.turn(2 * migration.FAILED_S)
    with pytest.raises(InvalidRequest, match="cannot go on at node n2"):
        ask(world, source, "n2")


def test_that_one_did_not_start_on_a_node_is_known_for_as_long_as_is_said() -> None:
    world, source, destination = begun()
    world.finish(destination, InstanceState.FAILED, ERROR)
    world.turn(migration.KEEP_S + 10)
    started = len(world.started)
    world.view = replace(world.view, moves={source: Move(source, "n2", 1.0, ("other", 1), world.now)})
    world.plan()
    assert len(world.started) == started, "no policy has it tried again within FAILED_S"
    world.turn(migration.FAILED_S)
    assert source not in world.view.migrations, "then it is forgotten"


@pytest.mark.parametrize("to", ["n2", ""])
def test_a_node_that_refuses_the_destination_is_one_without_room(to: str) -> None:
    """It has less than its last report said: that is no start in vain, and nothing is gone."""
    world, source = running(*(FakeNode(name, cpu=4.0, gpus=0) for name in ("n1", "n2", "n3")))
    ask(world, source, to)
    world.plan()
    (destination,) = [name for name in world.live(CHAT) if name != source]
    refusing = world.view.instances[destination].record.node
    world.view = refused(world.view, SendStart(destination), NoCapacity("needs 1 CPU, has 0.5 free"), world.now)
    world.plan()
    world.plan()
    assert state(world, source) is MigrationState.PREPARING
    (other,) = [name for name in world.live(CHAT) if name != source] or [""]
    if to:
        assert not other, "it is left alone for a second"
        world.now += REFUSED_S + 0.1
        world.hear_all()
        world.plan()
        (other,) = [name for name in world.live(CHAT) if name != source]
    assert (world.view.instances[other].record.node == refusing) is bool(to)

"""How many nodes there should be. No I/O."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from sllm_runtime.control import draining
from sllm_runtime.control.changes import touched, writes
from sllm_runtime.control.placement import unsatisfiable
from sllm_runtime.control.providing.pool import Errand
from sllm_runtime.control.providing.sizing import Remove, SetDesired, need_at, sent
from sllm_runtime.control.routes import answer, so_far
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.ctl import Acquire
from sllm_runtime.protocol.node import AWAITS_NODE
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.providing.supply import STEP_S, TIMING, Supplied
from tests.unit.control.world import ERROR, FakeNode, deployed, manifest

CHAT = ("chat", 1)
FIELDS = {"cpu": 2.0, "concurrency": 1, "max_instances": 20, "keep_alive": 5.0}


def chat(**fields: object) -> Supplied:
    """A pool without a node, and a function that two instances of fill one."""
    world = Supplied(**fields)  # type: ignore[arg-type]
    world.view = deployed(world.view, manifest("chat", **FIELDS))
    world.supply()
    return world


def desired(world: Supplied) -> list[int]:
    return [action.nodes for _, action in world.actions if isinstance(action, SetDesired)]


def test_from_nothing_to_as_many_as_the_waiting_starts_fill_and_back_to_nothing() -> None:
    world = chat(most=5)
    world.wait_for(CHAT, 5)
    world.live_for(60)
    assert desired(world) == [3], "five starts, two on a node"
    assert len(world.live(CHAT)) == 5
    world.all_end()
    world.live_for(2 * TIMING.idle + 5 * TIMING.cooldown)
    assert world.desired == 0
    assert len([action for _, action in world.actions if isinstance(action, Remove)]) == 3
    assert world.view.nodes == {}, "what was given back is forgotten"


def test_never_more_than_the_most_and_who_waits_is_told() -> None:
    world = chat(most=2)
    world.wait_for(CHAT, 9)
    world.live_for(60)
    assert desired(world) == [2]
    assert "has its most" in world.view.why(CHAT)


def test_who_waits_is_told_of_the_node_and_when_it_is_expected() -> None:
    world = chat(boot=20.0)
    world.wait_for(CHAT, 1)
    world.live_for(5)
    answer = so_far(world.view, Acquire(function="chat", version=1, gateway="g", waiting=1))
    assert answer.progress is not None
    assert (answer.progress.stage, answer.progress.total, answer.progress.unit) == (AWAITS_NODE, 30, "s")
    assert answer.progress.message.startswith("waiting for a node: 1 on the way, expected in 2")
    assert answer.pending.startswith(answer.progress.message)
    world.live_for(25)
    assert len(world.live(CHAT)) == 1
    assert so_far(world.view, Acquire(function="chat", version=1, gateway="g", waiting=1)).pending == ""


def test_that_a_node_is_waited_for_is_an_answer_to_who_has_not_told_it_yet() -> None:
    """Who waits on such an answer is woken by the plan that decides it, and does not end a long poll first."""
    world = chat(boot=20.0)
    world.wait_for(CHAT, 1)
    before = world.view
    world.live_for(1)
    assert "chat" in touched(before, world.view)
    asks = Acquire(function="chat", version=1, gateway="g", waiting=1)
    assert answer(before, replace(asks, awaits=False), world.now) is None
    first = answer(world.view, replace(asks, awaits=False), world.now)
    assert first == so_far(world.view, asks)
    assert first.progress is not None
    assert first.progress.stage == AWAITS_NODE
    assert answer(world.view, asks, world.now) is None, "who has told it, and who cannot say so, waits for the node"


def test_how_long_a_boot_takes_is_learnt_and_outlives_a_controller() -> None:
    world = chat(boot=14.0)
    world.wait_for(CHAT, 1)
    world.live_for(30)
    learnt = world.pool.boot_s
    assert 14 <= learnt <= 15
    world.new_leader()
    world.live_for(10)
    assert world.pool.boot_s == learnt
    assert desired(world) == [1], "what is there is not asked for again"


def test_a_start_that_only_just_waits_asks_for_nothing() -> None:
    world = chat()
    world.wait_for(CHAT, 1)
    world.live_for(1.0)
    assert desired(world) == []


def passes(world: Supplied, seconds: int) -> None:
    """Time, in which starts neither succeed nor fail."""
    for _ in range(seconds):
        world.turn(STEP_S)
        world.supply()


def fails(world: Supplied) -> str:
    """Where the only start of ``chat`` was made."""
    (name,) = world.live(CHAT)
    world.finish(name, InstanceState.FAILED, ERROR)
    return world.view.instances[name].record.node


def test_a_start_that_failed_on_the_only_node_with_room_has_one_made() -> None:
    """And is not made there again meanwhile. Where the next one fails as well it may be no node's fault."""
    world = chat(most=4, boot=5.0)
    for name in ("broken", "full"):
        world.nodes[name] = FakeNode(name, 4.0, 0)
    world.nodes["full"].holds["another"] = (4.0, ())
    world.desired = world.least = 2
    passes(world, 15)  # they have not only just come
    world.wait_for(CHAT, 1)
    passes(world, 1)
    assert fails(world) == "broken"
    passes(world, 5)
    assert not world.live(CHAT)
    assert CHAT in world.view.awaiting
    assert desired(world) == [3]
    passes(world, 5)
    assert fails(world) == "p1"
    passes(world, 25)
    assert world.live(CHAT)
    assert desired(world) == [3]


def test_what_fits_no_node_of_the_provider_is_refused_and_asks_for_nothing() -> None:
    world = chat()
    world.view = deployed(world.view, manifest("huge", cpu=99.0))
    world.wait_for(("huge", 1), 1)
    world.live_for(10)
    assert desired(world) == []
    assert unsatisfiable(need_at(world.view, CHAT), world.view) == ""


def test_an_idle_node_goes_and_one_with_an_idle_instance_stays() -> None:
    world = chat()
    world.view = deployed(world.view, manifest("kept", **(FIELDS | {"cpu": 3.0, "min_instances": 1})))
    world.wait_for(CHAT, 2)
    world.live_for(60)
    assert world.desired > 1
    world.all_end()
    world.live_for(3 * TIMING.idle)
    assert world.desired == 1
    (left,) = world.nodes
    assert {instance.key[0] for instance in world.view.on(left).values()} == {"kept"}


def test_a_node_that_is_to_go_stays_if_a_start_turns_up() -> None:
    world = chat()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    world.all_end()
    world.live_for(6)
    while not world.pool.record.leaving:
        world.turn(1.0)
        made = world.supply()
        assert not [action for action in made if isinstance(action, Remove)]
    world.wait_for(CHAT, 1)
    world.turn(3.0)
    world.supply()
    assert world.pool.record.leaving == ()
    world.live_for(2)
    assert len(world.live(CHAT)) == 1
    assert desired(world) == [1]


def test_a_new_controller_goes_on_with_what_was_to_go() -> None:
    world = chat()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    world.all_end()
    while not world.pool.record.leaving:
        world.turn(1.0)
        world.supply()
    world.new_leader()
    world.live_for(10)
    assert world.desired == 0
    world.live_for(10)
    assert world.pool.record.leaving == ()


def test_an_operator_who_takes_a_node_out_of_use_keeps_it() -> None:
    world = chat()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    (name,) = world.nodes
    world.view = draining.cordon(world.view, name, cordoned=True, drain=False)
    world.all_end()
    world.live_for(3 * TIMING.idle)
    assert world.desired == 1


def test_one_that_was_to_go_and_that_an_operator_puts_to_use_again_is_as_any_other() -> None:
    world = chat()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    (name,) = world.nodes
    world.all_end()
    while not world.pool.record.leaving:
        world.turn(1.0)
        world.supply()
    world.view = draining.cordon(world.view, name, cordoned=False, drain=False)
    world.live_for(0.9 * TIMING.idle)
    assert (world.pool.record.leaving, world.desired) == ((), 1), "it has been used just now"
    world.view = draining.cordon(world.view, name, cordoned=True, drain=True)
    world.live_for(3 * TIMING.idle)
    assert world.desired == 1, "it is the operator's"
    world.view = draining.cordon(world.view, name, cordoned=False, drain=False)
    world.live_for(3 * TIMING.idle)
    assert world.desired == 0


def test_a_node_that_never_comes_is_given_back_and_another_one_is_made() -> None:
    world = chat(boot=10_000.0)
    world.wait_for(CHAT, 1)
    world.live_for(TIMING.lost + 20)
    assert any(isinstance(action, Remove) for _, action in world.actions)
    given = next(event for event in world.told if event.kind == "node.given_back")
    assert given.message == f"it has not come within {TIMING.lost:g} s (SLLM_NODES_LOST)", "boots may take longer"
    world.boot = 10.0
    world.live_for(TIMING.lost + 60)
    assert len(world.live(CHAT)) == 1


def test_a_preparation_without_a_node_gets_one_and_keeps_it() -> None:
    world = chat()
    world.view = sent(world.view, "a-model", Errand("", cpu=1.0))
    world.live_for(30)
    (name,) = world.nodes
    world.view = sent(world.view, "a-model", Errand(name, cpu=1.0))
    world.live_for(3 * TIMING.idle)
    assert world.desired == 1
    world.view = sent(world.view, "a-model", None)
    world.live_for(3 * TIMING.idle)
    assert world.desired == 0


def test_decisions_are_told_as_events_and_stored() -> None:
    world = chat()
    before = world.view
    world.wait_for(CHAT, 1)
    world.live_for(30)
    stored = {write.key: write.record for write in writes(before, world.view, {}, {})}
    assert stored[subjects.POOL_KEY] == world.pool.record
    world.all_end()
    world.live_for(2 * TIMING.idle + 10)
    assert [(event.kind, event.node) for event in world.told] == [
        ("pool.grows", None),
        ("node.draining", "p1"),
        ("node.leaving", "p1"),
        ("node.given_back", "p1"),
        ("node.removed", "p1"),
    ]
    assert world.told[0].message == "from 0 to 1 node(s), for 1 start(s) that wait; expected in 30 s"
    forgotten = {write.key: write.record for write in writes(before, world.view, {}, {})}
    assert subjects.node_key("p1") not in forgotten, "it came and went"


def test_that_a_node_is_given_back_is_told_once_and_not_while_its_provider_keeps_it() -> None:
    """The role lacks the right, say: it is asked for again each minute, and the node stays."""
    world = chat()
    world.wait_for(CHAT, 1)
    world.live_for(30)
    world.broken = True
    world.all_end()
    world.live_for(2 * TIMING.idle + 200)
    asked = [action for _, action in world.actions if isinstance(action, Remove)]
    assert len(asked) > 2, "again and again"
    assert "node.given_back" not in [event.kind for event in world.told]
    world.broken = False
    world.live_for(100)
    assert [event.kind for event in world.told][-2:] == ["node.given_back", "node.removed"]


def test_calls_that_are_to_leave_their_node_have_one_made() -> None:
    """As at a spot instance's notice: its node says that it is stopped, and nothing else has room."""
    world = Supplied(most=2, boot=10.0)
    whole = {"cpu": 4.0, "engine": True, "model": "/m", "concurrency": 1, "max_instances": 2}
    world.view = deployed(world.view, manifest("chat", **whole))
    world.supply()
    world.wait_for(CHAT, 1)
    world.live_for(20)
    (source,) = world.live(CHAT)
    (node,) = world.nodes.values()
    carries = world.view.instances[source]
    record = replace(carries.record, capabilities=("exact_resume",))
    world.view = world.view.put_instance(dataclasses.replace(carries, record=record))
    node.draining = True
    world.live_for(30)
    assert desired(world) == [1, 2]
    (destination,) = [name for name in world.live(CHAT) if name != source]
    assert world.view.instances[destination].record.node != node.name
    assert world.harmed == []

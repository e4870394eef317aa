"""Room that is made in a plan, for several starts of one version and beside moves."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from benchmarks.scheduler_cluster import request
from sllm_runtime.control.placement import Decision, Evict, Migrate, Place, Wait, room_made
from sllm_runtime.control.plan import Context, Plan, plan
from sllm_runtime.control.reports import observe
from sllm_runtime.control.room import MOVED
from sllm_runtime.control.scheduling.policies import POLICIES, StartupTime
from sllm_runtime.control.scheduling.startup import OVERDUE_S
from sllm_runtime.control.view import PutOff, Stop, View
from sllm_runtime.protocol.states import MigrationState
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node, place

M, OTHER = model("m", 2 * GB), model("other", 2 * GB)
CHAT = ("chat", 1)


def planned(view: View, policy: str = "startup-time", now: float = NOW) -> Plan:
    return plan(view, Context(now=now, wall=0.0, policy=POLICIES[policy](), rng=random.Random(1)))


def full(count: int) -> View:
    """Each accelerator of ``near`` has an idle instance; so many calls wait for as many instances of ``chat``."""
    view, _ = function(
        cluster(node("near", gpus=count, models=(M.digest,)), models=(M,)), "chat", M, max_instances=count
    )
    for gpu in range(count):
        view = idle(function(view, f"old{gpu}")[0], f"old{gpu}", "near", gpu, idle_s=10.0)
    return view.put_waiting(CHAT, "gw", count)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_room_is_made_for_all_instances_of_a_version_at_once(policy: str) -> None:
    made = planned(full(4), policy)
    assert all(each.stop is not None for each in made.view.instances.values())
    assert "makes room on near" in made.view.why(CHAT)
    assert made.view.lacking == {CHAT: 4}
    again = planned(made.view, policy)
    assert sorted(again.view.claims) == sorted(made.view.instances), "each waits for one of them"


def test_no_more_room_is_made_than_calls_are_left_that_would_begin_later() -> None:
    """They are over soon once the first instance is there."""
    view = full(4)
    view = replace(view, learned=view.learned.called(CHAT, 0.01))
    made = planned(view)
    assert sum(each.stop is not None for each in made.view.instances.values()) == 1
    assert made.view.lacking == {CHAT: 1}
    assert CHAT in made.view.put_off
    assert "makes room on near" in made.view.why(CHAT)


def moved() -> View:
    """``chat`` is moved room for on ``full``, and wants another instance: its weights are in the memory of ``full``."""
    big = model("m", 20 * GB)
    nodes = (node("full", resident=(big.digest, OTHER.digest)), node("free", gpus=2, resident=(OTHER.digest,)))
    view, _ = function(cluster(*nodes, models=(big, OTHER)), "chat", big, max_instances=3)
    view, _ = function(view, "other", OTHER, engine=True, model="/other")
    return idle(view, "other", "full", running=1, carries=True).put_waiting(CHAT, "gw", 2)


def test_what_moves_for_one_instance_keeps_no_other_from_free_room() -> None:
    made = planned(moved())
    assert list(made.view.moves) == ["other-on-full-0"]
    assert [each.record.node for each in made.view.of(CHAT)] == ["free"]
    assert "moving other-on-full-0" in made.view.why(CHAT)
    assert made.view.lacking == {CHAT: 1}
    again = planned(made.view)
    assert list(again.view.moves) == ["other-on-full-0"], "nothing more is moved meanwhile"


@pytest.mark.parametrize(("over_s", "waits"), [(OVERDUE_S - 0.1, True), (OVERDUE_S + 0.1, False)])
def test_moves_that_are_overdue_are_not_waited_for_beside_room(over_s: float, waits: bool) -> None:
    made = planned(moved().put_waiting(CHAT, "gw", 1)).view
    (move,) = made.moves.values()
    now = move.decided + move.seconds + over_s
    later = replace(made, listening_since=now)
    decision = StartupTime().place(request(later, CHAT), later, now, random.Random(1))
    assert isinstance(decision, Wait if waits else Place)


def test_what_is_moved_for_one_start_is_neither_waited_for_nor_ended_for_another() -> None:
    view = moved().put_waiting(CHAT, "gw", 1)
    late = model("late", 20 * GB)
    there = view.nodes["full"].status
    assert there is not None
    view = observe(view.put_model(late), msgspec.structs.replace(there, sequence=2, models=(late.digest,)), NOW, 0.0)
    view = function(view, "late", late)[0].put_waiting(("late", 1), "gw", 1)
    made = planned(view).view
    assert dict(made.claims) == {"other-on-full-0": MOVED}
    again = planned(made).view
    assert dict(again.claims) == {"other-on-full-0": MOVED}, "also while it goes on"
    gone = replace(again.migrations["other-on-full-0"], state=MigrationState.MOVING)
    going = again.put_instance(replace(again.instances["other-on-full-0"], stop=Stop("its calls go on at free", 60.0)))
    going = replace(going, migrations={"other-on-full-0": gone})
    after = planned(replace(going, learned=going.learned.called(("other", 1), 0.5))).view
    assert dict(after.claims) == {"other-on-full-0": MOVED}, "and until its place is given back"


def test_what_is_moved_for_one_start_is_not_moved_for_another() -> None:
    """Though there is room for it to go on, and the other one would start sooner too."""
    view = moved().put_waiting(CHAT, "gw", 1)
    late = model("late", 20 * GB)
    there = view.nodes["full"].status
    assert there is not None
    resident = (*there.resident, late.digest)
    view = observe(view.put_model(late), msgspec.structs.replace(there, sequence=2, resident=resident), NOW, 0.0)
    view = function(view, "late", late)[0]
    assert isinstance(place(StartupTime(), view, "late"), Migrate)
    made = planned(view.put_waiting(("late", 1), "gw", 1)).view
    assert {name: move.by for name, move in made.moves.items()} == {"other-on-full-0": CHAT}
    assert [each.record.node for each in made.of(("late", 1))] == ["free"]


def test_who_gets_an_instance_and_wants_another_has_waited_all_the_while() -> None:
    """What it waits for by choice is bounded for all of them together."""
    nodes = (node("near", models=(M.digest,)), node("far", gpus=2))
    view, _ = function(cluster(*nodes, models=(M,)), "chat", M, max_instances=2)
    view = idle(function(view, "other")[0], "other", "near", running=1)
    view = replace(view, learned=view.learned.called(("other", 1), 0.5)).put_waiting(CHAT, "gw", 2)
    waits = planned(view).view
    assert [each.record.node for each in waits.of(CHAT)] == ["far"], "one waits for the place that is near"
    assert waits.put_off_s(CHAT, NOW + 3.0) == 3.0
    later = replace(view, put_off={CHAT: PutOff(NOW - 45.0, NOW)})
    made = planned(later).view
    assert [each.record.node for each in made.of(CHAT)] == ["far", "far"], "it has waited for long enough"


def test_who_gets_an_instance_is_behind_those_who_wait_for_their_first() -> None:
    view = cluster(node("near", gpus=1, models=(M.digest,)), models=(M,))
    view = function(view, "chat", M, max_instances=2)[0].put_waiting(CHAT, "gw", 2)
    made = planned(replace(view, put_off={CHAT: PutOff(NOW - 5.0, NOW)})).view
    assert len(made.of(CHAT)) == 1
    assert made.put_off[CHAT].since == NOW
    assert made.put_off_s(CHAT, NOW) == 5.0


def test_one_that_waits_for_what_ends_already_says_for_how_long() -> None:
    """So another one may be next there; and where there is room elsewhere nobody has a node made for it."""
    view = full(1)
    ending = replace(planned(view).view, claims={})
    decision = place(StartupTime(), ending, "chat")
    assert isinstance(decision, Wait)
    assert decision.seconds == pytest.approx(2.2)
    assert not decision.room
    far = cluster(node("far"), node("near"), models=(M,)).nodes["far"]
    beside = place(StartupTime(), ending.put_node(far), "chat")
    assert isinstance(beside, Wait)
    assert beside.room
    old = ending.instances["old0-on-near-0"]
    assert old.seen is not None
    late = replace(old, seen=msgspec.structs.replace(old.seen, running=1))
    decision = place(StartupTime(), ending.put_instance(late), "chat")
    assert isinstance(decision, Wait)
    assert decision.seconds is None, "nobody knows when its call ends"


def test_a_version_at_its_minimum_does_not_hide_the_room_of_others() -> None:
    """Of two idle instances of ``kept`` one is to stay; the one of ``more`` may end."""
    view, _ = function(cluster(node("near", gpus=3, models=(M.digest,)), models=(M,)), "chat", M)
    view = function(function(view, "kept", min_instances=1)[0], "more")[0]
    view = idle(idle(view, "kept", "near", 0, idle_s=300.0), "kept", "near", 1, idle_s=200.0)
    view = idle(view, "more", "near", 2, idle_s=100.0)
    asked = request(view, CHAT)
    need = replace(asked.need(view), gpus=(("L4", 2),))
    going = room_made(asked, need, view, view.nodes["near"], NOW)
    assert going is not None
    assert sorted(each.record.instance for each in going) == ["kept-on-near-0", "more-on-near-2"]


def relieves(view: View, policy: str) -> Decision:
    asked = replace(request(view, CHAT), patient=False)
    return POLICIES[policy]().place(asked, view, NOW, random.Random(1))


@pytest.mark.parametrize("policy", ["startup-time", "preemption"])
def test_what_relieves_one_that_runs_takes_the_room_that_there_is(policy: str) -> None:
    """Whatever could be ended, moved or stopped for a quicker start."""
    view = moved()
    view = idle(function(view, "old")[0], "old", "free", 1)
    decision = relieves(view, policy)
    assert isinstance(decision, Place)
    assert decision.node == "free"
    none = replace(view, nodes={"full": view.nodes["full"]})
    assert isinstance(relieves(none, policy), Wait), "nor is anything moved or stopped where there is none"
    assert isinstance(place(POLICIES[policy](), view, "chat"), Migrate | Evict)

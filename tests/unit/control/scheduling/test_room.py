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


def test_moves_are_waited_for_as_long_as_one_of_them_is_in_time() -> None:
    """The place is there once all of them are over, and nobody makes another one beside it meanwhile."""
    made = planned(moved().put_waiting(CHAT, "gw", 1)).view
    (move,) = made.moves.values()
    now = move.decided + move.seconds + OVERDUE_S + 1.0
    both = replace(made, moves={**made.moves, "later": replace(move, instance="later", decided=move.decided + 2.0)})
    for view, decided in ((made, Place), (both, Wait)):
        there = replace(view, listening_since=now)
        assert isinstance(StartupTime().place(request(there, CHAT), there, now, random.Random(1)), decided)


@pytest.mark.parametrize(("over_s", "late", "ends"), [(-0.1, False, False), (0.1, False, True), (0.1, True, False)])
def test_what_is_idle_ends_for_who_waits_for_moves_that_are_overdue(over_s: float, late: bool, ends: bool) -> None:
    """Not what has a call to finish: nobody knows which of the two is over sooner."""
    made = planned(moved().put_waiting(CHAT, "gw", 1)).view
    (move,) = made.moves.values()
    full = replace(made, nodes={"full": made.nodes["full"]})
    third = observe(full, node("third"), NOW, 0.0)
    third = leaving(third, "third") if late else idle(function(third, "old")[0], "old", "third")
    now = move.decided + move.seconds + OVERDUE_S + over_s
    third = replace(third, listening_since=now)
    decision = StartupTime().place(request(third, CHAT), third, now, random.Random(1))
    assert isinstance(decision, Evict if ends else Wait)
    if isinstance(decision, Evict):
        assert decision.instances == ("old-on-third-0",)
    else:
        assert decision.reason == "waits for 1 instance(s) to go on elsewhere"


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


def leaving(view: View, where: str, gpu: int = 0) -> View:
    """``view`` with an instance of ``gone`` that ends once its call does, however long that takes."""
    view = idle(function(view, "gone", timeout=1800.0)[0], "gone", where, gpu, running=1)
    there = view.instances[f"gone-on-{where}-{gpu}"]
    return view.put_instance(replace(there, stop=Stop("it is deleted", 1800.0)))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("where", ["near", "other"])
def test_what_is_idle_ends_before_what_has_a_call_to_finish_is_waited_for(policy: str, where: str) -> None:
    """On its node, or on another one: nobody knows how long the call takes."""
    held = (M.digest,)
    nodes = (node("near", gpus=1 + (where == "near"), models=held), node("other", gpus=where == "other", models=held))
    view, _ = function(leaving(cluster(*nodes, models=(M,)), "near"), "chat", M)
    alone = place(POLICIES[policy](), replace(view, nodes={"near": view.nodes["near"]}), "chat")
    assert isinstance(alone, Wait if where == "other" else Place)
    view = idle(function(view, "old")[0], "old", where, int(where == "near"), idle_s=10.0)
    decision = place(POLICIES[policy](), view, "chat")
    assert isinstance(decision, Evict)
    assert decision.instances == decision.claims == (f"old-on-{where}-{int(where == 'near')}",)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_has_a_call_to_finish_is_waited_for_where_nothing_else_makes_room(policy: str) -> None:
    """Beside what is idle, if that is not enough alone; until when nobody knows."""
    view, _ = function(leaving(cluster(node("near", gpus=2, models=(M.digest,)), models=(M,)), "near"), "chat", M)
    view = wants(view, "L4:2")
    view = idle(function(view, "old")[0], "old", "near", 1, idle_s=10.0)
    decision = place(POLICIES[policy](), view, "chat")
    assert isinstance(decision, Evict)
    assert decision.instances == ("old-on-near-1",)
    assert decision.claims == ("gone-on-near-0", "old-on-near-1")
    assert decision.seconds is None


@pytest.mark.parametrize("policy", ["startup-time", "preemption"])
def test_nothing_idle_ends_beside_a_call_to_finish_for_who_has_room_elsewhere(policy: str) -> None:
    """However far the weights are there: the call may take for ever."""
    nodes = (node("near", gpus=2, models=(M.digest,)), node("far", gpus=2))
    view = wants(function(leaving(cluster(*nodes, models=(M,)), "near"), "chat", M)[0], "L4:2")
    view = idle(function(view, "old")[0], "old", "near", 1, idle_s=10.0)
    decision = place(POLICIES[policy](), view, "chat")
    assert isinstance(decision, Place)
    assert decision.node == "far"


@pytest.mark.parametrize(("policy", "made"), [("startup-time", Migrate), ("preemption", Evict)])
def test_what_runs_makes_way_before_what_has_a_call_to_finish_is_waited_for(policy: str, made: type) -> None:
    """``chat`` runs where its label is: on ``full``, and on ``near``, which would be as quick."""
    zone = {"zone": "a"}
    nodes = (node("full", labels=zone), node("near", labels=zone), node("free"))
    held = [msgspec.structs.replace(each, models=(M.digest, OTHER.digest)) for each in nodes]
    view, _ = function(leaving(cluster(*held, models=(M, OTHER)), "near"), "chat", M, labels=zone)
    view, _ = function(view, "other", OTHER, engine=True, model="/other")
    decision = place(POLICIES[policy](), idle(view, "other", "full", running=1, carries=True), "chat")
    assert isinstance(decision, Migrate | Evict)
    assert type(decision) is made
    names = decision.instances if isinstance(decision, Evict) else tuple(each.instance for each in decision.moves)
    assert names == ("other-on-full-0",)
    stays = place(POLICIES[policy](), idle(view, "other", "full", running=1), "chat")
    assert isinstance(stays, Wait)
    assert stays.claims == ("gone-on-near-0",)


def wants(view: View, gpu: str) -> View:
    """``chat`` wants such accelerators."""
    version = view.versions[CHAT]
    what = version.manifest.model_copy(update={"gpu": (gpu,)})
    return view.put_version(msgspec.structs.replace(version, manifest=what))


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

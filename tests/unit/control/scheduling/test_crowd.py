"""Starts that have less room than they are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.scheduler_cluster import request
from sllm_runtime.control.placement import Evict, Migrate, Place, Wait, needed
from sllm_runtime.control.plan import Context, Plan, plan
from sllm_runtime.control.scheduling.crowd import crowd, delay_s
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.policies import POLICIES, StartupTime
from sllm_runtime.control.view import View
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node, place

A, B, C = model("a", 2 * GB), model("b", 2 * GB), model("c", 2 * GB)


def planned(view: View, policy: str = "startup-time") -> Plan:
    return plan(view, Context(now=NOW, wall=0.0, policy=POLICIES[policy](), rng=random.Random(1)))


def ended(made: Plan) -> list[str]:
    return sorted(name for name, instance in made.view.instances.items() if instance.stop is not None)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_each_start_of_a_burst_ends_what_is_idle_for_itself(policy: str) -> None:
    """None counts on the place that another one of the same plan has made, or waits for."""
    view = cluster(node("near", gpus=3, models=(A.digest, B.digest, C.digest)), models=(A, B, C))
    for name, record in (("a", A), ("b", B), ("c", C)):
        view = function(view, name, record)[0].put_waiting((name, 1), "gw", 1)
    for gpu in range(3):
        view = idle(function(view, f"old{gpu}")[0], f"old{gpu}", "near", gpu)
    first = planned(view, policy)
    assert ended(first) == ["old0-on-near-0", "old1-on-near-1", "old2-on-near-2"]
    assert list(first.view.claims) == ended(first)
    again = planned(first.view, policy)
    assert len(again.view.pending) == 3
    assert sorted(again.view.claims) == ended(first), "each waits for one of them"


def test_no_more_ends_than_gives_what_is_lacking() -> None:
    """Who was idle longest holds no accelerator."""
    view, _ = function(cluster(node("near", gpus=1, models=(A.digest,)), models=(A,)), "a", A)
    view = idle(function(view, "old")[0], "old", "near", 0, idle_s=50.0)
    view = idle(function(view, "plain")[0], "plain", "near", 7, idle_s=100.0)
    decision = place(StartupTime(), view, "a")
    assert isinstance(decision, Evict)
    assert decision.instances == decision.claims == ("old-on-near-0",)


def test_of_what_would_do_the_first_is_needed() -> None:
    view, _ = function(cluster(node("near", gpus=3, models=(A.digest,)), models=(A,)), "a", A)
    view, _ = function(view, "old")
    for gpu in range(3):
        view = idle(view, "old", "near", gpu)
    there = [view.instances[f"old-on-near-{gpu}"] for gpu in (2, 0, 1)]
    need = request(view, ("a", 1)).need(view)
    assert needed(replace(need, gpus=(("L4", 2),)), view, view.nodes["near"], there) == tuple(there[:2])


def full(lacking: int) -> View:
    """``a`` wants to start: its weights are far from ``idle``, which has one place by ending who is idle there; so many
    others lack one where theirs are."""
    nodes = (node("mine", models=(A.digest,)), node("theirs", models=(B.digest, C.digest)))
    view = function(cluster(*nodes, models=(A, B, C)), "a", A)[0]
    view = function(function(view, "b", B)[0], "c", C)[0]
    view = idle(function(view, "busy")[0], "busy", "mine", running=1)
    view = idle(function(view, "old")[0], "old", "theirs")
    return replace(view, lacking={("a", 1): 1} | {(name, 1): 1 for name in ("b", "c")[:lacking]})


def test_what_others_lack_counts_by_where_their_weights_are() -> None:
    view, servers = full(2), Servers()
    there = servers.of(view)
    found = crowd(("a", 1), view, servers)
    assert found == {"theirs": 2}
    need = request(view, ("a", 1)).need(view)
    assert delay_s(there["theirs"], need, found, 20.0) == 40.0, "one of three gets the place of who is idle"
    assert delay_s(there["mine"], need, found, 20.0) == 0.0
    assert delay_s(there["theirs"], need, {"theirs": 0}, 20.0) == 0.0
    assert not crowd(("a", 1), replace(view, lacking={}), servers)


@pytest.mark.parametrize(("lacking", "waits"), [(0, False), (1, True)])
def test_a_start_from_afar_makes_way_for_those_who_could_start_there_from_near(lacking: int, waits: bool) -> None:
    """It takes 20 s there, and 30 s where it waits for a call to end."""
    view = full(lacking)
    view = replace(view, learned=view.learned.called(("busy", 1), 27.0))
    decision = place(StartupTime(), view, "a")
    assert isinstance(decision, Evict) is not waits
    if waits:
        assert isinstance(decision, Wait)
        assert "waits for calls to end on mine" in str(decision.reason)


def test_room_where_others_lack_none_is_taken_first() -> None:
    nodes = (node("crowded", models=(A.digest, B.digest)), node("other", models=(A.digest,)))
    view = function(function(cluster(*nodes, models=(A, B)), "a", A)[0], "b", B)[0]
    taken = [place(StartupTime(), each, "a") for each in (view, replace(view, lacking={("b", 1): 1}))]
    assert [each.node for each in taken if isinstance(each, Place)] == ["crowded", "other"]


@pytest.mark.parametrize(("lacking", "moves"), [(0, True), (1, False)])
def test_nothing_is_moved_to_where_others_lack_a_place(lacking: int, moves: bool) -> None:
    view = cluster(node("mine", models=(A.digest,)), node("theirs", models=(B.digest, C.digest)), models=(A, B, C))
    view = function(function(view, "a", A)[0], "b", B)[0]
    view = idle(function(view, "c", C, engine=True, model=C.digest)[0], "c", "mine", running=1, carries=True)
    view = replace(view, lacking={("b", 1): lacking} if lacking else {})
    assert isinstance(place(StartupTime(), view, "a"), Migrate) is moves


def test_a_plan_counts_what_is_lacking_until_it_has_its_place() -> None:
    view = cluster(node("near", gpus=1, models=(A.digest, B.digest)), models=(A, B))
    for name, record in (("a", A), ("b", B)):
        view = function(view, name, record)[0].put_waiting((name, 1), "gw", 1)
    made = planned(view)
    assert [each.key for each in made.view.instances.values()] == [("a", 1)]
    assert dict(made.view.lacking) == {("a", 1): 0, ("b", 1): 1}

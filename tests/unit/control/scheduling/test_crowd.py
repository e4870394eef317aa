"""Starts that have less room than they are."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from benchmarks.scheduler_cluster import request
from sllm_runtime.control.placement import Decision, Evict, Migrate, Place, Request, Wait, needed
from sllm_runtime.control.plan import Context, Plan, plan
from sllm_runtime.control.scheduling.crowd import Crowd, Others, delay_s
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.policies import POLICIES, StartupTime
from sllm_runtime.control.view import Key, PutOff, Refusal, View
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node, place
from tests.unit.control.world import GIB

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


def others(view: View, key: Key = ("a", 1)) -> Others:
    return Crowd(Servers()).others(key, view, NOW)


def test_what_others_lack_counts_by_where_their_weights_are() -> None:
    view = full(2)
    there = Servers().of(view)
    found = others(view)
    assert [found.at(name) for name in ("theirs", "mine")] == [2.0, 0.0]
    need = request(view, ("a", 1)).need(view)
    assert delay_s(there["theirs"], need, found, 20.0) == 40.0, "one of three gets the place of who is idle"
    assert delay_s(there["mine"], need, found, 20.0) == 0.0
    assert not others(replace(view, lacking={}))
    assert not others(replace(view, lacking={("a", 1): 8})), "of its own it takes no place away"


@pytest.mark.parametrize("why", ["kind", "memory", "label", "cordoned", "kept", "refused"])
def test_what_others_could_not_start_there_takes_nothing_from_them(why: str) -> None:
    view = full(2)
    fields: dict[str, dict[str, Any]] = {
        "kind": {"gpu": ["T4"]},
        "memory": {"memory": 900 * GIB},
        "label": {"labels": {"zone": "b"}},
    }
    for key in (("b", 1), ("c", 1)):
        version = view.versions[key]
        changed = version.manifest.model_copy(update=fields.get(why, {}))
        view = view.put_version(msgspec.structs.replace(version, manifest=changed))
        view = (
            replace(view, refused={**view.refused, (key, "theirs"): Refusal(NOW + 1, "no")})
            if why == "refused"
            else view
        )
    if why == "cordoned":
        node = view.nodes["theirs"]
        view = view.put_node(replace(node, record=msgspec.structs.replace(node.record, cordoned=True)))
    view = replace(view, kept={"theirs": ("a", 1)}) if why == "kept" else view
    assert others(view).at("theirs") == 0.0


def test_what_has_its_weights_on_several_servers_lacks_a_place_once() -> None:
    view = cluster(*(node(f"n{number}", models=(B.digest,)) for number in range(4)), models=(A, B))
    view = function(function(view, "a", A)[0], "b", B)[0]
    found = others(replace(view, lacking={("b", 1): 6}))
    assert [found.at(f"n{number}") for number in range(4)] == [1.5] * 4


def test_what_is_lacking_is_the_same_whether_it_is_counted_anew_or_as_it_changes() -> None:
    view, kept = full(2), Crowd(Servers())
    for lacking in ({("b", 1): 2}, {("b", 1): 1, ("c", 1): 3}, {("c", 1): 3, ("a", 1): 1}, {("a", 1): 1}):
        view = replace(view, lacking=lacking)
        for key in (("a", 1), ("b", 1)):
            found, anew = kept.others(key, view, NOW), others(view, key)
            assert found.at("theirs") == pytest.approx(anew.at("theirs"))
            assert bool(found) == bool(anew)


def test_only_what_gives_its_place_back_counts_as_one() -> None:
    """Who holds no accelerator gives none; who is to be there without a caller stays; who works ends in time."""
    view = full(2)
    view = idle(function(view, "plain")[0], "plain", "theirs", 7)
    view = idle(function(view, "least", min_instances=1)[0], "least", "theirs", 8)
    view = idle(function(view, "more")[0], "more", "theirs", 9, running=1)
    plain = view.instances["plain-on-theirs-7"]
    view = view.put_instance(replace(plain, gpus=()))
    there = Servers().of(view)["theirs"]
    assert there.turnover(True) == (1, 2)
    assert there.turnover(False) == (2, 3)


def test_a_place_near_its_weights_is_taken_though_another_lacks_one_that_has_its_own() -> None:
    """``b`` could start on ``z`` as well; on ``y`` a short call is about to end."""
    nodes = (node("x", models=(A.digest, B.digest)), node("y", models=(A.digest,)), node("z", models=(B.digest,)))
    view = function(function(cluster(*nodes, models=(A, B)), "a", A)[0], "b", B)[0]
    view = idle(function(view, "busy")[0], "busy", "y", running=1)
    view = replace(view, learned=view.learned.called(("busy", 1), 0.1), lacking={("b", 1): 1})
    decision = place(StartupTime(), view, "a")
    assert isinstance(decision, Place)
    assert decision.node == "x"


def test_it_waits_for_no_longer_than_its_own_start_takes_however_many_lack_a_place() -> None:
    """20 s on ``theirs``, where it would be one of twenty; calls on ``mine`` follow each other for ever."""
    view = full(0)
    view = replace(view, learned=view.learned.called(("busy", 1), 27.0), lacking={("b", 1): 19})
    assert isinstance(place(StartupTime(), view, "a"), Wait)
    for waited, waits in ((15.0, True), (25.0, False)):
        later = replace(view, put_off={("a", 1): PutOff(NOW - waited, NOW)})
        assert isinstance(place(StartupTime(), later, "a"), Wait) is waits


def test_calls_that_begin_where_their_version_is_lack_no_place() -> None:
    """Twenty short ones at one instance, which could have twenty."""
    view = cluster(node("near", gpus=2, models=(B.digest,)), models=(B,))
    view = idle(function(view, "b", B, max_instances=20)[0], "b", "near", running=1)
    view = replace(view, learned=view.learned.called(("b", 1), 0.05)).put_waiting(("b", 1), "gw", 20)
    for _ in range(2):
        view = planned(view).view
        assert not view.lacking
        assert view.enough == {("b", 1)}
    assert "all its calls are expected to begin" in view.why(("b", 1))
    seen = list[Mapping[Key, int]]()

    class Seeing(StartupTime):
        def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
            seen.append(view.lacking)
            return super().place(request, view, now, rng)

    plan(view, Context(now=NOW, wall=0.0, policy=Seeing(), rng=random.Random(1)))
    assert seen == [{}], "nor while that is asked once more"
    view = planned(view.put_waiting(("b", 1), "gw", 100)).view
    assert (view.lacking[("b", 1)], view.enough) == (18, frozenset()), "one is started, for others there is no room"


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


@pytest.mark.parametrize(("lacking", "moves"), [(0, True), (1, False)])
def test_no_room_is_moved_for_where_others_could_start_from_near(lacking: int, moves: bool) -> None:
    """It takes 20 s there, and 30 s where it waits for a call to end; on ``spare`` it has no room."""
    spare = node("spare", resident=(C.digest,), free_memory=8 * GIB)
    nodes = (node("mine", models=(A.digest,)), node("theirs", models=(B.digest,)), spare)
    view = function(cluster(*nodes, models=(A, B, C)), "a", A, memory=30 * GIB)[0]
    view = function(function(view, "b", B)[0], "c", C, engine=True, model=C.digest)[0]
    view = idle(function(view, "busy")[0], "busy", "mine", running=1)
    view = idle(view, "c", "theirs", running=1, carries=True)
    lack = {("a", 1): 1} | ({("b", 1): 1} if lacking else {})
    view = replace(view, learned=view.learned.called(("busy", 1), 27.0), lacking=lack)
    assert isinstance(place(StartupTime(), view, "a"), Migrate if moves else Wait)


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


def test_it_is_moved_to_a_slower_server_where_others_lack_none() -> None:
    nodes = (*(node(f"theirs{number}", models=(B.digest, C.digest)) for number in range(3)), node("slow"))
    big = model("big", 40 * GB)
    view = cluster(node("mine", models=(big.digest,)), *nodes, models=(big, B, C))
    view = function(function(view, "a", big)[0], "b", B)[0]
    view = idle(function(view, "c", C, engine=True, model=C.digest)[0], "c", "mine", running=1, carries=True)
    decision = place(StartupTime(), replace(view, lacking={("b", 1): 9}), "a")
    assert isinstance(decision, Migrate)
    assert [move.node for move in decision.moves] == ["slow"]


def test_preferred_accelerators_come_before_what_others_lack() -> None:
    nodes = (node("crowded", models=(A.digest, B.digest)), node("other", kind="T4", models=(A.digest,)))
    view = function(function(cluster(*nodes, models=(A, B)), "a", A)[0], "b", B)[0]
    version = view.versions["a", 1]
    both = version.manifest.model_copy(update={"gpu": ("L4", "T4")})
    view = view.put_version(msgspec.structs.replace(version, manifest=both))
    decision = place(StartupTime(), replace(view, lacking={("b", 1): 1}), "a")
    assert isinstance(decision, Place)
    assert decision.node == "crowded"


def test_a_plan_counts_what_is_lacking_until_it_has_its_place() -> None:
    view = cluster(node("near", gpus=1, models=(A.digest, B.digest)), models=(A, B))
    for name, record in (("a", A), ("b", B)):
        view = function(view, name, record)[0].put_waiting((name, 1), "gw", 1)
    made = planned(view)
    assert [each.key for each in made.view.instances.values()] == [("a", 1)]
    assert dict(made.view.lacking) == {("b", 1): 1}

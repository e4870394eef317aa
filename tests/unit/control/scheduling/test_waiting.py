"""Waiting for a call to end where the weights are, in place of a start where they are not."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduler_cluster import request
from sllm_runtime.control.autoscale import BETWEEN_S, HANDOVER_S
from sllm_runtime.control.patience import put_off
from sllm_runtime.control.placement import Decision, Place, Wait
from sllm_runtime.control.plan import Context, plan
from sllm_runtime.control.scheduling.learned import RELEASE_S
from sllm_runtime.control.scheduling.policies import StartupTime
from sllm_runtime.control.view import Claim, Migration, View
from sllm_runtime.protocol.states import MigrationState
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node, place

M = model("m", 2 * GB)
NEAR_S, FAR_S = 2.0, 20.0
"""A load from the disk, and one from the object store."""
OTHER = ("other", 1)
FOR_ITS_PLACE_S = BETWEEN_S + RELEASE_S
OTHERS_START_S = 0.12
"""A sandbox and an import: it has no model."""


def busy(call_s: float | None = 0.5, running: int = 1, idle_s: float = 0.0) -> View:
    """``chat`` wants to start: its model lies on the disk of a node whose accelerator another function has, and far
    away there is room. ``call_s``: how long calls of that function take."""
    view, _ = function(cluster(node("near", models=(M.digest,)), node("far"), models=(M,)), "chat", M)
    view = idle(function(view, "other")[0], "other", "near", running=running, idle_s=idle_s)
    return view if call_s is None else replace(view, learned=view.learned.called(OTHER, call_s))


def chat(view: View, now: float = NOW) -> Decision:
    return StartupTime().place(request(view, ("chat", 1)), view, now, random.Random(1))


def test_it_waits_for_a_short_call() -> None:
    decision = chat(busy())
    assert isinstance(decision, Wait)
    assert (decision.claims, decision.room) == (("other-on-near-0",), True)
    assert decision.seconds == pytest.approx(0.5 + FOR_ITS_PLACE_S + NEAR_S)
    assert "waits for calls to end on near" in str(decision.reason)


def test_it_waits_for_a_later_end_where_the_first_one_costs_others_too_much() -> None:
    """``dear`` ends first, but whoever calls it next would have it read from the object store."""
    dear = model("dear", 100 * GB)
    nodes = (node("near", gpus=2, models=(M.digest,)), node("far"))
    view = function(cluster(*nodes, models=(M, dear)), "chat", M)[0]
    view = function(function(view, "dear", dear)[0], "other")[0]
    view = idle(idle(view, "dear", "near", 0, running=1), "other", "near", 1, running=1)
    view = replace(view, learned=view.learned.called(("dear", 1), 0.5).called(OTHER, 1.0))
    decision = chat(view)
    assert isinstance(decision, Wait)
    assert decision.claims == ("other-on-near-1",)


@given(st.floats(0.0, 40.0))
def test_it_waits_where_that_is_quicker_and_nowhere_else(call_s: float) -> None:
    """What ends for it starts again some time, and that is counted."""
    decision = chat(busy(call_s))
    if call_s + FOR_ITS_PLACE_S + NEAR_S + OTHERS_START_S < FAR_S:
        assert isinstance(decision, Wait)
    else:
        assert isinstance(decision, Place)
        assert decision.node == "far"


def test_a_call_that_goes_on_is_not_waited_for_much_longer_than_the_start_elsewhere_takes() -> None:
    view, waited = busy(), []
    for later in range(100):
        view = replace(view, listening_since=NOW + later)  # its nodes are heard
        waited.append(isinstance(chat(view, NOW + later), Wait))
    assert 10 < waited.count(True) < FAR_S
    assert waited == sorted(waited, reverse=True)


def test_calls_that_follow_each_other_for_ever_are_not_waited_for_much_longer_either() -> None:
    """One has always ended just now, so that the next end is expected soon."""
    view = busy()
    for later in range(100):
        now = NOW + later
        there = view.instances["other-on-near-0"]
        view = replace(view.put_instance(replace(there, turn_since=now)), listening_since=now)
        decision = chat(view, now)
        if isinstance(decision, Place):
            break
        view = put_off(view, request(view, ("chat", 1)), now)
    assert isinstance(decision, Place)
    assert decision.node == "far"
    assert later == pytest.approx(FAR_S, abs=1.0)


def test_who_has_a_node_kept_for_it_waits_for_no_call() -> None:
    decision = chat(replace(busy(), kept={"far": ("chat", 1)}))
    assert isinstance(decision, Place)
    assert decision.node == "far"


@pytest.mark.parametrize("why", ["unknown", "in demand", "claimed", "wanted", "destination"])
def test_what_is_not_expected_to_become_free_is_not_waited_for(why: str) -> None:
    view = busy(None if why == "unknown" else 0.5)
    if why == "in demand":
        view = view.put_waiting(OTHER, "gw", 1)
    elif why == "claimed":
        view = replace(view, claims={"other-on-near-0": Claim(inf)})
    elif why == "wanted":
        view = replace(view, warm={OTHER: {1: NOW + 60.0}})
    elif why == "destination":
        comes = Migration("gone", "near", MigrationState.MOVING, NOW, destination="other-on-near-0")
        view = replace(view, migrations={"gone": comes})
    assert isinstance(chat(view), Place)


def test_one_that_has_only_just_ended_a_call_is_waited_for() -> None:
    decision = chat(busy(running=0, idle_s=HANDOVER_S / 4))
    assert isinstance(decision, Wait)
    assert decision.seconds == pytest.approx(HANDOVER_S * 0.75 + RELEASE_S + NEAR_S)


def test_what_could_be_ended_now_is_not_waited_for() -> None:
    """Ending who is idle longest costs too much, ending another one would not: it is started elsewhere, at once."""
    slow = model("slow", 4 * GB)
    view, _ = function(cluster(node("near", gpus=2, models=(M.digest,)), node("far"), models=(M, slow)), "chat", M)
    view = idle(function(view, "other", slow)[0], "other", "near", gpu=0, idle_s=100.0)
    view = idle(function(view, "more")[0], "more", "near", gpu=1, idle_s=50.0)
    decision = chat(view)
    assert isinstance(decision, Place)
    assert decision.node == "far"


def test_what_moves_away_does_not_wait() -> None:
    view = busy()
    asked = replace(request(view, ("chat", 1)), patient=False)
    decision = StartupTime().place(asked, view, NOW, random.Random(1))
    assert isinstance(decision, Place)
    assert decision.node == "far"


def test_two_starts_do_not_wait_for_one_place() -> None:
    more = model("more", 2 * GB)
    view, _ = function(cluster(node("near", models=(M.digest, more.digest)), node("far"), models=(M, more)), "chat", M)
    view = idle(function(function(view, "code", more)[0], "other")[0], "other", "near", running=1)
    view = replace(view, learned=view.learned.called(OTHER, 0.5))
    assert isinstance(place(StartupTime(), view, "chat"), Wait)
    assert isinstance(place(StartupTime(), view, "code"), Wait)
    view = view.put_waiting(("chat", 1), "gw", 1).put_waiting(("code", 1), "gw", 1)
    made = plan(view, Context(now=NOW, wall=0.0, policy=StartupTime(), rng=random.Random(1)))
    placed = [each.record.node for each in made.view.instances.values() if each.key != OTHER]
    assert placed == ["far"]
    assert list(made.view.pending) == [("chat", 1)]


def test_who_is_next_waits_for_who_waits_already() -> None:
    """Whoever has claimed a place is expected to serve a call there first."""
    view = busy()
    first = chat(view)
    assert first.seconds is not None
    next_one = chat(replace(view, claims={"other-on-near-0": Claim(NOW + first.seconds + 1.5)}))
    assert isinstance(next_one, Wait)
    assert next_one.claims == ("other-on-near-0",)
    assert next_one.seconds == pytest.approx(first.seconds + 1.5 + NEAR_S)
    assert isinstance(chat(replace(view, claims={"other-on-near-0": Claim(NOW + FAR_S)})), Place)


def test_two_starts_of_which_each_serves_a_short_call_wait_for_one_place() -> None:
    more = model("more", 2 * GB)
    view, _ = function(cluster(node("near", models=(M.digest, more.digest)), node("far"), models=(M, more)), "chat", M)
    view = idle(function(function(view, "code", more)[0], "other")[0], "other", "near", running=1)
    for name in ("other", "chat", "code"):
        view = replace(view, learned=view.learned.called((name, 1), 0.5))
    view = view.put_waiting(("chat", 1), "gw", 1).put_waiting(("code", 1), "gw", 1)
    made = plan(view, Context(now=NOW, wall=0.0, policy=StartupTime(), rng=random.Random(1)))
    assert [each.key for each in made.view.instances.values()] == [OTHER]
    assert list(made.view.pending) == [("chat", 1), ("code", 1)]
    once = 0.5 + FOR_ITS_PLACE_S
    assert made.view.claims["other-on-near-0"].until - NOW == pytest.approx(3 * once + 2 * NEAR_S)


@pytest.mark.parametrize("calls", [1, 2])
def test_what_starts_for_a_short_call_is_waited_for(calls: int) -> None:
    """It has one call to serve, not more."""
    near = node("near", models=(M.digest,), pool_idle=2)
    view, _ = function(cluster(near, node("far"), models=(M,)), "chat", M)
    view, _ = function(view, "other")
    view = replace(view, learned=view.learned.called(OTHER, 0.5)).put_waiting(OTHER, "gw", calls)
    started = replace(view, nodes={"near": view.nodes["near"]})
    starts = plan(started, Context(now=NOW, wall=0.0, policy=StartupTime(), rng=random.Random(1)))
    (starting,) = starts.view.instances.values()
    assert starting.predicted is not None
    decision = chat(replace(starts.view, nodes=view.nodes))
    if calls == 1:
        assert isinstance(decision, Wait)
        assert decision.seconds == pytest.approx(starting.predicted.seconds + 0.5 + FOR_ITS_PLACE_S + NEAR_S)
    else:
        assert isinstance(decision, Place)


def test_several_end_where_one_is_not_enough_and_no_more_than_that() -> None:
    view, _ = function(cluster(node("near", gpus=3, models=(M.digest,)), node("far", gpus=3), models=(M,)), "chat", M)
    view, _ = function(view, "other")
    for gpu in range(3):
        view = idle(view, "other", "near", gpu, running=1)
    view = replace(view, learned=view.learned.called(OTHER, 0.5))
    need = replace(
        request(view, ("chat", 1)), manifest=view.versions["chat", 1].manifest.model_copy(update={"gpu": ["L4:2"]})
    )
    decision = StartupTime().place(need, view, NOW, random.Random(1))
    assert isinstance(decision, Wait)
    assert len(decision.claims) == 2

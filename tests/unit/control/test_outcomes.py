"""Each prediction is kept beside what came."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control import registry
from sllm_runtime.control.events import events
from sllm_runtime.control.explain import explained, started
from sllm_runtime.control.history import History
from sllm_runtime.control.placement import Place
from sllm_runtime.control.plan import Context, _make, plan
from sllm_runtime.control.reports import observe
from sllm_runtime.control.scheduling.startup import StartupTime
from sllm_runtime.control.view import Key, Migration, View
from sllm_runtime.protocol.node import InstanceStatus
from sllm_runtime.protocol.states import InstanceState, MigrationState
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node

CHAT: Key = ("chat", 1)
OTHER: Key = ("other", 1)
M = model("m", 2 * GB)


def planned(view: View, now: float) -> View:
    return plan(view, Context(now=now, wall=0.0, policy=StartupTime(), rng=random.Random(1))).view


def waiting() -> View:
    """``chat`` waits for a short call of ``other``, where its model is, though there is room far away."""
    view, _ = function(cluster(node("near", models=(M.digest,)), node("far"), models=(M,)), "chat", M)
    view = idle(function(view, "other")[0], "other", "near", running=1)
    view = replace(view, learned=view.learned.called(OTHER, 0.5)).put_waiting(CHAT, "gw", 1)
    return planned(view, NOW)


def reported(view: View, now: float, instance: str, key: Key, **fields: object) -> View:
    status = view.nodes["near"].status
    assert status is not None
    said = InstanceStatus(instance=instance, function=key[0], version=key[1], state=InstanceState.READY)
    said = msgspec.structs.replace(said, **fields)
    gpus = tuple(msgspec.structs.replace(gpu, used_by=None) for gpu in status.gpus)
    later = msgspec.structs.replace(status, sequence=status.sequence + 1, instances=(said,), gpus=gpus)
    return observe(view, later, now, 0.0)


def test_what_was_waited_for_stands_beside_what_it_took_in_all() -> None:
    view = waiting()
    known = view.put_off[CHAT].outlook
    assert known is not None
    assert (known.what, known.at) == ("wait", NOW)
    view = planned(view, NOW + 0.25)
    assert view.put_off[CHAT].outlook == known, "the first one is what is kept"
    history = History()
    ended = reported(view, NOW + 0.6, "other-on-near-0", OTHER, state=InstanceState.STOPPED, release_s=0.1)
    history.follow(view, ended, NOW + 0.6)
    placed = planned(ended, NOW + 0.7)
    (made,) = placed.of(CHAT)
    assert (made.record.node, made.outlook) == ("near", known)
    ready = reported(placed, NOW + 2.9, made.record.instance, CHAT)
    history.follow(ended, placed, NOW + 0.7)
    history.follow(placed, ready, NOW + 2.9)
    assert made.predicted is not None
    wait, start = history.outcomes(CHAT)
    assert (wait.what, wait.expected, start.what, start.expected) == (
        "wait",
        known.seconds,
        "start",
        made.predicted.seconds,
    )
    assert [wait.took, start.took] == pytest.approx([2.9, 2.2])
    (release,) = history.outcomes(OTHER)
    assert (release.what, release.expected, release.took) == ("release", 0.2, 0.1)
    told = explained(ready, CHAT, StartupTime(), NOW + 3.0, history.outcomes(CHAT))
    assert [(each.what, each.node) for each in told.outcomes] == [("wait", "near"), ("start", "near")]
    (event,) = [each for each in events(placed, ready, 0.0) if each.kind == "instance.ready"]
    assert (event.fields["decided"], event.fields["decided_took_s"]) == ("wait", "2.900000")
    assert event.fields["decided_expected_s"] == f"{known.seconds:.6f}"
    assert event.fields["took_s"] == "2.200000"


def test_a_start_that_could_not_be_made_at_once_is_explained_by_what_was_decided_then() -> None:
    """When it is placed there is room: nothing tells any more why others waited or ended for it."""
    full, _ = function(cluster(node("near", models=(M.digest,)), models=(M,)), "chat", M)
    full = function(full, "other")[0].put_waiting(CHAT, "gw", 1)
    works, ends = idle(full, "other", "near", running=1), idle(full, "other", "near")
    short = replace(works, learned=works.learned.called(OTHER, 0.5))
    near = "other-on-near-0"
    calls = "waits for calls to end on near, where it would be ready after 2.95 s"
    for before, said, by in (
        (short, f"it had waited for room: {calls} ({near})", "waiting"),
        (ends, f"instances had been ended for it: makes room on near by ending 1 idle instance(s) ({near})", "ending"),
        (works, "it had waited for room for 0.70 s", ""),
    ):
        history, waits = History(), planned(before, NOW)
        history.follow(before, waits, NOW)
        again = planned(waits, NOW + 0.25)
        history.follow(waits, again, NOW + 0.25)
        ended = reported(again, NOW + 0.6, near, OTHER, state=InstanceState.STOPPED, release_s=0.1)
        history.follow(again, ended, NOW + 0.6)
        placed = planned(ended, NOW + 0.7)
        history.follow(ended, placed, NOW + 0.7)
        (made,) = placed.of(CHAT)
        past = history.of(made.record.instance)
        assert past is not None
        told = started(past, StartupTime())
        assert told.decision.startswith("a start on near, expected to take 2.00 s (ssd:")
        assert told.decision.endswith(f"), after {said}")
        (there,) = told.candidates
        assert there.why == "needs 1 x L4 (has none)"
        assert by in {*(way.by for way in there.ways), ""}


def test_where_a_move_goes_to_has_not_waited_for_the_room_that_its_version_waits_for() -> None:
    full, _ = function(cluster(node("near", models=(M.digest,)), models=(M,)), "chat", M)
    before = idle(function(full, "other")[0].put_waiting(CHAT, "gw", 1), "other", "near", running=1)
    history, waits = History(), planned(before, NOW)
    history.follow(before, waits, NOW)
    context = Context(now=NOW + 42.0, wall=0.0, policy=StartupTime(), rng=random.Random(1))
    moving, name = _make(waits, CHAT, Place("near", (0,)), context=context)
    history.follow(waits, moving, NOW + 42.0)
    past = history.of(name)
    assert past is not None
    assert past.now == NOW + 42.0
    assert "waited" not in started(past, StartupTime()).decision


def test_a_start_that_is_made_at_once_waited_for_nothing() -> None:
    view, _ = function(cluster(node("near", models=(M.digest,)), models=(M,)), "chat", M)
    placed = planned(view.put_waiting(CHAT, "gw", 1), NOW)
    (made,) = placed.of(CHAT)
    history = History()
    history.follow(placed, reported(placed, NOW + 2.0, made.record.instance, CHAT), NOW + 2.0)
    assert [each.what for each in history.outcomes(CHAT)] == ["start"]
    assert history.outcomes(CHAT, "another") == []


def test_moves_stand_beside_what_they_took() -> None:
    view = waiting()
    begun = Migration("other-on-near-0", "far", MigrationState.MOVING, NOW, expected=1.5)
    done = replace(begun, state=MigrationState.DONE, ended=NOW + 1.25)
    history = History()
    old = replace(view, migrations={begun.source: begun})
    history.follow(old, replace(view, migrations={begun.source: done}), NOW + 1.25)
    history.follow(replace(view, migrations={begun.source: done}), view, NOW + 99)
    (move,) = history.outcomes(OTHER)
    assert (move.what, move.node, move.expected, move.took) == ("move", "far", 1.5, 1.25)


def test_what_a_function_taught_goes_with_it() -> None:
    """Another one that is deployed under its name, which begins with version 1 too, is not expected to be like it."""
    before = waiting()
    taught = replace(before, learned=before.learned.released(OTHER, 0.5).released(CHAT, 0.25))
    history = History()
    ended = reported(taught, NOW + 0.6, "other-on-near-0", OTHER, state=InstanceState.STOPPED, release_s=0.5)
    history.follow(taught, ended, NOW + 0.6)
    assert [each.what for each in history.outcomes(OTHER)] == ["release"]
    gone = registry.remove(ended, "other")
    history.follow(ended, gone, NOW + 1)
    assert history.outcomes(OTHER) == []
    assert gone.learned.versions() == {CHAT}
    assert set(gone.learned.release) == {CHAT, None}, "of all releases together it is still one"
    late = reported(gone, NOW + 2, "other-on-near-1", OTHER, state=InstanceState.STOPPED, release_s=9.0)
    assert late.learned is gone.learned, "it ended after its function"

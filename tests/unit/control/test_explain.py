"""What people are told of placements."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control.events import events
from sllm_runtime.control.explain import RECORDED, explained, started
from sllm_runtime.control.history import MOST, MOST_REPORTS, History, Past
from sllm_runtime.control.placement import Place
from sllm_runtime.control.plan import Context, plan
from sllm_runtime.control.scheduling.policies import Random
from sllm_runtime.control.scheduling.prediction import Outlook
from sllm_runtime.control.scheduling.startup import StartupTime
from sllm_runtime.control.view import Failure, Migration, Refusal, View
from sllm_runtime.protocol import codec, ctl, subjects
from sllm_runtime.protocol.errors import ErrorBody, FunctionNotFound
from sllm_runtime.protocol.states import InstanceState, MigrationState
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench
from tests.unit.control.bench import manifest as small
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node, place

KEY = ("chat", 1)
M = model("m", 2 * GB)


def view() -> View:
    nodes = (
        node("far"),
        node("near", models=(M.digest,)),
        node("full", resident=(M.digest,)),
        node("small", gpus=0),
        node("closed"),
    )
    made, _ = function(cluster(*nodes, models=(M,)), "chat", M)
    made = idle(function(made, "other")[0], "other", "full", running=1)
    closed = made.nodes["closed"]
    return made.put_node(replace(closed, record=msgspec.structs.replace(closed.record, cordoned=True)))


def test_it_says_since_when_there_is_a_function_of_that_name() -> None:
    made = view()
    oldest = msgspec.structs.replace(made.versions[KEY], created=5.0)
    made = made.put_version(oldest).put_version(msgspec.structs.replace(oldest, version=2, created=7.0))
    assert [explained(made, ("chat", number), StartupTime(), NOW).since for number in (1, 2)] == [5.0, 5.0]


def test_each_node_has_its_estimate_or_what_is_in_the_way() -> None:
    told = explained(view(), KEY, StartupTime(), NOW)
    assert (told.node, told.policy) == ("near", "StartupTime")
    assert told.decision.startswith("a start on near, expected to take 2.00 s (ssd:")
    assert [each.node for each in told.candidates][:2] == ["near", "far"], "the quickest of those that it fits first"
    why = {each.node: each.why for each in told.candidates}
    assert (why["near"], why["far"]) == ("", "")
    assert why["full"] == "needs 1 x L4 (has none)"
    assert why["closed"] == "it is cordoned"
    assert "1 x L4 (has none)" in why["small"]
    seconds = {each.node: each.seconds for each in told.candidates}
    assert seconds["full"] is not None
    assert seconds["full"] < 1.0, "where it does not fit it would be quickest"


def test_what_keeps_it_back_whatever_room_there_is_is_said() -> None:
    failure = Failure(
        ErrorBody(code="start_failed", message="no such module"), 3, at=NOW - 1, until=NOW + 3, blocking=True
    )
    told = explained(view().put_failure(KEY, failure), KEY, StartupTime(), NOW)
    assert (told.node, told.possible) == ("", False)
    assert told.decision == "none for another 3 s, since the last start failed: no such module"
    assert explained(view().put_failure(KEY, failure), KEY, StartupTime(), NOW + 3).node == "near", "that is over"
    made = view()
    most = made.versions[KEY].manifest.max_instances
    for number in range(most):
        made = idle(made, "chat", "near", running=number)
    told = explained(made, KEY, StartupTime(), NOW)
    assert told.decision == f"none: it has as many as it may (max_instances is {most})"
    assert not told.possible


def test_what_the_plan_claimed_for_it_is_not_in_its_way() -> None:
    """It is told what the plan has decided, which is the same each time."""
    made, _ = function(cluster(node("near", models=(M.digest,)), models=(M,)), "chat", M)
    made = idle(function(made, "old")[0], "old", "near").put_waiting(KEY, "gw", 1)
    for words in ("makes room on near by ending 1 idle instance(s)", "waits for instances to end on near"):
        after = plan(made, Context(now=NOW, wall=0.0, policy=StartupTime(), rng=random.Random(1))).view
        assert after.why(KEY) == words
        assert explained(after, KEY, StartupTime(), NOW).decision == "waits for instances to end on near"
        made = after


def test_other_things_in_the_way_are_named() -> None:
    made = view()
    made = replace(made, refused={(KEY, "near"): Refusal(NOW + 1, "no_capacity")}, kept={"far": ("other", 1)})
    told = explained(made, KEY, Random(), NOW)
    why = {each.node: each.why for each in told.candidates}
    assert why["near"] == "it has just refused: no_capacity"
    assert why["far"] == "it is kept for other, which has waited long"
    assert not told.node
    assert "needs 1 x L4" in told.decision
    silent = replace(made, listening_since=0.0)
    assert explained(silent, KEY, Random(), NOW + 100).candidates[0].why == "it is not heard"


def test_starts_stand_beside_what_was_expected_of_them() -> None:
    made = view()
    (other,) = made.of(("other", 1))
    decision = place(StartupTime(), made, "chat")
    assert isinstance(decision, Place)
    begun = replace(other, predicted=decision.estimate, placed=NOW, ready_at=NOW + 0.5)
    (told,) = explained(made.put_instance(begun), ("other", 1), StartupTime(), NOW).starts
    assert told.took == 0.5
    assert told.expected.startswith("2.00 s (ssd:")
    pending = replace(begun, record=msgspec.structs.replace(other.record, instance="new", state=InstanceState.PENDING))
    (event,) = events(made, made.put_instance(pending), 0.0)
    assert (event.kind, event.message) == ("instance.pending", f"expected {told.expected}")


def test_what_making_room_costs_is_told_and_what_is_moved_for_it() -> None:
    """One accelerator with the weights, at work for another function that could go on elsewhere."""
    nodes = (node("full", resident=(M.digest, "o")), node("free", resident=("o",)))
    other = model("o")
    made, _ = function(cluster(*nodes, models=(M, other)), "chat", M)
    made = idle(function(made, "other", other, engine=True, model="/o")[0], "other", "full", running=1, carries=True)
    told = explained(made, KEY, StartupTime(), NOW)
    (way,) = next(each for each in told.candidates if each.node == "full").ways
    assert way.by == "moving"
    assert "by moving other-on-full-0 to free" in way.how
    assert way.seconds is not None
    (planned,) = told.moves
    assert (planned.instance, planned.node, planned.to, planned.state) == (
        "other-on-full-0",
        "full",
        "free",
        "PLANNED",
    )
    assert planned.seconds is not None
    assert way.seconds > planned.seconds
    assert not explained(made, KEY, Random(), NOW).candidates[-1].ways, "what it does not weigh is not told"
    gone = Migration("other-on-full-0", "free", MigrationState.DONE, NOW, ended=NOW + 2, expected=1.5, by=KEY)
    placed = replace(made.of(("other", 1))[0], placed=NOW)
    record = msgspec.structs.replace(placed.record, instance="new", function="chat")
    then = replace(made, migrations={gone.source: gone})
    (moved,) = started(Past(replace(placed, record=record), NOW, then, (gone,)), StartupTime()).moves
    assert (moved.state, moved.seconds, moved.took) == ("DONE", 1.5, 2.0)


@pytest.mark.parametrize("what", ["", "evict", "migrate", "wait"])
def test_a_start_that_was_not_made_at_once_says_what_was_done_for_it(what: str) -> None:
    made = idle(view(), "chat", "near")
    (instance,) = made.of(KEY)
    instance = replace(instance, outlook=Outlook(what, NOW - 1.0, 2.0) if what else None)
    told = started(Past(instance, NOW, made), StartupTime()).decision
    said = {
        "evict": "instances had been ended for it",
        "migrate": "running calls had been moved for it",
        "wait": "it had waited for room",
    }
    assert told == "a start on near" + (f", after {said[what]}" if what else "")


def test_a_record_is_of_few_nodes_those_with_the_weights_first() -> None:
    nodes = [node(f"n{number:02d}") for number in range(40)]
    nodes += [node("zdisk", models=(M.digest,)), node("zmemory", resident=(M.digest,), models=(M.digest,))]
    made, _ = function(cluster(*nodes, models=(M,)), "chat", M)
    made = idle(made, "chat", "n39")
    (instance,) = made.of(KEY)
    told = started(Past(instance, NOW, made), StartupTime(), short=True)
    names = {each.node for each in told.candidates}
    assert len(names) == RECORDED
    assert names >= {"n39", "zdisk", "zmemory"}
    assert len(started(Past(instance, NOW, made), StartupTime()).candidates) == 42


async def recorded(bench: Bench) -> list[ctl.Explained]:
    stream = bench.controller.loop._bus.jetstream
    count = (await stream.stream_info(subjects.DECISIONS_STREAM)).state.messages
    found = [await stream.get_msg(subjects.DECISIONS_STREAM, number + 1) for number in range(count)]
    assert all(each.subject == subjects.decision("chat") for each in found)
    return [codec.unpack(ctl.Explained, each.data or b"") for each in found]


async def test_starts_are_recorded_as_decided_and_with_what_they_took(bench: Bench) -> None:
    async def told(count: int) -> bool:
        return len(await recorded(bench)) == count

    bench.node.behave = lambda command: InstanceState.STARTING
    deploying = asyncio.create_task(bench.gateway.deploy(small()))
    await until(lambda: told(1), what="it was decided")
    (instance,) = bench.live()
    bench.node.put(instance, InstanceState.READY)
    await deploying
    await until(lambda: told(2), what="it is ready")
    first, last = await recorded(bench)
    assert first.decision == last.decision
    assert first.candidates == last.candidates
    assert [each.node for each in last.candidates] == [bench.node.name]
    assert (first.starts[0].instance, first.starts[0].took) == (instance, None)
    assert (last.starts[0].state, last.past) == ("READY", True)
    assert last.starts[0].took is not None
    assert last.starts[0].at > 1e9
    assert ([each.what for each in first.outcomes], [each.what for each in last.outcomes]) == ([], ["start"])


async def test_a_quick_start_is_recorded_once(bench: Bench) -> None:
    await bench.gateway.deploy(small())

    async def told() -> bool:
        return bool(await recorded(bench))

    await until(told, what="it is over")
    (only,) = await recorded(bench)
    assert only.starts[0].took is not None
    assert [each.node for each in only.candidates] == [bench.node.name]


async def test_it_is_asked_for_over_the_bus(bench: Bench) -> None:
    await bench.gateway.deploy(small())
    told: ctl.Explained = await bench.gateway.ask("explain", ctl.Explain(function="chat"))
    assert (told.function, told.version) == ("chat", 1)
    assert [each.node for each in told.candidates] == [bench.node.name]
    (start,) = told.starts
    assert start.seconds is not None
    assert start.took is not None
    with pytest.raises(FunctionNotFound):
        await bench.gateway.ask("explain", ctl.Explain(function="none"))


async def test_a_start_is_explained_by_what_was_known_then(bench: Bench) -> None:
    """Also when its instance has ended, and when everything looks different."""
    await bench.gateway.deploy(small(keep_alive=0))
    (instance,) = bench.live()
    bench.node.put(instance, InstanceState.READY, idle_s=100.0)
    await bench.none_left()
    await bench.gateway.ask("cordon", ctl.Cordon(node=bench.node.name, cordoned=True))
    told: ctl.Explained = await bench.gateway.ask("explain", ctl.Explain(function="chat", instance=instance))
    assert told.past
    (start,) = told.starts
    assert (start.instance, start.state) == (instance, "STOPPED")
    assert start.took is not None
    assert [(each.node, each.why) for each in told.candidates] == [(bench.node.name, "")]
    assert told.candidates[0].seconds == start.seconds
    assert told.decision.startswith(f"a start on {bench.node.name}, expected to take")
    now: ctl.Explained = await bench.gateway.ask("explain", ctl.Explain(function="chat", instance="nobody-knows"))
    assert not now.past
    assert now.candidates[0].why == "it is cordoned"


def test_only_so_many_starts_are_remembered_and_fewer_views() -> None:
    """A view holds on to its nodes' reports."""
    history, made = History(), view()
    (other,) = made.of(("other", 1))
    names = [f"i{number}" for number in range(MOST + 10)]
    for name in names:
        record = msgspec.structs.replace(other.record, instance=name)
        history.follow(made, made.put_instance(replace(other, record=record)), NOW)
    remembered = [past for name in names if (past := history.of(name)) is not None]
    assert [past.instance.record.instance for past in remembered] == names[10:]
    assert all(past.view is made for past in remembered), "five nodes"
    many = replace(made, nodes={f"n{number}": made.nodes["near"] for number in range(MOST_REPORTS // 4)})
    history.follow(
        many, many.put_instance(replace(other, record=msgspec.structs.replace(other.record, instance="z"))), NOW
    )
    views = [past.view for name in [*names, "z"] if (past := history.of(name)) is not None]
    assert sum(view is not None for view in views) == 4
    last = history.of("z")
    assert last is not None
    assert started(last, StartupTime()).past
    forgotten = history.of(names[20])
    assert forgotten is not None
    assert started(forgotten, StartupTime()).candidates == ()

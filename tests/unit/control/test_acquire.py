"""Acquires: one start for all who wait, errors from the back-off record, room made, the dead replaced."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from sllm_runtime.control import loop, placement, plan, service, view
from sllm_runtime.control.lease import Leadership
from sllm_runtime.control.view import View
from sllm_runtime.platform import trace
from sllm_runtime.platform.presence import LEFT_S, LOOK_S
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import (
    ErrorBody,
    FunctionNotFound,
    NoCapacity,
    NoController,
)
from sllm_runtime.protocol.node import Gpu
from sllm_runtime.protocol.records import ProofsRecord, Route
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, Gateway, controller_of, has_events, manifest, stored_events
from tests.unit.control.scripted_node import ScriptedNode

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def cold(bench: Bench, **fields: Any) -> None:
    """A deployed function without an instance."""
    await bench.gateway.deploy(manifest(keep_alive=0, **fields))
    for name in bench.live():
        bench.node.put(name, InstanceState.READY, idle_s=100.0)
    await bench.none_left()
    bench.node.starts.clear()


async def test_many_acquires_make_one_start(bench: Bench, nats: Nats) -> None:
    await cold(bench)
    bench.node.behave = lambda command: InstanceState.STARTING
    other = Gateway(await nats.bus("gw2"))
    asked = [bench.gateway.acquire(waiting=5), other.acquire(waiting=3, gateway="gw2")]
    acquires = [asyncio.create_task(request) for request in asked]
    await until(lambda: bench.node.starts)
    bench.node.put(bench.node.starts[0].instance, InstanceState.READY)
    answers = await asyncio.gather(*acquires)

    assert {answer.route.entries[0].instance for answer in answers if answer.route} == {bench.node.starts[0].instance}
    assert all(answer.route is not None and answer.error is None for answer in answers)
    assert len({command.instance for command in bench.node.starts}) == 1


async def test_a_poll_that_another_one_of_its_gateway_has_taken_over_from_is_answered(bench: Bench, nats: Nats) -> None:
    """A queue that is empty now and then makes another poll each time: some forty of a function were open at once."""
    await cold(bench)
    bench.node.behave = lambda command: InstanceState.STARTING
    other = asyncio.create_task(Gateway(await nats.bus("gw2")).acquire(gateway="gw2", wait_s=service.MAX_WAIT_S / 2))
    polls = [asyncio.create_task(bench.gateway.acquire(waiting=1, wait_s=service.MAX_WAIT_S)) for _ in range(3)]
    await until(lambda: len(bench.controller.loop.view.waiting.get(("chat", 1), {})) == 2, what="both gateways wait")
    await bench.gateway.acquire(waiting=0, wait_s=0.0)
    await asyncio.gather(*polls)
    assert not other.done(), "another gateway's waits on"
    assert bench.controller.loop.view.waiting["chat", 1] == {"gw2": 1}
    await other


async def test_a_leader_without_proof_says_so_to_who_tells_people(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others it has wait: whoever asked them shows nothing meanwhile."""
    await cold(bench)
    monkeypatch.setattr(Leadership, "sure", False)
    waiting = asyncio.create_task(bench.gateway.ask("functions", ctl.Listing()))
    register = bench.gateway.ask("register", ctl.RegisterModel(uri="file:///m"))
    told = await asyncio.gather(bench.gateway.acquire(), register, return_exceptions=True)
    assert not waiting.done()
    monkeypatch.undo()
    for error in told:
        assert isinstance(error, NoController)
        assert "cannot know whether it still leads" in error.message
    assert (await waiting).functions, "once it is sure"
    assert not bench.node.starts
    assert (await bench.gateway.acquire()).route is not None


async def test_a_start_belongs_to_the_trace_of_a_call_that_waits_for_it(bench: Bench) -> None:
    await cold(bench)
    with trace.within(TRACE):
        await bench.gateway.acquire()
    assert bench.node.traces[-1] == TRACE
    assert not bench.controller.loop.traces, "nobody waits any more"


async def test_what_is_told_of_a_start_names_the_call_that_it_is_for(bench: Bench) -> None:
    """Under a subject of its own; what comes of the instance later is not of that call."""
    await cold(bench)
    await bench.gateway.acquire(call="call-1")
    (instance,) = bench.live()
    bench.node.put(instance, InstanceState.READY, idle_s=100.0)
    await bench.none_left()
    await until(lambda: has_events(bench, {"instance.stopped"}), what="the event is stored")
    stream = bench.controller.loop._bus.jetstream
    of_call, _ = subjects.events_of(call="call-1")
    info = await stream.stream_info(subjects.EVENTS_STREAM, subjects_filter=of_call)
    kinds = {subject.split(".")[5] for subject in info.state.subjects or {}}
    assert {"pending", "ready"} <= kinds <= {"pending", "starting", "ready"}
    assert bench.controller.loop.view.callers == {}, "nobody waits any more"


async def test_what_the_self_test_of_one_start_found_is_told_to_the_next(bench: Bench) -> None:
    await cold(bench)
    await bench.gateway.acquire()
    assert not bench.node.starts[-1].proofs
    bench.node.put(bench.node.starts[-1].instance, InstanceState.READY, proof="found", idle_s=100.0)
    await bench.none_left()
    await bench.gateway.acquire()
    assert bench.node.starts[-1].proofs == ("found",)


async def proved(bench: Bench) -> str:
    """A function, an instance of which has told a proof that is stored; its key."""
    await cold(bench)
    await bench.gateway.acquire()
    bench.node.put(bench.node.starts[-1].instance, InstanceState.READY, proof="found", idle_s=100.0)
    key = subjects.proofs_key("chat", 1)
    await until(lambda: bench.stored(key, ProofsRecord), what="it is stored")
    await bench.none_left()
    return key


async def test_the_next_controller_knows_what_self_tests_found(bench: Bench, nats: Nats) -> None:
    await proved(bench)
    async with controller_of(nats, "ctl2") as other:
        assert other.loop.view.learned.proofs == {("chat", 1): ("found",)}


async def test_what_self_tests_found_goes_with_its_version(bench: Bench) -> None:
    key = await proved(bench)
    await bench.gateway.ask("delete", ctl.Delete(function="chat"))

    async def gone() -> bool:
        return await bench.stored(key, ProofsRecord) is None

    await until(gone, what="it has gone")
    assert not bench.controller.loop.view.learned.proofs


async def test_a_cold_start_waits_for_no_tick(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Question, plan, command, report and answer follow from each other; the tick is for what no message says."""
    await cold(bench, max_instances=2)
    monkeypatch.setattr(loop, "TICK_S", 3600.0)
    monkeypatch.setattr(bench.controller.loop, "_may_act", lambda: True)  # else a plan is put off to the next tick
    first = await bench.gateway.acquire()  # the last tick of before may have helped this one
    assert first.route is not None
    (name,) = [entry.instance for entry in first.route.entries]
    bench.node.put(name, InstanceState.READY, running=1)
    second = await bench.gateway.acquire(known=(name,))
    assert second.route is not None
    assert {entry.instance for entry in second.route.entries} - {name}


async def test_a_failed_start_is_answered_from_its_record(bench: Bench) -> None:
    await cold(bench)
    error = ErrorBody(code="function_error", message="ValueError: bad setup", status=500, stage="setup")
    bench.node.behave = lambda command: error

    first = await bench.gateway.acquire()
    again = await bench.gateway.acquire()

    for answer in (first, again):
        assert answer.error is not None
        assert (answer.error.code, answer.error.status, answer.error.stage) == ("start_failed", 503, "setup")
        assert "bad setup" in answer.error.message
        assert answer.error.retry_after_s
    assert len({command.instance for command in bench.node.starts}) == 1
    bench.node.behave = lambda command: InstanceState.READY
    await until(lambda: not _held_back(bench), what="the back-off is over")
    better = await bench.gateway.acquire()
    assert better.route is not None
    assert better.route.entries


def _held_back(bench: Bench) -> bool:
    failure = bench.controller.loop.view.failures.get(("chat", 1))
    return failure is not None and failure.until > time.monotonic()


async def test_a_full_node_is_said_in_words_and_asked_again(bench: Bench) -> None:
    await cold(bench)
    bench.node.refuse = NoCapacity("0 of 8 CPUs are free")
    waiting = await bench.gateway.acquire(wait_s=0.5)
    assert waiting.error is None
    assert "0 of 8 CPUs are free" in waiting.pending
    bench.node.refuse = None
    acquired = await bench.gateway.acquire()
    assert acquired.route is not None
    assert acquired.route.entries


async def test_who_does_not_know_why_it_waits_is_told_at_once(bench: Bench) -> None:
    await cold(bench)
    bench.node.refuse = NoCapacity("0 of 8 CPUs are free")
    told = await bench.gateway.acquire(pending=False)  # of 15 s that it would wait
    assert "0 of 8 CPUs are free" in told.pending
    began = time.monotonic()
    known = await bench.gateway.acquire(wait_s=0.5)
    assert known.pending
    assert time.monotonic() - began >= 0.5, "whoever knows it waits for an instance"


async def test_an_idle_function_makes_room(nats: Nats, node: ScriptedNode) -> None:
    node.gpus = (Gpu(index=0, kind="L4", memory=24 * 2**30),)
    async with controller_of(nats) as controller:
        gateway = Gateway(await nats.bus("gw"))
        await gateway.deploy(manifest("first", gpu="L4"))
        (first,) = controller.loop.view.instances
        node.put(first, InstanceState.READY, idle_s=5.0)
        await gateway.deploy(manifest("second", gpu="l4"))
        assert [stop.instance for stop in node.stops][:1] == [first]
        assert "second" in node.stops[0].reason


async def test_an_instance_a_gateway_cannot_use_is_offered_again_only_after_a_new_report(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    acquired = await bench.gateway.acquire(gone=(name,))
    assert acquired.route is not None
    assert [entry.instance for entry in acquired.route.entries] == [name]
    assert bench.live() == [name]


async def test_a_dead_instance_leaves_the_route_and_the_next_call_starts_another(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    error = ErrorBody(code="instance_lost", message="worker died by SIGKILL", status=502, retryable=True)
    bench.node.put(name, InstanceState.LOST, error=error)
    await bench.none_left()
    await until(lambda: _no_entries(bench), what="the route is empty")
    acquired = await bench.gateway.acquire()
    assert acquired.route is not None
    assert acquired.route.entries[0].instance != name


async def _no_entries(bench: Bench) -> bool:
    route = await bench.stored(subjects.route_key("chat", 1), Route)
    return not route.entries


async def test_a_node_that_was_restarted_has_lost_its_instances(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    bench.node.restart()
    await until(lambda: name not in bench.live())
    acquired = await bench.gateway.acquire()
    assert acquired.route is not None
    assert acquired.route.entries[0].instance != name


async def test_a_silent_node_has_lost_its_instances(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "LOST_AFTER_S", 1.5)
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    bench.node.silent = True
    await until(lambda: name not in bench.live())
    await until(lambda: has_events(bench, {"node.alive", "node.lost", "instance.lost"}), what="the events are stored")
    bench.node.silent = False
    await until(lambda: [s.instance for s in bench.node.stops] == [name], what="the stray is ended")
    assert bench.node.stops[0].resume, "its calls go on elsewhere"


async def test_a_node_that_has_left_nats_has_lost_its_instances_before_its_silence_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (view, placement, plan):
        monkeypatch.setattr(module, "LOST_AFTER_S", 1000.0)
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    await bench.node.leave()
    await until(lambda: name not in bench.live())
    await until(lambda: has_events(bench, {"node.lost", "instance.lost"}), what="the events are stored")
    told = [event.message for event in await stored_events(bench) if event.kind == "instance.lost"]
    assert told == [f"instance {name} is lost: node n1 has left; call again"]
    kinds = [event.kind for event in await stored_events(bench) if event.node == "n1"]
    assert kinds.index("node.lost") < kinds.index("instance.lost"), "what follows from it comes after it"
    asking = asyncio.create_task(bench.gateway.acquire())
    await until(lambda: bench.controller.loop.view.pending, what="nothing can be started there")
    assert len(bench.node.starts) == 1
    await bench.node.join()
    assert (await asking).route is not None
    await until(lambda: name in [stop.instance for stop in bench.node.stops], what="the stray is ended")


async def test_a_node_that_stands_still_has_not_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    overdue = View.overdue

    def asks(found: View, now: float) -> tuple[str, ...]:
        asked.append(overdue(found, now))
        return asked[-1]

    monkeypatch.setattr(view, "LOST_AFTER_S", 1000.0)
    monkeypatch.setattr(View, "overdue", asks)
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    bench.node.silent = True
    await until(lambda: sum("n1" in each for each in asked) > 2 * LEFT_S / LOOK_S, what="it was asked for often enough")
    assert name in bench.live()


async def test_acquire_of_what_is_not_there(bench: Bench) -> None:
    with pytest.raises(FunctionNotFound, match="'nope'"):
        await bench.gateway.acquire("nope")


async def test_scale_out_follows_the_waiting_calls(bench: Bench) -> None:
    await cold(bench, max_instances=3, concurrency=2)
    acquired = await bench.gateway.acquire(waiting=5)
    assert acquired.route is not None
    await until(lambda: len(bench.live()) == 3)


async def test_a_node_cannot_report_for_another_one(bench: Bench, nats: Nats) -> None:
    await bench.gateway.deploy(manifest(keep_alive=60))
    (instance,) = bench.live()
    honest = bench.controller.loop.view.nodes[bench.node.name].status
    assert honest is not None
    liar = await nats.bus("n2")
    forged = msgspec.structs.replace(honest, boot="another life", sequence=1, instances=())
    liar.publish_now(subjects.status("n2"), forged)
    liar.publish_now(subjects.status("n2"), msgspec.structs.replace(forged, node="n2"))
    await until(lambda: "n2" in bench.controller.loop.view.nodes, what="its own report was heard, after the forged one")
    view = bench.controller.loop.view
    assert view.nodes[bench.node.name].status.boot == honest.boot  # type: ignore[union-attr]
    assert view.instances[instance].ready


async def test_a_bug_that_keeps_plans_from_being_made_ends_no_controller(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next leader would meet it as well: what is there is served, and it goes on once the cluster has changed."""
    await cold(bench)
    await bench.gateway.deploy(manifest("there"))

    def broken(*_: object) -> None:
        raise KeyError("chat")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "plan", broken)
        waits = asyncio.create_task(bench.gateway.acquire())
        await until(lambda: "a bug keeps plans" in caplog.text)
        answer = await bench.gateway.acquire("there")
        assert answer.route is not None
        assert not waits.done()
    assert (await waits).route is not None


async def test_a_plan_that_left_somebody_is_followed_by_the_next(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a tick later: so far away is the next plan where nothing changes."""
    monkeypatch.setattr(loop, "TICK_S", 1000.0)
    made = list[bool]()

    def planned(*args: Any) -> plan.Plan:
        found = plan.plan(*args)
        made.append(len(made) < 3)
        return plan.Plan(found.view, found.actions, made[-1])

    monkeypatch.setattr(loop, "plan", planned)
    bench.controller.loop.listening_again()
    await until(lambda: len(made) >= 4)

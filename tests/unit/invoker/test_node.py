"""A real node: workers as processes, the real bus, the real frame protocol; only the workers' code is a script."""

import asyncio
import gc
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from sllm_invoker import instances as invoker_instances
from sllm_invoker.bounds import MAX_TOKENS
from sllm_invoker.instance import Instance
from sllm_invoker.node import Node, sandbox_environment
from sllm_invoker.old_logs import LOGS_BYTES
from sllm_invoker.process_driver import ProcessDriver, ProcessSandbox
from sllm_invoker.sandbox import PLAIN, Wish
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.platform.presence import LEFT_S
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec, limits, subjects
from sllm_runtime.protocol.errors import Conflict, Draining, NoCapacity, StaleTerm
from sllm_runtime.protocol.events import Event
from sllm_runtime.protocol.frames import Cancel, Open
from sllm_runtime.protocol.node import KeepModels, ModelCommand, Ok, PrepareModel, PullModel, StopInstance
from sllm_runtime.protocol.records import ModelRecord, Term
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.worker import KERNELS
from tests.fixtures import invoker as fixtures
from tests.fixtures.invoker import BUNDLE, SCRIPTED, GatewayPeer, NodeUnderTest, node_under_test, order
from tests.fixtures.loaderd import loaderd
from tests.fixtures.nats import GATEWAY_2, NODE, Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S, until


@pytest.fixture
async def node(nats: Nats, tmp_path: Path) -> AsyncIterator[NodeUnderTest]:  # noqa: F811
    async with node_under_test(nats, tmp_path) as under:
        yield under


async def test_a_call_goes_through_a_warm_sandbox_and_its_frames_come_back(node: NodeUnderTest) -> None:
    instance = await node.start("count=500")
    status = node.instance(instance)
    assert status is not None
    assert status.fingerprint == "scripted"
    assert status.capabilities == ("engine:scripted", "batching")
    assert [span.name for span in status.spans] == ["sandbox", "import"]
    opened, call = await node.gateway.open(instance)
    assert opened.status == "accepted"
    assert (await node.gateway.ended(call)).error is None
    assert call.values == [b"%d" % number for number in range(500)]
    await until(lambda: (now := node.instance(instance)) and now.served == 1, what="it has ended")
    status = node.instance(instance)
    assert status is not None
    assert status.running == 0
    assert 0.0 < status.worked_s < GIVE_UP_S


async def test_who_leads_is_obeyed_before_its_first_command(node: NodeUnderTest) -> None:
    """The leader before it may have been stopped, and goes on: it can do nothing here any more."""
    instance = await node.start()
    leads = Term(term=7, controller="next")
    await node.controller.publish(subjects.LEADER, leads)
    await until(lambda: node.statuses[-1].term == 7, what="the node has heard it")
    await node.controller.publish(subjects.LEADER, Term(term=6, controller="old"))
    with pytest.raises(StaleTerm, match="obeys term 7"):
        await node.command("start", order(term=6))
    with pytest.raises(StaleTerm):
        await node.command("stop", StopInstance(term=6, instance=instance, reason="old"))
    assert [one.instance for one in node.statuses[-1].instances] == [instance]
    await node.command("stop", StopInstance(term=7, instance=instance, reason="new"))


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        ("prepare", PrepareModel(term=6, uri="/m", wait_s=0.0)),
        ("pull", PullModel(term=6, model=ModelRecord(digest="sha256:0", uri="/m", nbytes=1, partitions=(1,)))),
        ("keep", KeepModels(term=6, models=())),
        ("model", ModelCommand(term=6, verb="delete", digest="sha256:0", wait_s=0.0)),
    ],
)
async def test_an_older_leader_has_no_say_in_models_either(node: NodeUnderTest, verb: str, message: object) -> None:
    await node.controller.publish(subjects.LEADER, Term(term=7, controller="next"))
    await until(lambda: node.status.term == 7, what="the node has heard it")
    with pytest.raises(StaleTerm, match="obeys term 7"):
        await node.controller.call(subjects.node_command(NODE, verb), message, Ok, timeout_s=GIVE_UP_S)


async def test_it_takes_part_once_it_knows_what_memory_its_loaderd_has(
    nats: Nats,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Both are started side by side; what loaderd may fill up is promised to no instance, from the first report on."""
    late, mib = tmp_path / "late.sock", limits.MIB
    async with loaderd(tmp_path / "loaderd", pool_bytes=512 * mib) as storage:
        asyncio.get_running_loop().call_later(0.5, late.symlink_to, storage.socket)
        async with node_under_test(
            nats, tmp_path, memory=1024 * mib, loaderd_socket=late, loader_wait=GIVE_UP_S
        ) as node:
            first = node.statuses[0]
            assert (first.memory, first.dram_limit) == (512 * mib, 512 * mib)


def _open_files() -> list[str]:
    return [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


async def test_an_instance_that_has_its_bundle_keeps_no_copy_of_it_in_the_nodes_memory(node: NodeUnderTest) -> None:
    """One for each instance, of up to 100 MiB, that nobody counts."""
    await node.start()
    await node.start()
    assert [link for link in _open_files() if link.startswith("/memfd:bundle-")] == []


async def test_the_bundle_comes_as_a_sealed_file_and_no_secret_with_it(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await node.start("env", env={"MINE": "yes"})
    log = node.data / "logs" / "fn.jsonl"
    await until(log.exists, what="its log is written")
    (line,) = (json.loads(text) for text in log.read_text().splitlines() if "bundle" in text)
    facts = json.loads(line["text"])
    assert (line["instance"], line["stream"]) == (instance, "stderr")
    assert facts["bundle"] == BUNDLE.decode()
    assert facts["memory"] == 64 * 2**20
    assert facts["env"]["MINE"] == "yes"
    ours = {key for key in facts["env"] if key.startswith("SLLM_")}
    assert not ours - {"SLLM_NODE", "SLLM_PARENT_PID", KERNELS}, "the last one is taken away by a fork server of ours"


async def test_a_node_removes_what_a_life_before_it_has_left(
    nats: Nats,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Half a bundle, and lines of functions that nobody has told it are gone, where they are too many."""
    half, lines = tmp_path / "node" / "bundles" / ".0123456789abcdef.7", tmp_path / "node" / "logs" / "gone.jsonl"
    for left in (half, lines):
        left.parent.mkdir(parents=True)
        left.touch()
    os.truncate(lines, LOGS_BYTES + 1)
    async with node_under_test(nats, tmp_path):
        assert not half.exists(), "before its first start"
        await until(lambda: not lines.exists(), what="its logs are within their room")


async def told(node: NodeUnderTest) -> list[Event]:
    """The events that are stored, in order."""
    js = node.controller.jetstream
    count = (await js.stream_info(subjects.EVENTS_STREAM)).state.messages
    found = [await js.get_msg(subjects.EVENTS_STREAM, number) for number in range(1, count + 1)]
    return [codec.unpack(Event, message.data or b"") for message in found]


async def kinds(node: NodeUnderTest) -> list[str]:
    return [event.kind for event in await told(node)]


async def test_the_node_tells_of_its_life(node: NodeUnderTest) -> None:
    """By an event with its own right, which says the same life as its reports."""
    await until(partial(told, node), what="an event is stored")
    (event,) = await told(node)
    assert (event.kind, event.component, event.node) == ("node.started", "node", NODE)
    assert node.status.boot in event.message


async def test_a_life_begins_before_anything_of_it_is_told_and_a_namesake_s_is_not_told(
    nats: Nats,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Whatever was before ``node.started`` is of the life before; of one that takes no part there is nothing to say."""
    async with (
        loaderd(tmp_path / "l1") as one,
        loaderd(tmp_path / "l2") as other,
        node_under_test(nats, tmp_path, loaderd_socket=one.socket, loader_wait=GIVE_UP_S) as node,
    ):

        async def both() -> bool:
            return len(await told(node)) >= 2

        await until(both, what="it has told of itself and of its loaderd")
        assert await kinds(node) == ["node.started", "loader.connected"]
        given = InvokerSettings.load(
            nats.env(NODE), node=NODE, data_dir=tmp_path / "2", loaderd_socket=other.socket, loader_wait=GIVE_UP_S
        )
        driver = ProcessDriver(sandbox_environment(os.environ, given), argv=tuple(SCRIPTED), isolate=given.isolate)
        with pytest.raises(Conflict):
            async with asyncio.timeout(GIVE_UP_S):
                await Node(given, await nats.bus(NODE), driver).run(asyncio.Event(), lambda: None)
        assert await kinds(node) == ["node.started", "loader.connected"], "all that the node of this name has done"


async def test_what_it_says_of_its_end_counts_only_what_runs(node: NodeUnderTest) -> None:
    """Not those that have ended, which it remembers for a while."""

    async def told() -> list[str]:
        js = node.controller.jetstream
        count = (await js.stream_info(subjects.EVENTS_STREAM)).state.messages
        found = [await js.get_msg(subjects.EVENTS_STREAM, number) for number in range(1, count + 1)]
        events = [codec.unpack(Event, message.data or b"") for message in found]
        return [event.message for event in events if event.kind == "node.stopping"]

    ended, _stays = await node.start("wait"), await node.start("wait")
    await node.stop(ended)
    await until(lambda: (now := node.instance(ended)) and now.state is InstanceState.STOPPED, what="one has ended")
    node.stopping.set()
    await until(told, what="it says that it ends")
    assert await told() == ["1 instance(s) end"]


async def test_slots_are_judged_by_the_node_and_an_open_is_accepted_once(node: NodeUnderTest) -> None:
    instance = await node.start("wait", concurrency=2)
    (one, first), (two, _second) = [await node.gateway.open(instance) for _ in range(2)]
    assert (one.status, two.status) == ("accepted", "accepted")
    assert (await node.gateway.open(instance))[0].status == "busy"
    again, _ = await node.gateway.open(instance, call=first.head.call)
    assert again.status == "accepted"
    await until(lambda: (now := node.instance(instance)) and now.running == 2, what="two run, not three")
    assert (await node.gateway.open("i-nowhere"))[0].status == "gone"


async def test_an_open_whose_answer_was_lost_does_not_run_the_call_twice(node: NodeUnderTest) -> None:
    instance = await node.start("count=3")
    opened, call = await node.gateway.open(instance)
    await node.gateway.ended(call)
    await until(lambda: call.acked_end, what="the gateway has told that it has all of it")
    await node.gateway.bus.flush()
    again = await node.gateway.ask(Open(head=call.head))
    assert (opened.status, again.status, again.note) == ("accepted", "accepted", "again")


async def test_a_large_body_and_a_large_answer_travel_in_parts_under_credit(node: NodeUnderTest) -> None:
    instance = await node.start("echo")
    body = os.urandom(3 * limits.MIB)
    _, call = await node.gateway.open(instance, body)
    assert (await node.gateway.ended(call, 30.0)).error is None
    assert b"".join(call.values) == body


async def test_lost_messages_cost_no_frame(node: NodeUnderTest) -> None:
    instance = await node.start("count=2000")
    node.gateway.lose = 5
    _, call = await node.gateway.open(instance)
    assert (await node.gateway.ended(call)).error is None
    assert call.values == [b"%d" % number for number in range(2000)]


async def test_the_bus_is_killed_in_mid_stream_and_no_frame_is_lost_or_repeated(
    node: NodeUnderTest,
    nats: Nats,  # noqa: F811
) -> None:
    instance = await node.start("count=6000")
    _, call = await node.gateway.open(instance, credit=8 * 1024)
    await until(lambda: len(call.frames) > 50, what="it streams")
    await nats.kill()
    await nats.start()
    assert (await node.gateway.ended(call, 30.0)).error is None
    assert call.values == [b"%d" % number for number in range(6000)]


async def test_a_cancelled_call_ends_and_frees_its_slot(node: NodeUnderTest) -> None:
    instance = await node.start("wait")
    _, call = await node.gateway.open(instance)
    node.gateway.cancel(call)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "cancelled"
    assert (await node.gateway.open(instance))[0].status == "accepted"


async def test_a_cancel_that_overtakes_its_call_is_not_forgotten(node: NodeUnderTest) -> None:
    instance = await node.start("wait")
    node.gateway.say(Cancel("early", 1))
    await node.gateway.bus.flush()
    await until(lambda: node.gateway.messages, what="the node has said that it does not know it")
    opened, _ = await node.gateway.open(instance, call="early")
    assert opened.status == "busy"


async def test_a_worker_that_dies_ends_its_calls_at_once(node: NodeUnderTest) -> None:
    instance = await node.start("die")
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert call.values == [b"1", b"2", b"3"]
    assert end.error is not None
    assert end.error.code == "instance_lost"
    assert "SIGKILL" in end.error.message
    await node.reaches(instance, InstanceState.LOST)
    await until(lambda: not list((node.data / "work").iterdir()), what="its directory is gone")
    assert (await node.gateway.open(instance))[0].status == "gone"


@pytest.mark.parametrize("script", ["garbage", "foreign", "skip", "flood"])
async def test_a_worker_that_breaks_the_protocol_is_killed_and_its_calls_told(node: NodeUnderTest, script: str) -> None:
    instance = await node.start(script)
    node.gateway.reading = False  # a reader that keeps up gives credit for any flood
    _, call = await node.gateway.open(instance)
    await node.reaches(instance, InstanceState.LOST)
    node.gateway.reading = True
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "protocol_error"


async def test_a_worker_deaf_to_cancel_is_killed(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1.5)
    instance = await node.start("deaf", concurrency=2)
    (_, cancelled), (_, other) = [await node.gateway.open(instance) for _ in range(2)]
    node.gateway.cancel(cancelled, "deadline_exceeded")
    ends = [await node.gateway.ended(call) for call in (cancelled, other)]
    assert [end.error.code for end in ends if end.error] == ["deadline_exceeded", "instance_lost"]
    await node.reaches(instance, InstanceState.LOST)


@pytest.mark.parametrize("short", [False, True])
async def test_a_worker_that_is_silent_is_killed_and_told_so_if_it_is_for_memory(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 2.0)
    monkeypatch.setattr(ProcessSandbox, "short_of_memory", lambda _: short)
    instance = await node.start("freeze")
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "instance_lost"
    assert "no sign of life" in end.error.message
    assert ("ran out of memory (limit " in end.error.message) is short
    await node.reaches(instance, InstanceState.LOST)


async def test_a_gateway_that_acknowledges_nothing_loses_its_call(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1.5)
    instance = await node.start("count=6000")
    node.gateway.reading = False
    await node.gateway.open(instance, credit=4096)
    await until(lambda: (now := node.instance(instance)) and now.running == 1, what="it runs")
    await until(lambda: (now := node.instance(instance)) and now.running == 0, what="it was cancelled")
    status = node.instance(instance)
    assert status is not None
    assert (status.served, status.worked_s) == (0, 0.0), "how long it would have taken nobody knows"


async def test_a_gateway_is_not_silent_while_nats_stands_still(node: NodeUnderTest, nats: Nats) -> None:  # noqa: F811
    instance = await node.start("count=6000")
    node.gateway.reading = False
    _, call = await node.gateway.open(instance, credit=4096)
    await until(lambda: (now := node.instance(instance)) and now.running == 1, what="it runs")
    assert nats.server.child is not None
    with suspended(nats.server.child.pid):
        await asyncio.sleep(limits.LOST_AFTER_S + 2.0)
    node.gateway.reading = True
    assert (await node.gateway.ended(call)).error is None


async def test_a_gateway_that_has_left_nats_loses_its_call_before_its_silence_says_so(
    node: NodeUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    nats: Nats,  # noqa: F811
) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1000.0)
    instance = await node.start("count=6000", concurrency=2)
    other = GatewayPeer(await nats.bus(GATEWAY_2), GATEWAY_2)
    await other.start()
    for gateway in (node.gateway, other):
        gateway.reading = False
        await gateway.open(instance, credit=4096)
    await until(lambda: (now := node.instance(instance)) and now.running == 2, what="both run")
    await other.close()
    await other.bus.close()
    await until(lambda: (now := node.instance(instance)) and now.running == 1, what="that call was cancelled")
    await asyncio.sleep(2 * LEFT_S)
    status = node.instance(instance)
    assert status is not None
    assert status.running == 1, "who acknowledges nothing may stand still"


@pytest.mark.parametrize(
    ("script", "code", "stage", "words"),
    [
        ("fail", "start_failed", "import", "no module named nowhere"),
        ("exit", "start_failed", "import", "exit code 3; its last lines: ValueError: no such luck"),
        ("oom", "out_of_memory", "import", "Raise `memory`"),
        ("hang", "start_timeout", "setup", "not ready within {} s: it hangs in stage setup"),
    ],
)
async def test_a_start_that_fails_says_in_which_stage_and_why(
    node: NodeUnderTest, script: str, code: str, stage: str, words: str
) -> None:
    await until(lambda: node.status.pool_idle, what="a warm sandbox waits, which takes none of that time")
    for patience in (3, 15, 60) if script == "hang" else (60,):
        instance = await node.begin(script, startup_timeout=float(patience))
        status = await node.reaches(instance, InstanceState.FAILED)
        if status.error is not None and status.error.stage == stage:
            break  # where the machine stands still its time may be over before
    assert status.error is not None
    assert (status.error.code, status.error.stage) == (code, stage)
    assert words.format(patience) in status.error.message
    await until(lambda: node.status.free_memory == node.status.memory, what="what it held is free")


class Building(ProcessDriver):
    """Its sandboxes run from what is still being made, as containers do from their image on a node's first start."""

    made = asyncio.Event()

    async def ready(self, wish: Wish = PLAIN) -> None:
        await self.made.wait()
        await super().ready(wish)


class NoOwnImages:
    """Of a function with none of its own nothing is asked."""

    async def ensure(self, image: str | None, requirements: Sequence[str], report: Callable[[str], None]) -> str:
        raise AssertionError


async def test_the_image_of_all_containers_is_made_before_a_start_counts(
    nats: Nats,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Building, "made", asyncio.Event())
    monkeypatch.setattr(fixtures, "ProcessDriver", Building)
    monkeypatch.setattr(fixtures, "Node", partial(Node, images=NoOwnImages()))
    async with node_under_test(nats, tmp_path) as node:
        instance = await node.begin(startup_timeout=3.0)
        await asyncio.sleep(4.0)
        status = node.instance(instance)
        assert status is not None
        assert (status.state, status.error) == (InstanceState.STARTING, None), "the node is not ready, it does not hang"
        Building.made.set()
        await node.reaches(instance, InstanceState.READY)


async def test_commands_are_idempotent_and_of_one_term(node: NodeUnderTest) -> None:
    wanted = order("wait", term=3)
    assert (await node.command("start", wanted)).note == "begun"
    assert (await node.command("start", wanted)).note == "it was begun before"
    with pytest.raises(StaleTerm, match="obeys term 3"):
        await node.command("start", order(term=2))
    await node.reaches(wanted.instance, InstanceState.READY)
    with pytest.raises(NoCapacity, match=r"needs 1024.0 TiB of memory"):
        await node.command("start", order(memory=2**50, term=3))
    assert len(node.status.instances) == 1


async def test_an_instance_that_is_stopped_lets_its_calls_end_first(node: NodeUnderTest) -> None:
    instance = await node.start("count=3000")
    _, call = await node.gateway.open(instance, credit=4 * 1024)
    await node.stop(instance, grace_s=20.0)
    assert (await node.gateway.open(instance))[0].status == "gone"
    assert (await node.gateway.ended(call)).error is None
    assert len(call.values) == 3000
    await node.reaches(instance, InstanceState.STOPPED)


async def test_one_that_is_to_end_sooner_after_all_does(node: NodeUnderTest) -> None:
    instance = await node.start("wait deafstop")
    _, call = await node.gateway.open(instance)
    await node.stop(instance, grace_s=20 * GIVE_UP_S)
    await node.stop(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "cancelled"
    await node.reaches(instance, InstanceState.STOPPED)


async def test_who_is_ended_sooner_after_all_is_told_why_that_is(node: NodeUnderTest) -> None:
    """A function is deleted at once while its instance is being moved: its calls go on nowhere."""
    instance = await node.start("wait deafstop")
    _, call = await node.gateway.open(instance)
    moves = StopInstance(term=1, instance=instance, reason="its calls go on at another", grace_s=20 * GIVE_UP_S)
    await node.command("stop", moves)
    await node.command("stop", StopInstance(term=1, instance=instance, reason="the function is deleted"))
    await node.command("stop", moves)  # repeated, it is behind the other: the earlier end holds
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "cancelled"
    assert end.error.message == f"instance {instance} was stopped: the function is deleted"


@pytest.mark.parametrize("script", ["echo", "wait deafstop"], ids=["idle", "at work"])
async def test_an_instance_has_ended_when_what_it_held_is_free(node: NodeUnderTest, script: str) -> None:
    """Else who waits for that would find a node that is full, and look elsewhere. The report says how long it took."""
    instance = await node.start(script)
    if script != "echo":
        await node.gateway.open(instance)
    began = time.monotonic()
    await node.stop(instance)
    await node.reaches(instance, InstanceState.STOPPED)
    took = time.monotonic() - began
    there = [(status, each) for status in node.statuses for each in status.instances if each.instance == instance]
    for status, each in there:
        ended = each.state is InstanceState.STOPPED
        assert ended == (status.free_memory == status.memory) == (each.release_s is not None)
    release_s = there[-1][1].release_s
    assert release_s is not None
    assert 0.0 < release_s <= took


@pytest.mark.parametrize(("said", "believed"), [(345, 345), (-1, 0), (2**60, MAX_TOKENS)])
async def test_the_report_says_how_many_tokens_a_call_has_while_it_runs(
    node: NodeUnderTest, said: int, believed: int
) -> None:
    """As far as its worker can be believed."""
    instance = await node.start(f"context={said} wait")
    _, call = await node.gateway.open(instance)
    await until(lambda: (now := node.instance(instance)) and now.running, what="it runs")
    await until(lambda: (now := node.instance(instance)) and now.context == believed, what="the report says it")
    node.gateway.cancel(call)
    await until(lambda: (now := node.instance(instance)) and (now.running, now.context) == (0, 0), what="it has ended")


async def test_a_node_that_is_asked_to_stop_lets_what_runs_leave(nats: Nats, tmp_path: Path) -> None:  # noqa: F811
    """It says so and begins nothing more; when the controller has ended what was there, it ends."""
    async with node_under_test(nats, tmp_path, node_drain=GIVE_UP_S) as node:
        instance = await node.start("count=3000")
        _, call = await node.gateway.open(instance, credit=4 * 1024)
        node.stopping.set()
        await until(lambda: node.status.draining, what="it says that it takes no more")
        with pytest.raises(Draining):
            await node.begin()
        await node.stop(instance, grace_s=GIVE_UP_S)
        assert (await node.gateway.ended(call)).error is None
        assert len(call.values) == 3000


async def test_an_instance_that_is_stopped_at_once_cancels_its_calls(node: NodeUnderTest) -> None:
    instance = await node.start("wait deafstop")
    _, call = await node.gateway.open(instance)
    await node.stop(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "cancelled"
    assert "the test is over" in end.error.message
    await node.reaches(instance, InstanceState.STOPPED)


async def test_calls_of_an_instance_that_makes_way_may_go_on_elsewhere(node: NodeUnderTest) -> None:
    instance = await node.start("wait deafstop")
    _, call = await node.gateway.open(instance)
    order = StopInstance(term=1, instance=instance, reason="makes room for chat", resume=True)
    await node.command("stop", order)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "instance_lost", "its gateway goes on with it, as after a crash"
    assert "makes room for chat" in end.error.message
    assert end.stopped, "it is no death that the call may have caused"
    await node.reaches(instance, InstanceState.STOPPED)


async def test_who_loses_a_worker_at_work_is_not_told_of_a_stage_of_its_start(node: NodeUnderTest) -> None:
    """It says so itself: its engine computes no more, or its function has left no memory to hear of calls."""
    instance = await node.start("lost")
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert (end.error.code, end.error.message) == ("instance_lost", "it computes no more")
    assert end.error.stage is None
    await node.reaches(instance, InstanceState.LOST)


async def test_a_worker_that_dies_as_it_drains_was_not_stopped_but_lost(node: NodeUnderTest) -> None:
    instance = await node.start("pace=1000 diestop")
    _, call = await node.gateway.open(instance)
    await until(lambda: call.frames, what="the call runs")
    await node.stop(instance, grace_s=20.0)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "instance_lost"
    assert not end.stopped
    await node.reaches(instance, InstanceState.LOST)


async def test_what_a_worker_starts_does_not_outlive_it(node: NodeUnderTest) -> None:
    """A child that keeps the worker's descriptors open, and one that left its process group."""
    instance = await node.start("fork wait")
    _, call = await node.gateway.open(instance)
    await node.stop(instance)
    await node.gateway.ended(call)
    await node.reaches(instance, InstanceState.STOPPED)
    await node.stop(await node.start("daemon"))


async def test_output_is_rate_limited_and_says_how_much_was_dropped(node: NodeUnderTest) -> None:
    instance = await node.start("shout")
    await node.stop(instance)
    await until(lambda: node.status.free_memory == node.status.memory, what="its pipes were read to their end")
    log = node.data / "logs" / "fn.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [record for record in records if record["stream"] == "stdout"]
    dropped = sum(record.get("dropped", 0) for record in records)
    assert 1000 < len(lines) < 19_000
    assert len(lines) + dropped >= 20_000


async def test_log_lines_name_their_call(node: NodeUnderTest) -> None:
    instance = await node.start("echo")
    _, call = await node.gateway.open(instance, b"1")
    await node.gateway.ended(call)
    log = node.data / "logs" / "fn.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["call"] for record in records if record["text"] == "working"] == [call.head.call]


async def test_many_starts_at_once_all_become_ready(node: NodeUnderTest) -> None:
    instances = [await node.begin("echo") for _ in range(8)]
    for instance in instances:
        await node.reaches(instance, InstanceState.READY)
    ends = []
    for instance in instances:
        _, call = await node.gateway.open(instance, b"[1]")
        ends.append((await node.gateway.ended(call)).error)
    assert ends == [None] * 8
    await asyncio.gather(*(node.stop(instance) for instance in instances))


async def test_what_keeps_it_from_making_sandboxes_is_reported_while_it_lasts(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.status.condition == ""
    with monkeypatch.context() as patched:
        patched.setattr(ProcessDriver, "problem", "the engine hangs")
        await until(lambda: node.status.condition == "the engine hangs", what="the report says so")
    await until(lambda: node.status.condition == "", what="the report says no more")


async def test_what_has_ended_is_told_first_in_that_order(node: NodeUnderTest) -> None:
    """A report that has no room for all leaves out the first."""
    first, second, third = [await node.start() for _ in range(3)]
    for each in (second, first):
        await node.stop(each)
        await node.reaches(each, InstanceState.STOPPED)
    assert [each.instance for each in node.status.instances] == [second, first, third]


async def test_of_two_nodes_of_one_name_the_later_one_ends(
    node: NodeUnderTest,
    nats: Nats,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Both would run each call that either is sent."""
    instance = await node.start()
    first = node.statuses[-1].boot
    given = InvokerSettings.load(
        nats.env(NODE), node=NODE, data_dir=tmp_path / "2", loaderd_socket=tmp_path / "none", loader_wait=0.0
    )
    driver = ProcessDriver(sandbox_environment(os.environ, given), argv=tuple(SCRIPTED), isolate=given.isolate)
    with pytest.raises(Conflict, match=f"another node is there under the name {NODE}.*SLLM_NODE=NAME sllm up --node`"):
        async with asyncio.timeout(GIVE_UP_S):
            await Node(given, await nats.bus(NODE), driver).run(asyncio.Event(), lambda: None)
    heard = len(node.statuses)
    await until(lambda: len(node.statuses) > heard, what="the first one goes on")
    assert {status.boot for status in node.statuses} == {first}, "a report of another life ends all its instances"
    _, call = await node.gateway.open(instance)
    assert (await node.gateway.ended(call)).error is None


async def test_of_one_that_has_ended_nothing_waits_for_the_end_of_its_grace(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody calls is stopped with a grace as long as its calls may take, and ends at once: what it read into
    is a quarter of a MiB, and others start and end meanwhile."""
    monkeypatch.setattr(invoker_instances, "KEEP_FINAL_S", 2.0)
    mine = [await node.start() for _ in range(3)]
    for instance in mine:
        await node.stop(instance, grace_s=3600.0)
        await node.reaches(instance, InstanceState.STOPPED)
    closed = [each for each in gc.get_objects() if isinstance(each, AsyncWire) and each.closed]
    assert sum(len(each._read_into) for each in closed) == 0
    await until(lambda: not node.status.instances, what="they are told no more")
    assert [each for each in gc.get_objects() if isinstance(each, Instance) and each.order.instance in mine] == []

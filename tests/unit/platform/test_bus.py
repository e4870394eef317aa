"""The bus against a real nats-server: requests, order, losses that are told, rights."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from sllm_runtime.platform import connection, outbox, trace
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.nats_server import EmbeddedNats, new_identity
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.streams import BUNDLE_STREAM, ensure_streams
from sllm_runtime.protocol import codec, nats_versions, subjects
from sllm_runtime.protocol.errors import (
    DeadlineExceeded,
    FunctionNotFound,
    InternalError,
    InvalidRequest,
    ProtocolError,
    Unauthorized,
    Unavailable,
)
from sllm_runtime.protocol.limits import MAX_MESSAGE, MIB
from tests.fixtures.nats import CONTROLLER, GATEWAY, GATEWAY_2, NODE, NODE_2, Nats, stored
from tests.fixtures.suspended import suspended
from tests.fixtures.tcp_relay import Relay, relayed
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.platform.test_trace import TRACE


class Ping(msgspec.Struct, frozen=True):
    n: int = 0
    data: bytes = b""


async def _pair(nats: Nats) -> tuple[Bus, Bus]:
    return await nats.bus(GATEWAY), await nats.bus(NODE)


async def test_messages_arrive_typed_and_in_order(nats: Nats) -> None:
    gateway, node = await _pair(nats)
    got: list[tuple[int, str]] = []
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, s: got.append((m.n, s)))
    for n in range(500):
        if n % 2:
            node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n))
        else:
            await node.publish(subjects.frames(GATEWAY, NODE), Ping(n))
    await until(lambda: len(got) == 500)
    assert got == [(n, f"sllm.frames.{GATEWAY}.{NODE}") for n in range(500)]


async def test_publish_now_of_more_than_the_connection_buffers_keeps_the_order(nats: Nats) -> None:
    gateway, node = await _pair(nats)
    got: list[int] = []
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: got.append(m.n))
    for n in range(100):
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n, bytes(200_000)))
    await until(lambda: len(got) == 100)
    assert got == list(range(100))


async def test_a_subscription_that_nobody_waited_for_is_none(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever subscribes is cancelled while the server is asked whether it knows of it."""
    gateway, node = await _pair(nats)
    first: list[int] = []
    second: list[int] = []
    asking, flush = asyncio.Event(), gateway.flush

    async def ask() -> None:
        asking.set()
        await flush()

    assert nats.server.child is not None
    with suspended(nats.server.child.pid), monkeypatch.context() as patch:
        patch.setattr(gateway, "flush", ask)
        subscribing = asyncio.create_task(
            gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: first.append(m.n))
        )
        await asking.wait()
        subscribing.cancel()
        await asyncio.wait([subscribing])
        assert subscribing.cancelled()
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: second.append(m.n))
    node.publish_now(subjects.frames(GATEWAY, NODE), Ping(1))
    await until(lambda: second == [1])
    await gateway.flush()
    assert first == []


async def test_a_failing_handler_and_a_bad_message_do_not_end_the_subscription(nats: Nats) -> None:
    gateway, node = await _pair(nats)
    got: list[int] = []

    def handle(message: Ping, _subject: str) -> None:
        if message.n == 1:
            raise ValueError("one")
        got.append(message.n)

    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, handle)
    node.publish_now(subjects.frames(GATEWAY, NODE), "not a Ping")
    for n in range(3):
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n))
    await until(lambda: got == [0, 2])


async def test_call_returns_the_answer_and_the_typed_error(nats: Nats) -> None:
    gateway, controller = await nats.bus(GATEWAY), await nats.bus(CONTROLLER)

    async def answer(request: Ping) -> Ping:
        if request.n == 1:
            raise FunctionNotFound("there is no function x", field="function")
        if request.n == 2:
            raise ZeroDivisionError("by zero")
        if request.n == 3:
            return Ping(3, bytes(MAX_MESSAGE))
        return Ping(request.n + 1)

    serving = await controller.serve(subjects.ctl("ping"), Ping, answer, queue="some")
    await controller.flush()
    assert await gateway.call(subjects.ctl("ping"), Ping(7), Ping, timeout_s=GIVE_UP_S) == Ping(8)
    with pytest.raises(FunctionNotFound) as caught:
        await gateway.call(subjects.ctl("ping"), Ping(1), Ping, timeout_s=GIVE_UP_S)
    assert caught.value.field == "function"
    with pytest.raises(InternalError, match="by zero"):
        await gateway.call(subjects.ctl("ping"), Ping(2), Ping, timeout_s=GIVE_UP_S)
    with pytest.raises(InternalError, match="above the limit"):
        await gateway.call(subjects.ctl("ping"), Ping(3), Ping, timeout_s=GIVE_UP_S)
    await serving.unsubscribe()
    await controller.flush()
    with pytest.raises(Unavailable, match="nobody serves"):
        await gateway.call(subjects.ctl("ping"), Ping(), Ping, timeout_s=GIVE_UP_S)


@pytest.mark.parametrize("directly", [True, False])
async def test_the_trace_of_a_question_is_its_answers(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, directly: bool
) -> None:
    """Also of one that waits for the connection. What is asked outside of any has none."""
    controller, gateway = await nats.bus(CONTROLLER), await nats.bus(GATEWAY)
    seen: list[str] = []

    async def answer(ping: Ping) -> Ping:
        seen.append(trace.current())
        return ping

    await controller.serve(subjects.ctl("ping"), Ping, answer)
    if not directly:
        monkeypatch.setattr(gateway._client, "publish_now", lambda *_: False)
    with trace.within(TRACE):
        assert await gateway.call(subjects.ctl("ping"), Ping(1, b"x" * 1000), Ping) == Ping(1, b"x" * 1000)
    await gateway.call(subjects.ctl("ping"), Ping(2), Ping)
    assert seen == [TRACE, ""]


async def test_requests_run_side_by_side_up_to_the_limit_then_are_refused(nats: Nats) -> None:
    gateway, controller = await nats.bus(GATEWAY), await nats.bus(CONTROLLER)
    go, running = asyncio.Event(), 0

    async def answer(request: Ping) -> Ping:
        nonlocal running
        running += 1
        await go.wait()
        return request

    await controller.serve(subjects.ctl("ping"), Ping, answer, concurrency=3)
    calls = [
        asyncio.ensure_future(gateway.call(subjects.ctl("ping"), Ping(n), Ping, timeout_s=GIVE_UP_S)) for n in range(3)
    ]
    await until(lambda: running == 3)
    with pytest.raises(Unavailable, match="3 requests"):
        await gateway.call(subjects.ctl("ping"), Ping(3), Ping, timeout_s=GIVE_UP_S)
    go.set()
    assert await asyncio.gather(*calls) == [Ping(0), Ping(1), Ping(2)]


async def test_no_answer_in_time_is_deadline_exceeded_and_the_handler_is_ended_with_the_bus(nats: Nats) -> None:
    gateway, controller = await nats.bus(GATEWAY), await nats.bus(CONTROLLER)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def answer(request: Ping) -> Ping:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return request

    await controller.serve(subjects.ctl("ping"), Ping, answer)
    with pytest.raises(DeadlineExceeded):
        await gateway.call(subjects.ctl("ping"), Ping(), Ping, timeout_s=0.2)
    await asyncio.wait_for(begun.wait(), GIVE_UP_S)
    await controller.close()
    assert ended.is_set()


async def test_what_nobody_could_hear_is_not_put_down_to_who_was_asked(nats: Nats) -> None:
    gateway = await nats.bus(GATEWAY)
    await nats.kill()
    await until(lambda: not gateway.connected)
    with pytest.raises(DeadlineExceeded, match="NATS is not connected"):
        await gateway.call(subjects.ctl("ping"), Ping(), Ping, timeout_s=0.1)
    await nats.start()
    await until(lambda: gateway.connected)


async def test_who_serves_no_longer_ends_what_is_being_answered(nats: Nats) -> None:
    gateway, controller = await nats.bus(GATEWAY), await nats.bus(CONTROLLER)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def answer(request: Ping) -> Ping:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return request

    serving = await controller.serve(subjects.ctl("ping"), Ping, answer)
    asking = asyncio.create_task(gateway.call(subjects.ctl("ping"), Ping(), Ping, timeout_s=GIVE_UP_S))
    await asyncio.wait_for(begun.wait(), GIVE_UP_S)
    await serving.unsubscribe()
    assert ended.is_set()
    asking.cancel()
    await asyncio.wait({asking})


async def test_a_request_without_a_place_for_its_answer_is_not_answered(nats: Nats) -> None:
    """NATS ends the connection of who publishes to nowhere."""
    gateway, controller = await nats.bus(GATEWAY), await nats.bus(CONTROLLER)
    told, asked = list[str](), list[int]()

    async def answer(request: Ping) -> Ping:
        asked.append(request.n)
        return request

    controller.on_disconnect(lambda: told.append("gone"))
    await controller.serve(subjects.ctl("ping"), Ping, answer)
    gateway.publish_now(subjects.ctl("ping"), Ping(1))
    await until(lambda: asked == [1])
    assert await gateway.call(subjects.ctl("ping"), Ping(2), Ping, timeout_s=GIVE_UP_S) == Ping(2)
    await controller.flush()
    assert told == []


async def test_too_large_a_message_is_refused_at_once(nats: Nats) -> None:
    node = await nats.bus(NODE)
    with pytest.raises(ProtocolError, match="above the limit"):
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(0, bytes(MAX_MESSAGE)))


async def test_after_a_kill_of_the_server_everything_works_again_and_is_told(nats: Nats) -> None:
    gateway, node = await _pair(nats)
    got: list[int] = []
    told: list[str] = []
    gateway.on_disconnect(lambda: told.append("gone"))
    off = gateway.on_reconnect(lambda: told.append("again"))
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: got.append(m.n))
    await nats.kill()
    await until(lambda: told == ["gone"])
    assert not gateway.connected
    await nats.start()
    await until(lambda: told == ["gone", "again"] and node.connected)
    node.publish_now(subjects.frames(GATEWAY, NODE), Ping(1))
    await until(lambda: got == [1])
    off()


def _publish(bus: Bus, numbers: range, data: bytes) -> None:
    for n in numbers:
        bus.publish_now(subjects.frames(GATEWAY, NODE), Ping(n, data))


async def test_publishing_while_the_server_is_away_is_bounded_and_nothing_is_repeated(nats: Nats) -> None:
    gateway, node = await _pair(nats)
    got: list[int] = []
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: got.append(m.n))
    await nats.kill()
    await until(lambda: not node.connected and not gateway.connected)
    for n in range(10):
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n))
    with pytest.raises(Unavailable, match="NATS takes nothing"):
        _publish(node, range(10, 1000), bytes(400_000))
    await nats.start()
    # Whose turn to reconnect comes first is chance: what was kept is heard or not, but in order and once.
    await until(lambda: node.connected and gateway.connected)
    await gateway.flush()
    node.publish_now(subjects.frames(GATEWAY, NODE), Ping(1000))
    await until(lambda: bool(got) and got[-1] == 1000)
    assert got == sorted(set(got))


async def test_a_slow_subscriber_is_told_once_it_has_caught_up(nats: Nats) -> None:
    gateway, node = await _pair(nats)
    go, got, told = asyncio.Event(), [], asyncio.Event()

    async def handle(message: Ping, _subject: str) -> None:
        await go.wait()
        got.append(message.n)

    gateway.on_reconnect(told.set)
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, handle, pending_messages=10)
    for n in range(100):
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n))
    await node.flush()
    await gateway.flush()
    assert not told.is_set()
    go.set()
    await asyncio.wait_for(told.wait(), GIVE_UP_S)
    # What fitted is heard. The handler's first step frees one place more; what arrives just then has it, by chance.
    assert got[:10] == list(range(10))
    assert got == sorted(set(got))
    assert len(got) <= 11


async def test_a_slow_subscriber_is_not_told_before_it_has_caught_up(nats: Nats) -> None:
    gateway, node = await _pair(nats)
    go, got, told = asyncio.Semaphore(0), list[int](), list[int]()

    async def handle(message: Ping, _subject: str) -> None:
        await go.acquire()
        got.append(message.n)

    gateway.on_reconnect(lambda: told.append(len(got)))
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, handle, pending_messages=10)
    for n in range(100):
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n))
    await node.flush()
    await gateway.flush()
    while not told:  # one after another
        handled = len(got)
        go.release()
        await until(lambda: told or len(got) > handled)  # noqa: B023
    assert told == [len(got)]
    assert len(got) >= 10


async def _filled(node: Bus, begin: int) -> int:
    """Publish from that number on until much waits in front of nats-py's buffer, which is full. The next number."""
    number = begin
    while node.free or number < begin + 140:
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(number, bytes(200_000)))
        number += 1
    for _ in range(20):  # turns of what hands it over
        await asyncio.sleep(0)
    assert node._outbox._waiting
    return number


async def test_what_waits_goes_first_and_gives_its_room_back(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is published, and each time that the server takes nothing for a while."""
    monkeypatch.setattr(outbox, "_MOST", 32 * MIB)
    gateway, node = await _pair(nats)
    got: list[int] = []
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: got.append(m.n))
    assert nats.server.child is not None
    number = 0
    for _ in range(3):
        with suspended(nats.server.child.pid):
            number = await _filled(node, number)
            publishing = asyncio.create_task(node.publish(subjects.frames(GATEWAY, NODE), Ping(number)))
            await asyncio.sleep(0)
            flushing = asyncio.create_task(node.flush())
            await asyncio.sleep(0)
            number += 1
        while node._outbox._waiting:
            node.publish_now(subjects.frames(GATEWAY, NODE), Ping(number))
            number += 1
            await asyncio.sleep(0)
        await publishing
        await flushing
        await until(lambda: len(got) == number)  # noqa: B023
    assert got == list(range(number))


async def test_a_flush_of_what_is_not_taken_says_so(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await nats.bus(NODE)
    assert nats.server.child is not None
    with suspended(nats.server.child.pid):
        await _filled(node, 0)
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "RPC_TIMEOUT_S", 0.1)
            with pytest.raises(Unavailable, match="messages wait"):
                await node.flush()
    await node.flush()


async def test_what_finds_no_room_while_the_server_is_away_is_not_kept_for_later(nats: Nats) -> None:
    node = await nats.bus(NODE)
    await nats.kill()
    await until(lambda: not node.connected)
    _publish(node, range(100), bytes(200_000))
    await until(lambda: not node._outbox._waiting)
    assert node._outbox.lost > 0
    await nats.start()
    await until(lambda: node.connected)


async def test_what_has_ended_leaves_nothing_behind(nats: Nats) -> None:
    """Each reader of a stream subscribes, and each poll is a question: a gateway has many in its life."""
    gateway, node = await _pair(nats)

    async def never(request: Ping) -> Ping:
        await asyncio.Event().wait()
        return request

    listeners = dict(gateway._client._listeners)
    for subscribing in (
        gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda *_: None),
        gateway.listen(subjects.frames(GATEWAY, NODE), lambda *_: None),
    ):
        await (await subscribing).unsubscribe()
    assert not gateway._subscriptions
    assert gateway._client._listeners == listeners
    subject = subjects.node_open(NODE, GATEWAY)
    with pytest.raises(Unavailable):
        await gateway.call(subject, Ping(), Ping, timeout_s=GIVE_UP_S)
    served = await node.serve(subject, Ping, never)
    with pytest.raises(DeadlineExceeded):
        await gateway.call(subject, Ping(), Ping, timeout_s=0.1)
    asking = asyncio.create_task(gateway.call(subject, Ping(), Ping, timeout_s=GIVE_UP_S))
    await until(lambda: gateway._questions._waiting)
    asking.cancel()
    await asyncio.wait({asking})
    assert not gateway._questions._waiting
    await served.unsubscribe()


# --- who may what ---------------------------------------------------------------------------------
async def test_a_directory_of_any_name(tmp_path: Path) -> None:
    directory = tmp_path / 'a "quoted" \\ $name with spaces, é and 模'
    server = EmbeddedNats(directory=directory, identities=(new_identity("controller", "ctl"),))
    server.prepare()
    try:
        await server.start()
        assert (directory / "jetstream").is_dir()
    finally:
        await server.stop()


async def test_no_access_without_or_with_a_wrong_password(nats: Nats) -> None:
    plain = Settings.load({"SLLM_NATS_URL": nats.url})
    with pytest.raises(Unauthorized, match="refuses n1"):
        await Bus.connect(plain, NODE, name="test")
    with pytest.raises(InvalidRequest, match="is for n1"):
        await Bus.connect(nats.settings(NODE), NODE_2, name="test")


async def test_a_server_whose_rights_do_not_hold_is_named(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await nats.bus(CONTROLLER)
    assert "CVE" not in caplog.text
    monkeypatch.setattr(nats_versions, "_HOLES", (((2, 0, 0), (99, 0, 0)),))
    await nats.bus(GATEWAY)
    assert f"at {nats.url}: it sends traces to whatever subject a message names" in caplog.text


async def _denied(bus: Bus, listener: Bus, subject: str) -> bool:
    """Whether what ``bus`` publishes to ``subject`` fails to reach the right listener there."""
    got: list[object] = []
    subscription = await listener.subscribe(subject, Ping, lambda m, _: got.append(m))
    await listener.flush()
    bus.publish_now(subject, Ping())
    await bus.flush()
    await listener.flush()
    await subscription.unsubscribe()
    return not got


async def test_a_node_speaks_only_for_itself(nats: Nats) -> None:
    gateway, node, controller = await nats.bus(GATEWAY), await nats.bus(NODE), await nats.bus(CONTROLLER)
    assert not await _denied(node, gateway, subjects.frames(GATEWAY, NODE))
    assert await _denied(node, gateway, subjects.frames(GATEWAY, NODE_2))
    assert not await _denied(node, controller, subjects.status(NODE))
    assert await _denied(node, controller, subjects.status(NODE_2))
    assert await _denied(node, controller, subjects.ctl("delete"))
    other = await nats.bus(NODE_2)
    assert await _denied(node, other, subjects.node_command(NODE_2, "stop"))
    assert await _denied(node, other, subjects.node_open(NODE_2, GATEWAY))


async def test_a_gateway_speaks_only_for_itself_and_cannot_command_nodes(nats: Nats) -> None:
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    assert not await _denied(gateway, node, subjects.node_calls(NODE, GATEWAY))
    assert await _denied(gateway, node, subjects.node_calls(NODE, GATEWAY_2))
    assert await _denied(gateway, node, subjects.node_command(NODE, "stop"))


@pytest.mark.parametrize(
    "subject",
    [
        f"{subjects.inbox('gateway', GATEWAY)}.>",
        subjects.frames(GATEWAY, NODE),
        subjects.node_command(NODE_2, "start"),
        "sllm.>",
        ">",
    ],
)
async def test_a_node_hears_nothing_that_is_not_for_it(nats: Nats, subject: str) -> None:
    gateway, node, other = await nats.bus(GATEWAY), await nats.bus(NODE), await nats.bus(NODE_2)
    controller = await nats.bus(CONTROLLER)
    heard: list[str] = []
    await node.subscribe(subject, Ping, lambda _, s: heard.append(s))

    async def answer(request: Ping) -> Ping:
        return request

    await other.serve(subjects.node_command(NODE_2, "start"), Ping, answer)
    await other.serve(subjects.node_open(NODE_2, GATEWAY), Ping, answer)
    await controller.call(subjects.node_command(NODE_2, "start"), Ping(), Ping, timeout_s=GIVE_UP_S)
    await gateway.call(subjects.node_open(NODE_2, GATEWAY), Ping(), Ping, timeout_s=GIVE_UP_S)
    other.publish_now(subjects.frames(GATEWAY, NODE_2), Ping())
    await other.flush()
    await node.flush()
    assert heard == []


async def test_logs_of_a_node_are_kept_and_read_by_a_gateway(nats: Nats) -> None:
    controller, gateway, node = await nats.streams(), await nats.bus(GATEWAY), await nats.bus(NODE)
    await ensure_streams(controller)
    for n in range(3):
        node.publish_now(subjects.logs(NODE, "chat"), Ping(n))
        node.publish_now(subjects.logs(NODE, "other"), Ping(n))
        node.publish_now(subjects.events_by("node", NODE), Ping(n))
    await node.flush()
    reading = await gateway.jetstream.subscribe(
        subjects.logs_of("chat"), stream=subjects.LOGS_STREAM, ordered_consumer=True
    )
    lines = [codec.unpack(Ping, (await reading.next_msg(GIVE_UP_S)).data).n for _ in range(3)]
    assert lines == [0, 1, 2]
    await reading.unsubscribe()
    await stored(controller, subjects.EVENTS_STREAM, subjects.events_by("node", NODE), 3)
    info = await controller.jetstream.stream_info(subjects.EVENTS_STREAM)
    assert info.state.messages == 3


async def test_a_node_has_no_answer_sent_to_where_it_may_not_speak(nats: Nats) -> None:
    """NATS sends what is asked for to whatever subject the question names, without a look at who asks."""
    controller, node, other = await nats.bus(CONTROLLER), await nats.bus(NODE), await nats.bus(NODE_2)
    await ensure_streams(controller)
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    to = subjects.node_command(NODE_2, "stop")
    await other.subscribe_raw(to, hear)
    await other.flush()
    await node.jetstream._nc.publish(f"$JS.API.DIRECT.GET.OBJ_{subjects.BUNDLES}", b"", reply=to)
    await node.jetstream._nc.publish(subjects.status(NODE), b"", headers={"Nats-Trace-Dest": to})
    await node.flush()
    with pytest.raises(NotFoundError):  # JetStream has answered what came after it
        await controller.jetstream.get_last_msg(BUNDLE_STREAM, "none", direct=True)
    await other.flush()
    assert heard == []


@contextlib.asynccontextmanager
async def behind_a_relay(nats: Nats, identity: str) -> AsyncIterator[tuple[Bus, Relay, asyncio.Event]]:
    """A bus that is connected through one, and what is set when it is connected anew."""
    async with relayed(nats.server.port) as relay:
        env = {**nats.env(identity), "SLLM_NATS_URL": f"nats://127.0.0.1:{relay.port}"}
        bus, back = await Bus.connect(Settings.load(env), identity, name=f"test {identity}"), asyncio.Event()
        bus.on_reconnect(back.set)
        try:
            yield bus, relay, back
        finally:
            await bus.close()


async def test_what_a_silent_connection_has_not_taken_keeps_nobody_from_a_new_one(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link drops all that is on it, and no end comes: what was written waits in the connection, which the kernel
    goes on with for a quarter of an hour. The server can be reached again long before, or another one can."""
    monkeypatch.setattr(connection, "_PING_S", 0.2)
    gateway = await nats.bus(GATEWAY)
    got: list[int] = []
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: got.append(m.n))
    async with behind_a_relay(nats, NODE) as (node, relay, back):
        relay.silence()
        for n in range(100):  # a node that streams: more than the kernel's buffers take
            node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n, bytes(200_000)))
        await until(back.is_set, what="it is connected anew")
        node.publish_now(subjects.frames(GATEWAY, NODE), Ping(1000))
        await until(lambda: 1000 in got)


async def test_a_link_that_loses_large_packets_is_left_and_named(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection is made, and small messages pass: of the first large one no packet arrives, nor of what comes
    behind."""
    monkeypatch.setattr(connection, "_PING_S", 0.2)
    gateway = await nats.bus(GATEWAY)
    got: list[int] = []
    await gateway.subscribe(subjects.frames(GATEWAY, NODE), Ping, lambda m, _: got.append(m.n))
    async with behind_a_relay(nats, NODE) as (node, relay, back):
        relay.most = 4096
        for n in (1, 2):
            assert "MTU" not in caplog.text
            back.clear()
            node.publish_now(subjects.frames(GATEWAY, NODE), Ping(-n, bytes(200_000)))
            await until(back.is_set, what="it is connected anew")
            node.publish_now(subjects.frames(GATEWAY, NODE), Ping(n))
            await until(lambda n=n: got[-1:] == [n])  # type: ignore[misc]
    assert "NATS is gone (nats: stale connection)" in caplog.text
    assert "MTU" in caplog.text


async def test_the_server_gives_up_a_connection_that_went_silent(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gateway that has come back by another connection the one before is asked for bundles as well, in its turn,
    and nobody hears that: not for longer than the gateway itself took to find out."""
    monkeypatch.setattr(connection, "_PING_S", 0.2)
    node = await nats.bus(NODE)

    async def answer(asked: Ping) -> Ping:
        return asked

    async def whole() -> bool:
        """Whether each question is answered."""
        asking = (node.call(subjects.read_bundle(NODE), Ping(n), Ping, timeout_s=1.0) for n in range(32))
        found = await asyncio.gather(*asking, return_exceptions=True)
        return not any(isinstance(each, DeadlineExceeded) for each in found)

    async with behind_a_relay(nats, GATEWAY) as (gateway, relay, back):
        await gateway.serve(subjects.READ_BUNDLES, Ping, answer, queue="bundles", to_asker=True)
        assert await whole()
        relay.silence()
        await until(back.is_set, what="it is connected anew")
        await gateway.flush()
        await until(whole, 60, what="each question is answered")  # after four minutes and more it would be

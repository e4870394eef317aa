"""What is left at NATS of those who have asked for events and logs: nothing."""

import asyncio
import itertools
import json
import time
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from sllm.sse import Event as SseEvent
from sllm.sse import Parser
from sllm_gateway import follow, views
from sllm_gateway.follow import messages
from sllm_gateway.written import line_of
from sllm_runtime.platform import owned, reader
from sllm_runtime.platform.bus import Bus, Handler, Subscription
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.consumers import HEARTBEAT_S, ask
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.events import Event, LogRecord
from sllm_runtime.protocol.http import API, LogView
from sllm_runtime.protocol.limits import KIB, MIB
from tests.fixtures.nats import CONTROLLER, GATEWAY, NODE, Nats, stored
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import World, world
from tests.unit.gateway.test_api import events

OF_NODE = f"{subjects.events_by('node', NODE)}.>"
"""Subjects of what the node tells."""


async def left(nats: Nats) -> int:
    """Consumers of the stream with events."""
    info = await (await nats.bus(CONTROLLER)).jetstream.stream_info(subjects.EVENTS_STREAM)
    return info.state.consumer_count


async def test_fifty_questions_for_events_leave_no_consumer(nats: Nats) -> None:
    async with world(nats) as w:
        event = Event(kind="instance.ready", at=1.0, component="node", function="f")
        w.node.bus.publish_now(subjects.events_by("node", NODE), event)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, subjects.events_by("node", NODE), 1)
        before = await left(nats)
        for _ in range(50):
            assert "instance.ready" in (await w.http.get(f"{API}/events", params={"function": "f"})).text
        await w.gateway._bus.flush()
        assert await left(nats) == before


async def test_of_a_whole_stream_no_more_is_read_than_is_shown(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sllm_gateway.routes.logs.AT_FIRST", 4)
    async with world(nats) as w:
        for at in range(20):
            event = Event(kind="instance.ready", at=float(at), component="node", function="f")
            w.node.bus.publish_now(subjects.event("node", NODE, event.kind, "f"), event)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, 20)
        read = list[bytes]()
        unpack = codec.unpack

        def noted(kind: Any, data: bytes) -> Any:
            if kind is Event:
                read.append(data)
            return unpack(kind, data)

        monkeypatch.setattr(codec, "unpack", noted)
        for more, most in (({}, 3), ({"function": "f"}, 4), ({"since": "0"}, 21)):
            read.clear()
            text = (await w.http.get(f"{API}/events", params={"limit": "3", **more})).text
            assert [json.loads(each.data)["at"] for each in events(text) if each.event == "event"] == [17.0, 18.0, 19.0]
            assert 3 <= len(read) <= most
        assert (await w.http.get(f"{API}/events", params={"limit": "0"})).text.count("event: event") == 0


async def test_readers_that_are_cancelled_leave_none(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while their consumer is being made."""
    monkeypatch.setattr(owned, "_AGAIN_S", 0.1)  # some swallow a cancellation; when they hear of it again is no matter
    async with world(nats) as w:
        bus = w.gateway._bus
        before = await left(nats)

        async def read() -> None:
            async with aclosing(messages(bus, subjects.EVENTS_STREAM, subjects.EVENTS_ALL, None)) as found:
                async for _ in found:
                    pass

        for turns in (0, 1, 2, 3, 5, 10, 20, 40):
            reading = asyncio.create_task(read())
            for _ in range(turns):
                await asyncio.sleep(0)
            await end([reading])
            await bus.flush()
            assert await left(nats) == before, f"after {turns} turns"


@pytest.mark.parametrize(("step", "unanswered", "answered"), [(1.0, 9, True), (ELECTION_S / 2, 3, False)])
async def test_a_beginning_is_asked_for_again_for_as_long_as_an_election_takes(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, step: float, unanswered: int, answered: bool
) -> None:
    """``step``: seconds between two looks at the clock."""
    monkeypatch.setattr(follow, "AGAIN_S", 0.0)
    async with world(nats) as w:
        bus, ticks, refused = w.controller.bus, itertools.count(step=step), 0
        ask = bus.jetstream.add_consumer

        async def add_consumer(*args: Any) -> Any:
            nonlocal refused
            if refused < unanswered:
                refused += 1
                raise nats_errors.TimeoutError
            return await ask(*args)

        monkeypatch.setattr(bus.jetstream, "add_consumer", add_consumer)
        nothing = subjects.events_by("node", "none")
        reading = messages(bus, subjects.EVENTS_STREAM, nothing, None, lambda: next(ticks))
        if answered:
            assert (await anext(reading)).data is None
        else:
            with pytest.raises(Unavailable, match="timeout"):
                await anext(reading)
        assert refused == unanswered
        await reading.aclose()


async def test_who_follows_is_told_where_the_stream_stands(nats: Nats) -> None:
    """Also where nothing of it is wanted: who reads on from there misses nothing."""
    async with world(nats) as w:
        for function in ("f", "g"):
            _happens(w, function, 1.0)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, subjects.EVENTS_ALL, 3)  # and that the gateway is there
        last = (await w.controller.bus.jetstream.stream_info(subjects.EVENTS_STREAM)).state.last_seq
        query = {"follow": "true", "function": "f", "limit": "0"}
        async with w.http.stream("GET", f"{API}/events", params=query) as response:
            parser = Parser()
            pieces = response.aiter_bytes()
            told = (event async for piece in pieces for event in parser.feed(piece) if event.id is not None)
            assert await anext(told) == SseEvent(id=str(last), comment="")


async def test_a_number_that_another_message_has_now_is_read_again(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a server was killed and had lost its last message, or all of them."""
    monkeypatch.setattr(follow, "AGAIN_S", 0.01)
    async with world(nats) as w:
        stream, found = w.controller.bus.jetstream, list[float]()
        wanted = subjects.events_of("", "f")

        async def read() -> None:
            async with aclosing(messages(w.gateway._bus, subjects.EVENTS_STREAM, wanted, None)) as reading:
                async for message in reading:
                    if message.data is not None:
                        found.append(codec.unpack(Event, message.data).at)

        info = await stream.stream_info(subjects.EVENTS_STREAM)
        reading = asyncio.create_task(read())
        for at in (1.0, 2.0, 3.0):
            _happens(w, "f", at)
        await until(lambda: found == [1.0, 2.0, 3.0])
        await stream.delete_stream(subjects.EVENTS_STREAM)
        await stream.add_stream(info.config)
        before = info.state.last_seq
        for at in range(before):  # what was there before them
            _happens(w, "g", at)
        for at in (1.0, 2.0, 4.0):
            _happens(w, "f", at)
        await until(lambda: found[-1] == 4.0)
        assert found == [1.0, 2.0, 3.0, 4.0], "its number is that of the third before"
        _happens(w, "f", 5.0)
        await until(lambda: found[-1] == 5.0)
        assert found == [1.0, 2.0, 3.0, 4.0, 5.0]
        await end([reading])


def _happens(w: World, function: str, at: float) -> None:
    event = Event(kind="instance.ready", at=at, component="node", function=function)
    w.node.bus.publish_now(subjects.event("node", NODE, event.kind, function), event)


@pytest.mark.parametrize("most", [1, 4])
async def test_what_a_reader_that_lags_has_not_taken_is_bounded_and_comes_all_the_same(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """``most``: messages that one asking may bring. Of one consumer, and each when there is room for as many."""
    monkeypatch.setattr(reader, "QUEUED_BYTES", 2 * most * reader.MESSAGE_BYTES)
    made, waiting, begun = list[float](), list[int](), asyncio.Event()
    async with world(nats) as w:
        for at in range(50):
            _happens(w, "f", float(at))
        await stored(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, 50)
        put = reader._Come.put

        async def noted(come: reader._Come, message: Msg) -> None:
            await put(come, message)
            waiting.append(come._bytes)
            begun.set()

        async def asked(*args: Any) -> None:
            if args[1] == subjects.EVENTS_STREAM:  # the gateway has readers of its own
                made.append(args[2].name)
            await ask(*args)

        monkeypatch.setattr(reader._Come, "put", noted)
        monkeypatch.setattr(reader, "ask", asked)
        wanted, found = subjects.events_of("instance.ready", "f"), list[float]()
        async with aclosing(messages(w.controller.bus, subjects.EVENTS_STREAM, wanted, None)) as reading:
            async for message in reading:
                if message.data is None:
                    break
                found.append(codec.unpack(Event, message.data).at)
                await w.controller.bus.flush()
    assert found == [float(at) for at in range(50)]
    assert 0 < max(waiting) <= reader.QUEUED_BYTES
    assert (len(set(made)), len(made) >= 50 // most) == (1, True)


async def test_a_reader_that_lagged_until_its_consumer_was_forgotten_reads_on(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "QUEUED_BYTES", 4 * reader.MESSAGE_BYTES)
    monkeypatch.setattr(reader, "SILENCE_S", 10 * GIVE_UP_S)  # that it is gone is said at once
    async with world(nats) as w:
        bus, found = w.controller.bus, list[float]()
        for at in range(20):
            _happens(w, "f", float(at))
        await stored(bus, subjects.EVENTS_STREAM, OF_NODE, 20)
        wanted = subjects.events_of("instance.ready", "f")
        async with aclosing(messages(bus, subjects.EVENTS_STREAM, wanted, None)) as reading:
            async for message in reading:
                if message.data is None:
                    break
                found.append(codec.unpack(Event, message.data).at)
                if len(found) in (1, 10):
                    for info in await bus.jetstream.consumers_info(subjects.EVENTS_STREAM):
                        if info.config.deliver_subject is None:
                            await bus.jetstream.delete_consumer(subjects.EVENTS_STREAM, info.name)
        assert found == [float(at) for at in range(20)]


async def test_a_consumer_that_is_made_and_sends_nothing_is_said(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the servers have the rights of a release that did not ask."""

    async def lost(*_args: Any) -> None:
        pass

    async with world(nats) as w:
        _happens(w, "f", 1.0)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, 1)
        monkeypatch.setattr(follow, "AGAIN_S", 0.0)
        monkeypatch.setattr(reader, "SILENCE_S", 0.01)
        monkeypatch.setattr(reader, "ask", lost)
        ticks = itertools.count(step=ELECTION_S / 2)
        reading = messages(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, None, lambda: next(ticks))
        with pytest.raises(Unavailable, match="no heartbeat"):
            await anext(reading)
        await reading.aclose()


@pytest.mark.parametrize("missed", ["one of two", "the last one", "the consumer", "the connection"])
async def test_what_a_reader_has_missed_is_read_all_the_same(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, missed: str
) -> None:
    """It is found out by the gap before what comes next, by what a heartbeat says, by there being none any more, and at
    a reconnect. What reads leaves nothing in the bus."""
    bus, node = await nats.streams(), await nats.bus(NODE)
    monkeypatch.setattr(reader, "SILENCE_S", 2 * HEARTBEAT_S if missed == "the consumer" else 10 * GIVE_UP_S)
    subscribe, subscribed = bus.subscribe_raw, list[str]()
    before = list(bus._reconnected._callbacks), set(bus._subscriptions)

    async def lossy(subject: str, handler: Handler) -> Subscription:
        subscribed.append(subject)
        lose = {"one of two": 1, "the last one": 1}.get(missed, 0) if len(subscribed) == 1 else 0

        async def hear(message: Msg) -> None:
            nonlocal lose
            beat = not message.reply.startswith("$JS.ACK.")
            if subject == subscribed[0] and beat and missed == "one of two":
                return
            if not beat and lose:
                lose -= 1
                return
            await handler(message)

        return await subscribe(subject, hear)

    monkeypatch.setattr(bus, "subscribe_raw", lossy)
    reading = messages(bus, subjects.EVENTS_STREAM, subjects.events_of("instance.ready", "f"), None)
    assert (await anext(reading)).data is None
    if missed == "the consumer":
        for info in await bus.jetstream.consumers_info(subjects.EVENTS_STREAM):
            await bus.jetstream.delete_consumer(subjects.EVENTS_STREAM, info.name)
    if missed == "the connection":
        await nats.kill()
        await until(lambda: not node.connected and not bus.connected)
        await nats.start()
        await until(lambda: node.connected and bus.connected)
    wanted = [0.0, 1.0] if missed == "one of two" else [0.0]
    for at in wanted:
        event = Event(kind="instance.ready", at=at, component="node", function="f")
        node.publish_now(subjects.event("node", NODE, event.kind, "f"), event)
    async with asyncio.timeout(GIVE_UP_S):
        found = [codec.unpack(Event, (await anext(reading)).data or b"").at for _ in wanted]
    assert found == wanted
    await reading.aclose()
    assert (bus._reconnected._callbacks, set(bus._subscriptions)) == before


async def test_a_long_history_is_sent_as_it_is_taken(narrow: None, nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of a gateway that has other things to do holds, and what waits in it is bounded."""
    monkeypatch.setattr(reader, "QUEUED_BYTES", 3 * MIB)
    bus, node = await nats.streams(), await nats.bus(NODE)
    subject, part = subjects.logs(NODE, "f"), "x" * (256 * KIB)
    for number in range(96):
        node.publish_now(subject, f"{number} {part}")
        await node.flush()
    await stored(bus, subjects.LOGS_STREAM, subject, 96)
    gateway, cut, waiting = await nats.bus(GATEWAY), list[int](), list[int]()
    gateway.on_disconnect(lambda: cut.append(1))
    put = reader._Come.put

    async def noted(come: reader._Come, message: Msg) -> None:
        await put(come, message)
        waiting.append(come._bytes)

    monkeypatch.setattr(reader._Come, "put", noted)
    found = list[int]()
    async with aclosing(messages(gateway, subjects.LOGS_STREAM, subject, None)) as reading:
        async for message in reading:
            if message.data is None:
                break
            found.append(int(codec.unpack(str, message.data).partition(" ")[0]))
            assert cut == []
            if len(found) in (1, 40):
                _works(0.5)
                await asyncio.sleep(0.5)
    assert found == list(range(96))
    assert 0 < max(waiting) <= 3 * MIB


def _works(seconds: float) -> None:
    """As a process does that has no turn for its connection."""
    time.sleep(seconds)


class Sent(NamedTuple):
    """A message as a consumer's reader sees it."""

    data: bytes = b""
    reply: str = ""
    headers: dict[str, str] | None = None
    subject: str = "s"


OVER = Sent(headers={"Status": "409", "Description": "Batch Completed"})
NOBODY = Sent(headers={"Status": "503"})
BEAT = Sent(headers={"Status": "100", "Nats-Last-Consumer": "0"})


def _come(nbytes: int = reader.MESSAGE_BYTES) -> tuple[reader._Come, list[int]]:
    asked = list[int]()

    async def ask() -> None:
        asked.append(1)

    return reader._Come(1, nbytes, ask), asked


async def _sent(come: reader._Come, *sent: Sent) -> None:
    """None of them waits for the reader."""
    for each in sent:
        await asyncio.wait_for(come.put(cast(Msg, each)), GIVE_UP_S)


async def test_small_messages_that_are_not_taken_are_bounded_too_and_an_end_waits_for_nobody() -> None:
    """Whatever the server sends."""
    come, _ = _come()
    most = reader.QUEUED_BYTES // reader.MESSAGE_BYTES
    await _sent(come, *(Sent(b"%d" % number, "$JS.ACK.x") for number in range(2 * most)))
    come.end()
    found = list[bytes]()
    while come._waiting:
        found.append((await come.next()).data)
    with pytest.raises(reader.Lost, match="more came"):
        await come.next()
    assert found == [b"%d" % number for number in range(len(found))], "what had come by then is read"
    assert most // 2 < len(found) <= most


async def test_heartbeats_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they counted against what was asked for, which JetStream does not: it would end without a word."""
    monkeypatch.setattr(reader, "QUEUED_BYTES", 2 * reader.MESSAGE_BYTES)
    come, asked = _come()
    whole = Sent(bytes(reader.MESSAGE_BYTES // 2 - len("s$JS.ACK.x")), "$JS.ACK.x")
    await come._more()
    await _sent(come, BEAT, BEAT, whole, BEAT, BEAT)
    assert [(await come.next()).reply for _ in range(3)] == ["", "$JS.ACK.x", ""]
    assert (len(come._waiting), come._bytes, len(asked)) == (0, 0, 1)
    await _sent(come, whole)  # half, and half: that is all
    assert len(asked) == 1, "there is no room beside it"
    await come.next()
    await asyncio.wait_for(come._more(), GIVE_UP_S)
    assert len(asked) == 2


async def test_more_is_asked_for_once_all_has_come_and_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "QUEUED_BYTES", 5 * reader.MESSAGE_BYTES)
    come, asked = _come()
    small = Sent(b"", "$JS.ACK.x")
    await _sent(come, small)
    await come.next()
    assert len(asked) == 1
    await _sent(come, small, OVER)
    assert len(asked) == 2
    await _sent(come, small, small)
    await come.next()
    assert len(asked) == 2, "the end of that asking has not come"
    await _sent(come, small, small, OVER)
    assert len(asked) == 2, "four wait"
    await come.next()
    assert len(asked) == 2
    await come.next()
    assert len(asked) == 3


@pytest.mark.parametrize("headers", [None, {"Traceparent": "0-1", "Other": "x y"}])
async def test_more_is_asked_for_though_all_of_the_bytes_have_come(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str] | None
) -> None:
    """To the very last of them: JetStream ends that without a word, and sends no more."""
    bus, node, gateway = await nats.streams(), await nats.bus(NODE), await nats.bus(GATEWAY)
    subject, put = subjects.logs(NODE, "f"), reader._Come.put
    counted, askings = list[int](), list[str | None]()

    async def noted(come: reader._Come, message: Msg) -> None:
        if message.reply.startswith(reader._STORED):
            counted.append(reader._counted(message))
        await put(come, message)

    async def asked(bus: Bus, stream: str, made: ConsumerConfig, *more: Any) -> None:
        askings.append(made.name)
        await ask(bus, stream, made, *more)

    async def read() -> list[int]:
        async with aclosing(messages(gateway, subjects.LOGS_STREAM, subject, None)) as found:
            return [len((await anext(found)).data or b"") for _ in sizes]

    monkeypatch.setattr(reader._Come, "put", noted)
    monkeypatch.setattr(reader, "ask", asked)
    sizes = [5000, 5000, 1]
    for size in sizes:
        await node._client.publish(subject, bytes(size), headers=headers)
    await node.flush()
    await stored(bus, subjects.LOGS_STREAM, subject, len(sizes))
    assert await read() == sizes
    monkeypatch.setattr(reader, "QUEUED_BYTES", 2 * sum(counted[:2]))
    askings.clear()
    assert await read() == sizes
    assert len(askings) >= 2
    assert len(set(askings)) == 1, "no consumer was given up"


@pytest.mark.parametrize("status", [OVER, NOBODY])
async def test_who_answers_an_asking_with_no_message_is_not_asked_again(status: Sent) -> None:
    come, asked = _come()
    await _sent(come, Sent(b"", "$JS.ACK.x"))
    await come.next()
    await _sent(come, status)
    with pytest.raises(reader.Lost, match=status.headers["Status"] if status.headers else ""):
        await come.next()
    assert len(asked) == 1


async def test_the_last_lines_of_a_function_are_found_from_the_streams_end(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more of them is made ready than is shown."""
    monkeypatch.setattr("sllm_gateway.routes.logs.AT_FIRST", 2)
    read, shown = list[int](), list[str]()

    def noted(message: follow.Message) -> LogRecord:
        read.append(message.number)
        return line_of(message)

    def seen(line: LogRecord) -> LogView:
        shown.append(line.text)
        return views.log_line(line)

    monkeypatch.setattr("sllm_gateway.routes.logs.line_of", noted)
    monkeypatch.setattr("sllm_gateway.routes.logs.views", SimpleNamespace(log_line=seen))
    async with world(nats) as w:
        for number in range(200):
            function = "f" if number % 10 == 0 else "g"
            line = LogRecord(
                at=1.0, function=function, version=1, instance="i", node=NODE, stream="s", text=f"{number}"
            )
            w.node.bus.publish_now(subjects.logs(NODE, function), line)
        await stored(w.controller.bus, subjects.LOGS_STREAM, f"sllm.logs.{NODE}.*", 200)
        for limit, texts, most in ((1, ["190"], 1), (2, ["180", "190"], 1 + 12), (10_000, None, 20)):
            read.clear()
            shown.clear()
            answer = events((await w.http.get(f"{API}/functions/f/logs", params={"limit": limit})).text)
            found = [json.loads(each.data)["text"] for each in answer if not each.done]
            assert found == shown == (texts or [str(number) for number in range(0, 200, 10)])
            assert len(read) <= most


async def test_who_speaks_is_known_by_the_subject(nats: Nats) -> None:
    """A node that is broken into cannot say it for another, or for the controller."""
    async with world(nats) as w:
        forged = Event(kind="version.active", at=1.0, component="controller", node="other", function="g", call="call-9")
        w.node.bus.publish_now(subjects.event("node", NODE, "instance.ready", "f"), forged)
        w.node.bus.publish_now(f"{subjects.events_by('node', NODE)}.a.b", forged)
        line = LogRecord(at=1.0, function="g", version=1, instance="i", node="other", stream="stdout", text="x")
        w.node.bus.publish_now(subjects.logs(NODE, "f"), line)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, 2)
        await stored(w.controller.bus, subjects.LOGS_STREAM, subjects.logs(NODE, "f"), 1)
        told = [
            json.loads(each.data) for each in events((await w.http.get(f"{API}/events")).text) if each.data[:1] == "{"
        ]
        (event,) = [each for each in told if each["component"] != "gateway"]
        assert (event["component"], event["node"], event["kind"]) == ("node", NODE, "instance.ready")
        assert (event["function"], event["call"]) == ("f", None)
        (shown, _) = events((await w.http.get(f"{API}/functions/f/logs")).text)
        assert json.loads(shown.data)["node"] == NODE

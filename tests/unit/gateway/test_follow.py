"""What is left at NATS of those who have asked for events and logs: nothing."""

import asyncio
import itertools
import json
from contextlib import aclosing
from typing import Any

import pytest
from nats import errors as nats_errors

from sllm.sse import Event as SseEvent
from sllm.sse import Parser
from sllm_gateway import follow
from sllm_gateway.follow import messages
from sllm_runtime.platform import owned
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.consumers import forget
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.events import Event
from sllm_runtime.protocol.http import API
from tests.fixtures.nats import CONTROLLER, NODE, Nats, stored
from tests.fixtures.waiting import until
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
        for more, all_of_them in (({}, False), ({"function": "f"}, True), ({"since": "0"}, True)):
            read.clear()
            text = (await w.http.get(f"{API}/events", params={"limit": "3", **more})).text
            assert [json.loads(each.data)["at"] for each in events(text) if each.event == "event"] == [17.0, 18.0, 19.0]
            assert (len(read) >= 20) if all_of_them else (len(read) == 3)
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


async def test_what_a_reader_that_lags_has_not_taken_is_bounded_and_comes_all_the_same(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "QUEUED_BYTES", 1000)
    monkeypatch.setattr(follow, "AGAIN_S", 0.01)
    async with world(nats) as w:
        for at in range(50):
            _happens(w, "f", float(at))
        await stored(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, 50)
        given_up, found = list[str](), list[float]()

        def noted(bus: Any, stream: str, made: Any) -> None:
            given_up.append(made.name)
            forget(bus, stream, made)

        monkeypatch.setattr("sllm_gateway.follow.forget", noted)
        wanted = subjects.events_of("instance.ready", "f")
        async with aclosing(messages(w.controller.bus, subjects.EVENTS_STREAM, wanted, None)) as reading:
            async for message in reading:
                if message.data is None:
                    break
                found.append(codec.unpack(Event, message.data).at)
                await until(lambda: given_up, what="what is sent is more than it takes")
        assert found == [float(at) for at in range(50)]

"""The short way of messages in and out of nats-py's client, against a real nats-server."""

import asyncio
import contextlib
import logging
from collections import Counter
from functools import partial
from typing import Any, cast

import msgspec
import pytest

from sllm_runtime.platform.direct import DirectClient
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.ctl import Reply
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.nats import GATEWAY, NODE, Nats
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S, until

SUBJECT = subjects.frames(GATEWAY, NODE)


class Ping(msgspec.Struct, frozen=True):
    n: int = 0


async def test_a_listener_is_called_where_the_message_is_parsed(nats: Nats) -> None:
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    got: list[tuple[str, str, int]] = []
    by: set[str] = set()

    def heard(subject: str, reply: str, data: bytes) -> None:
        got.append((subject, reply, codec.unpack(int, data)))
        task = asyncio.current_task()
        by.add(getattr(task.get_coro(), "__qualname__", "") if task is not None else "")

    await gateway.listen(SUBJECT, heard)
    for number in range(500):
        node.publish_now(SUBJECT, number)
    await until(lambda: len(got) == 500)
    assert got == [(SUBJECT, "", number) for number in range(500)]
    assert by == {"Client._read_loop"}  # with a nats-py that works otherwise it is the subscription's own task


async def test_published_now_is_written_now_unless_something_waits_before_it(nats: Nats) -> None:
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    got: list[int] = []
    await gateway.listen(SUBJECT, lambda _subject, _reply, data: got.append(codec.unpack(int, data)))
    client = node._client
    await until(lambda: client.publish_now(SUBJECT, codec.pack(0)))  # a ping of nats-py's may wait just now
    await client.publish(SUBJECT, codec.pack(1))  # nats-py writes it in the next turn
    assert not client.publish_now(SUBJECT, codec.pack(2))
    node.publish_now(SUBJECT, 2)  # behind it, then
    await node.flush()
    await until(lambda: client.publish_now(SUBJECT, codec.pack(3)))
    await until(lambda: got == [0, 1, 2, 3])


async def test_a_socket_that_takes_nothing_is_left_to_nats_py(nats: Nats) -> None:
    node = await nats.bus(NODE)
    assert nats.server.child is not None
    client, data, written = node._client, bytes(500_000), 0
    with suspended(nats.server.child.pid):
        while client.publish_now(SUBJECT, data):  # the kernel's buffers fill
            written += 1
            assert written < 1000
        node.publish_now(SUBJECT, data)
    await node.flush()
    await until(lambda: client.publish_now(SUBJECT, b""))


async def test_without_a_server_nothing_is_written_and_it_is_said(nats: Nats) -> None:
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    got: list[int] = []
    await gateway.listen(SUBJECT, lambda _subject, _reply, data: got.append(codec.unpack(int, data)))
    assert node.free
    await nats.kill()
    await until(lambda: not node.connected and not gateway.connected)
    assert not node.free
    assert not node._client.publish_now(SUBJECT, b"")
    await nats.start()
    await until(lambda: node.free and gateway.free)
    await gateway.flush()
    node.publish_now(SUBJECT, 1)
    await until(lambda: got == [1])


async def test_what_a_listener_raises_is_logged_and_ends_nothing(nats: Nats, caplog: pytest.LogCaptureFixture) -> None:
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    got: list[int] = []

    def heard(_subject: str, _reply: str, data: bytes) -> None:
        number = codec.unpack(int, data)
        if number == 1:
            raise ValueError("one")
        got.append(number)

    await gateway.listen(SUBJECT, heard)
    with caplog.at_level(logging.WARNING):
        for message in ("no number", 0, 1, 2):
            node.publish_now(SUBJECT, message)
        await until(lambda: got == [0, 2])
    assert "refused a message" in caplog.text
    assert "ValueError: one" in caplog.text


async def test_nothing_comes_after_unsubscribing(nats: Nats) -> None:
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    got: list[int] = []
    first = await gateway.listen(SUBJECT, lambda _subject, _reply, data: got.append(codec.unpack(int, data)))
    node.publish_now(SUBJECT, 1)
    await until(lambda: got == [1])
    await first.unsubscribe()
    await first.unsubscribe()
    second: list[int] = []
    await gateway.listen(SUBJECT, lambda _subject, _reply, data: second.append(codec.unpack(int, data)))
    node.publish_now(SUBJECT, 2)
    await until(lambda: second == [2])
    assert got == [1]


async def test_a_closed_connection_takes_no_listener(nats: Nats) -> None:
    gateway = await nats.bus(GATEWAY)
    await gateway.close()
    with pytest.raises(Unavailable, match="cannot subscribe"):
        await gateway.listen(SUBJECT, lambda *_: None)


async def test_answers_come_straight_to_who_waits(nats: Nats) -> None:
    """Also the server's word that nobody is there, which comes in a header."""
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    subject = subjects.node_open(NODE, GATEWAY)
    with pytest.raises(Unavailable, match="nobody serves"):
        await gateway.call(subject, Ping(), Ping, timeout_s=GIVE_UP_S)
    heard: list[str] = []

    def answer(_subject: str, reply: str, data: bytes) -> None:
        heard.append(reply)
        for _ in range(2):  # a repeated answer finds nobody who waits, and harms nobody
            node.publish_now(reply, Reply(value=msgspec.Raw(data)))

    await node.listen(subject, answer)
    assert await gateway.call(subject, Ping(7), Ping, timeout_s=GIVE_UP_S) == Ping(7)
    assert await gateway.call(subject, Ping(8), Ping, timeout_s=GIVE_UP_S) == Ping(8)
    assert len(set(heard)) == 2
    assert all(reply.startswith(subjects.inbox("gateway", GATEWAY)) for reply in heard)


async def test_of_answers_that_are_read_together_the_first_counts(nats: Nats) -> None:
    """Who waits has not had its turn between them. What is raised where they are parsed ends the connection."""
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    subject, heard = subjects.node_open(NODE, GATEWAY), list[str]()
    await node.listen(subject, lambda _subject, reply, _data: heard.append(reply))
    asking = asyncio.create_task(gateway.call(subject, Ping(), Ping, timeout_s=GIVE_UP_S))
    await until(lambda: heard)
    for number in (1, 2):
        answer = codec.pack(Reply(value=msgspec.Raw(codec.pack(Ping(number)))))
        gateway._questions._answered(heard[0], "", answer, "")
    assert await asking == Ping(1)


async def test_a_flush_that_was_given_up_does_not_end_the_connection(
    nats: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer comes when nobody waits for it: nats-py would read no further until it finds the silence strange."""
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    got: list[int] = []
    await gateway.listen(SUBJECT, lambda _subject, _reply, data: got.append(codec.unpack(int, data)))
    client = gateway._client
    assert nats.server.child is not None
    with suspended(nats.server.child.pid):
        before = len(client._pongs)
        flushing = asyncio.create_task(client.flush())
        await until(lambda: len(client._pongs) > before)
        flushing.cancel()
        await asyncio.wait({flushing})
    received = client._pongs_received
    await until(lambda: client._pongs_received > received)
    node.publish_now(SUBJECT, 1)
    await until(lambda: got == [1])
    assert "InvalidStateError" not in caplog.text


async def test_a_reconnect_that_is_broken_off_leaves_no_loop_behind() -> None:
    """A link that drops all after the greeting: nats-py begins to read, to write and to ping, gives that connection up,
    and began once more of each at the next one. Two that read one connection end both."""
    answers = iter([None, 1, None])  # pings that are answered: all, that of the greeting alone, all
    greeted = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = next(answers)
        writer.write(b'INFO {"server_id":"s","version":"2.10.0","max_payload":1048576,"headers":true}\r\n')
        greeted.set()
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                if line == b"PING\r\n" and left != 0:
                    left = None if left is None else left - 1
                    writer.write(b"PONG\r\n")
                elif line.startswith(b"PUB drop"):
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = DirectClient()
    back = asyncio.Event()

    async def reconnected() -> None:
        back.set()

    port = server.sockets[0].getsockname()[1]
    options: dict[str, Any] = {"reconnect_time_wait": 0.01, "max_reconnect_attempts": -1}
    await client.connect(f"nats://127.0.0.1:{port}", reconnected_cb=reconnected, **options)
    try:
        client.flush = partial(client.flush, timeout=cast(int, 0.2))  # type: ignore[method-assign]
        await client.publish("drop")
        async with asyncio.timeout(GIVE_UP_S):
            await back.wait()
        await asyncio.sleep(0)
        running = Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
        assert [running[f"Client.{name}"] for name in ("_read_loop", "_flusher", "_ping_interval")] == [1, 1, 1]
    finally:
        await client.close()
        server.close()
        await server.wait_closed()

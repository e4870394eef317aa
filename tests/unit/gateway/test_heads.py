"""What comes before there is a request, on a bare socket: bounded in bytes and in time."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from sllm_gateway.keeping import Keeping
from sllm_gateway.server import Connection
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.limits import MAX_HEAD
from sllm_runtime.protocol.node import Ok
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, World, entry, hang, manifest, world

SOON_S = 0.1
ASKED = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(w: World) -> AsyncIterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(w.url.rpartition(":")[2]))) as sock:
        sock.setblocking(False)
        yield sock


async def rest(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 2**16), GIVE_UP_S):
            got += piece
    return got


async def until_answered(sock: socket.socket, body: bytes) -> bytes:
    got = b""
    while not got.endswith(body):
        piece = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 2**16), GIVE_UP_S)
        assert piece, got
        got += piece
    return got


def error(answer: bytes) -> tuple[int, str]:
    """Status and code."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def without_end(sock: socket.socket) -> None:
    """The buffers of sockets take some megabytes in any case."""
    while True:
        await send(sock, b"a" * MAX_HEAD)
        await asyncio.sleep(0)


async def test_headers_without_end_are_cut(nats: Nats) -> None:
    async with world(nats) as w, connected(w) as sock:
        await send(sock, b"GET /livez HTTP/1.1\r\nx: ")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(without_end(sock), GIVE_UP_S)


async def test_headers_that_are_too_large_are_told_so(nats: Nats) -> None:
    async with world(nats) as w, connected(w) as sock:
        await send(sock, b"GET /livez HTTP/1.1\r\nx: " + b"a" * MAX_HEAD)
        assert error(await rest(sock)) == (431, "head_too_large")


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"GET /li", b"GET /livez HTTP/1.1\r\nhost: x\r\n"])
async def test_a_connection_without_a_request_is_closed(nats: Nats, begun: bytes) -> None:
    async with world(nats, head_timeout=SOON_S) as w, connected(w) as sock:
        await send(sock, begun)
        assert error(await rest(sock)) == (408, "head_timeout")


@pytest.mark.parametrize("begun", [b"\r\n", b"GET /li"])
async def test_so_is_one_that_has_had_one(nats: Nats, begun: bytes) -> None:
    async with world(nats, head_timeout=SOON_S) as w, connected(w) as sock:
        await send(sock, ASKED)
        answer = await until_answered(sock, b"ok\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        await send(sock, begun)
        assert error(await rest(sock)) == (408, "head_timeout")


async def test_one_that_waits_for_its_next_request_stays(nats: Nats) -> None:
    async with world(nats, head_timeout=SOON_S) as w, connected(w) as sock:
        for _ in range(2):
            await send(sock, ASKED)
            assert (await until_answered(sock, b"ok\n")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(5 * SOON_S)  # it is looked at meanwhile, more than once


async def test_it_is_closed_in_silence_when_its_time_is_over(nats: Nats) -> None:
    """A proxy that keeps connections for less long never sends into one that is being closed."""
    async with world(nats, keep_alive=1) as w, connected(w) as sock:
        await send(sock, ASKED)
        assert (await until_answered(sock, b"ok\n")).startswith(b"HTTP/1.1 200")
        assert await rest(sock) == b""


async def test_one_that_is_answered_stays(nats: Nats) -> None:
    async def slow(run: Run) -> None:
        await asyncio.sleep(5 * SOON_S)
        run.out(1)
        run.end()

    async with world(nats, head_timeout=SOON_S) as w:
        await w.deploy(manifest("slow"), entry(), script=slow)
        assert (await w.http.post("/fn/slow", json={})).json() == [1]


@pytest.mark.parametrize(
    "head", [b"GET /livez?%b HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /livez HTTP/1.1\r\nhost: x\r\nx: %b\r\n\r\n"]
)
async def test_one_that_is_read_at_once_is_no_larger(nats: Nats, head: bytes) -> None:
    async with world(nats) as w, connected(w) as sock:
        sock.setblocking(True)  # the gateway, whose loop this is, looks when all of it is there
        sock.sendall(head % (b"y" * MAX_HEAD))
        sock.setblocking(False)
        assert error(await rest(sock)) == (431, "head_too_large")


async def test_what_is_no_http_gets_an_error_like_any_other(nats: Nats) -> None:
    async with world(nats) as w, connected(w) as sock:
        await send(sock, b"FOO bar\r\n\r\n")
        assert error(await rest(sock)) == (400, "invalid_request")


@pytest.mark.parametrize(
    "asked",
    [
        b'content-length: 8\r\n\r\n{"a":"\xc3\xa9"}',  # as of characters: it is 10 bytes
        b'content-length: 7\r\n\r\n{"a":1}}',  # what is asked is whole, and has begun perhaps
        b"transfer-encoding: identity\r\n\r\n{}",
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_so_does_what_is_none_behind_a_request_or_in_its_body(nats: Nats, asked: bytes) -> None:
    async with world(nats) as w, connected(w) as sock:
        await w.deploy(manifest("hang"), entry(), script=hang)
        await send(sock, b"POST /fn/hang HTTP/1.1\r\nhost: x\r\n" + asked)
        answer = await rest(sock)
        assert error(answer) == (400, "invalid_request")
        assert b"Content-Length" in answer
        await until(lambda: not len(w.gateway.calls), what="nothing of it goes on")


async def test_what_is_none_behind_a_stream_is_not_answered_within_it(nats: Nats) -> None:
    stream = b"GET /api/v1/events?follow=true HTTP/1.1\r\nhost: x\r\n\r\n"
    async with world(nats, heartbeat=SOON_S) as w, connected(w) as sock:
        await send(sock, stream)
        await until_answered(sock, b": heartbeat\n\r\n")
        await send(sock, b"FOO bar\r\n\r\n")
        assert b"HTTP/1.1" not in await rest(sock)


@pytest.mark.parametrize("kept", [b"", b"connection: keep-alive\r\n"])
async def test_a_stream_for_an_older_client_has_no_chunks(nats: Nats, kept: bytes) -> None:
    """HTTP/1.0 does not know them (RFC 9112, 6.1): MicroPython's client refuses them, others read them as its text."""

    async def two(run: Run) -> None:
        run.out(1)
        run.out(2)
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("two"), entry(), script=two)
        asked = b"POST /fn/two HTTP/1.0\r\n" + kept
        async with connected(w) as sock:
            await send(sock, asked + b"accept: text/event-stream\r\n\r\n")
            head, _, body = (await rest(sock)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"\r\nconnection: close" in head
        assert body.startswith(b"id: 0\ndata: 1\n\nid: 1\ndata: 2\n\n")
        assert body.endswith(b"data: [DONE]\n\n")
        async with connected(w) as sock:
            await send(sock, asked + b"\r\n")
            answer = await rest(sock)
        assert b"content-length: 5\r\n" in answer
        assert answer.endswith(b"\r\n\r\n[1,2]")


CHUNKED = b"POST /fn/slow HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize("endless", [b"x: ", b"x: y\r\n" * 10_000])
async def test_trailers_without_end_are_cut(nats: Nats, endless: bytes) -> None:
    """One that does not end, and many of them."""
    async with world(nats) as w, connected(w) as sock:
        await send(sock, CHUNKED + endless)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(without_end(sock), GIVE_UP_S)


async def test_trailers_are_no_headers(nats: Nats) -> None:
    async def prompt(run: Run) -> None:
        run.out(run.arguments)
        run.end()

    async with world(nats) as w, connected(w) as sock:
        await w.deploy(manifest("slow"), entry(), script=prompt)
        await send(sock, CHUNKED + b"idempotency-key: \xff\r\n\r\n")
        assert (await until_answered(sock, b"[{}]")).startswith(b"HTTP/1.1 200")


async def test_a_body_in_small_chunks_is_none_of_what_is_cut(nats: Nats) -> None:
    async def length(run: Run) -> None:
        run.out(len(run.arguments["text"]))
        run.end()

    async with world(nats) as w, connected(w) as sock:
        await w.deploy(manifest("slow"), entry(), script=length)
        body = b'{"text": "' + b"a" * MAX_HEAD + b'"}'
        await send(sock, CHUNKED.partition(b"2\r\n")[0])
        for start in range(0, len(body), 2**13):
            for at in range(start, min(start + 2**13, len(body)), 8):
                piece = body[at : at + 8]
                await send(sock, b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        await send(sock, b"0\r\n\r\n")
        assert (await until_answered(sock, b"[%d]" % MAX_HEAD)).startswith(b"HTTP/1.1 200")


async def test_a_request_behind_the_head_of_a_stream_is_answered(nats: Nats) -> None:
    """A stream has no end, so it would wait for ever, and nobody would see its client go."""
    head = b"HEAD /api/v1/events?follow=true HTTP/1.1\r\nhost: x\r\n\r\n"
    async with world(nats) as w, connected(w) as sock:
        await send(sock, head + ASKED)
        answer = await until_answered(sock, b"ok\n")
        assert answer.count(b"HTTP/1.1 200") == 2
        assert b"text/event-stream" in answer


async def test_a_stream_ends_with_its_client_also_where_another_request_waits_behind_it(nats: Nats) -> None:
    stream = b"GET /api/v1/events?follow=true HTTP/1.1\r\nhost: x\r\n\r\n"
    async with world(nats, heartbeat=SOON_S) as w:
        async with connected(w) as sock:
            await send(sock, stream + ASKED)
            await until_answered(sock, b": heartbeat\n\r\n")
            assert len(w.gateway._tasks) > 0
        await until(lambda: len(w.gateway._tasks) == 0, what="nobody reads for it any more")


@pytest.mark.parametrize(
    "behind", [ASKED, b"POST /fn/hang HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b" " * 99_999]
)
async def test_so_does_any_call_also_where_that_comes_later(nats: Nats, behind: bytes) -> None:
    """Nothing is written to who waits for a whole answer: that its client has gone has to be read."""
    async with world(nats) as w:
        await w.deploy(manifest("hang"), entry(), script=hang)
        async with connected(w) as sock:
            await send(sock, b"POST /fn/hang HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: len(w.node.runs) == 1, what="it runs")
            await send(sock, behind)
            await asyncio.sleep(SOON_S)
        await until(lambda: w.node.cancels, 5, what="its work is cancelled")


async def test_what_comes_behind_a_call_is_not_read_without_end(nats: Nats) -> None:
    async with world(nats) as w, connected(w) as sock:
        await w.deploy(manifest("hang"), entry(), script=hang)
        await send(sock, b"POST /fn/hang HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: len(w.node.runs) == 1, what="it runs")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                send(
                    sock, b"POST /fn/hang HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n" + b" " * 30_000_000
                ),
                2,
            )


async def test_what_is_asked_of_no_path_is_refused(nats: Nats) -> None:
    async with world(nats) as w, connected(w) as sock:
        await send(sock, b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert error(await rest(sock)) == (404, "not_found")
        assert 'sllm_http_requests_total{route="other",status="404"} 1.0' in (await w.http.get("/metrics")).text


OFFERS = b"connection: keep-alive, Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_to_go_on_in_another_protocol_is_passed_over(nats: Nats, chunked: bool, split: bool) -> None:
    """As Java's client makes it, and ``curl --http2``: its body is the request's, and the next one follows."""

    async def echo(run: Run) -> None:
        run.out(bytes(run.body).decode())
        run.end()

    body = b'{"question":"how are you"}'
    async with world(nats) as w, connected(w) as sock:
        await w.deploy(manifest("echo", streams=False), entry(), script=echo)
        head = b"POST /fn/echo HTTP/1.1\r\nhost: x\r\n" + OFFERS
        if chunked:
            head, sent = head + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            head, sent = head + b"content-length: %d\r\n\r\n" % len(body), body
        for part in (head, sent) if split else (head + sent,):
            await send(sock, part)
            await asyncio.sleep(0.05 if split else 0)  # nothing tells that it was read
        await until(lambda: w.node.runs, what="it is called")
        await until(lambda: not len(w.gateway.calls), what="it is answered")
        await send(sock, ASKED)
        assert await until_answered(sock, b"ok\n")
        assert [bytes(run.body) for run in w.node.runs.values()] == [body]


async def test_a_head_behind_a_large_body_in_one_read_is_not_as_large_as_that(nats: Nats) -> None:
    async def length(run: Run) -> None:
        run.out(len(run.body))
        run.end()

    body = b'{"a":"' + b"x" * 150_000 + b'"}'
    async with world(nats) as w:
        await w.deploy(manifest("length", streams=False), entry(), script=length)
        head = b"POST /fn/length HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        reads = (head + body[:-80_000], body[-80_000:] + ASKED[:-4], ASKED[-4:])
        async with connected(w) as sock:
            seen, read = list[int](), Connection.data_received

            def noted(connection: Connection, data: bytes) -> None:
                read(connection, data)
                seen.append(len(data))

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Connection, "data_received", noted)
                sent = 0
                for part in reads:
                    await send(sock, part)
                    sent += len(part)
                    await until(partial(lambda total: sum(seen) >= total, sent), what="it is read")
            assert await until_answered(sock, b"ok\n")


# --- what a client does not take --------------------------------------------------------------------
STREAM = b"POST /fn/flood HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n"


async def flood(run: Run) -> None:
    while not run.cancelled.is_set():
        run.out("x" * 100_000)
        await run.room()
        await asyncio.sleep(0)
    run.end()


@contextlib.asynccontextmanager
async def stuck(w: World, asked: bytes) -> AsyncIterator[tuple[Connection, socket.socket]]:
    """A client that has taken nothing of a stream, whose call is then cancelled by somebody."""
    with pytest.MonkeyPatch.context() as patch:
        made, begin = dict[object, Connection](), Connection.connection_made

        def noted(connection: Connection, transport: asyncio.Transport) -> None:
            begin(connection, transport)
            made[transport.get_extra_info("peername")] = connection

        patch.setattr(Connection, "connection_made", noted)
        async with connected(w) as sock:
            await send(sock, asked)
            await until(lambda: len(w.node.runs) == 1, what="it runs")
            (run,) = w.node.runs.values()
            call = w.gateway.calls.get(run.head.call)
            assert call is not None
            await until(lambda: call.writing is not None and run.outbox.blocked, what="nobody takes it")
            await w.http.post(f"/v1/calls/{call.id}/cancel")
            yield made[sock.getsockname()], sock


async def test_a_stream_behind_one_that_nobody_took_does_not_fill_the_memory(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("flood"), entry(), script=flood)
        async with stuck(w, 2 * (STREAM + b"\r\n")) as (connection, _):
            await asyncio.sleep(1)
            assert connection.transport.get_write_buffer_size() < 2 * w.gateway.settings.window


async def test_a_connection_that_is_to_be_closed_is_so_though_nobody_takes_its_end(nats: Nats) -> None:
    async with world(nats, head_timeout=SOON_S) as w:
        await w.deploy(manifest("flood"), entry(), script=flood)
        async with stuck(w, STREAM + b"connection: close\r\n\r\n") as (connection, _):
            await until(lambda: connection._lost, what="it is closed")


async def test_one_whose_client_takes_its_end_slowly_has_all_of_it(nats: Nats) -> None:
    async with world(nats, head_timeout=SOON_S) as w:
        await w.deploy(manifest("flood"), entry(), script=flood)
        async with stuck(w, STREAM + b"connection: close\r\n\r\n") as (_, sock):
            answer = await rest(sock)
    assert answer.endswith(b"\r\n0\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"code":"cancelled"' in answer


async def test_a_call_that_is_kept_is_not_told_to_be_refused(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no request comes behind it, when it is stored and its 202 is not written: nobody is to ask again."""
    promise, stored, go_on = Keeping._promise, asyncio.Event(), asyncio.Event()

    async def late(self: Keeping, *args: Any) -> None:
        stored.set()
        await go_on.wait()
        await promise(self, *args)

    monkeypatch.setattr(Keeping, "_promise", late)
    async with world(nats) as w, connected(w) as sock:
        await w.deploy(manifest("hang"), entry(), script=hang)
        await send(sock, b"POST /fn/hang HTTP/1.1\r\nhost: x\r\nprefer: respond-async\r\ncontent-length: 2\r\n\r\n{}")
        await asyncio.wait_for(stored.wait(), GIVE_UP_S)
        await send(sock, b"}")
        answer = await rest(sock)
        goes_on = len(w.gateway.calls)
        go_on.set()
        assert not (goes_on and answer.startswith(b"HTTP/1.1 4")), answer


@pytest.mark.parametrize(
    "parts",
    [
        [b'POST /fn/hang HTTP/1.1\r\nhost: x\r\n\r\n{"to": 1}'],
        [b"POST /fn/hang HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}", b'\xa9"}'],
    ],
    ids=["without a length", "its rest a packet later"],
)
async def test_a_call_that_is_not_kept_is_told_of_what_is_behind_it(nats: Nats, parts: list[bytes]) -> None:
    """Its body was taken by then; it ends with its connection, and nobody has run it."""
    async with world(nats) as w, connected(w) as sock:
        await w.deploy(manifest("hang"), entry(), script=hang)
        for part in parts:
            await send(sock, part)
            if part is not parts[-1]:
                await until(lambda: len(w.gateway.calls) == 1)
        answer = await rest(sock)
        assert answer.startswith(b"HTTP/1.1 400"), answer


async def test_what_is_done_by_its_head_alone_is_not_told_to_be_refused(nats: Nats) -> None:
    """A deletion takes no body and goes on without its caller: who reads 400 would think that nothing was done."""
    deleted = list[str]()

    async def delete(request: ctl.Delete) -> Ok:
        deleted.append(request.function)
        return Ok(note="deleted")

    async with world(nats) as w, connected(w) as sock:
        await w.controller.serve("delete", ctl.Delete, delete)
        await send(sock, b'DELETE /api/v1/functions/chat HTTP/1.1\r\nhost: x\r\n\r\n{"force": true}')
        answer = await rest(sock)
        await asyncio.sleep(0.5)
        assert not (deleted and answer.startswith(b"HTTP/1.1 4")), (deleted, answer)


async def test_a_rollback_whose_body_was_taken_is_not_told_to_be_refused(nats: Nats) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def rollback(request: ctl.Rollback) -> Ok:
        begun.set()
        await go_on.wait()
        return Ok(note="done")

    async with world(nats) as w, connected(w) as sock:
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        head = b"POST /api/v1/functions/chat/rollback HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        await send(sock, head)
        await asyncio.wait_for(begun.wait(), GIVE_UP_S)
        await send(sock, b"}")
        answer = await rest(sock)
        go_on.set()
        assert not answer.startswith(b"HTTP/1.1 4"), answer

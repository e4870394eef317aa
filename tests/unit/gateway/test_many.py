"""Clients that ask on and on, and take nothing of what they are answered: on a bare socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from sllm_gateway.server import Connection
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, World, entry, manifest, world

PROBE = b"GET /livez HTTP/1.1\r\n\r\n"
CALL = b"POST /fn/large HTTP/1.1\r\nhost: x\r\n"
STREAM = CALL + b"accept: text/event-stream\r\n"


@contextlib.asynccontextmanager
async def deaf(w: World) -> AsyncIterator[tuple[socket.socket, Connection]]:
    """A client whose own buffer is small, and its connection at the gateway."""
    with pytest.MonkeyPatch.context() as patch, socket.socket() as sock:
        made, begin = dict[object, Connection](), Connection.connection_made

        def noted(connection: Connection, transport: asyncio.Transport) -> None:
            begin(connection, transport)
            made[transport.get_extra_info("peername")] = connection

        patch.setattr(Connection, "connection_made", noted)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(w.url.rpartition(":")[2])))
        sock.setblocking(False)
        await until(lambda: sock.getsockname() in made)
        yield sock, made[sock.getsockname()]


async def ask(sock: socket.socket, data: bytes) -> None:
    """As far as the other side reads it."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, data), 1)


async def ask_until_paused(sock: socket.socket, connection: Connection, request: bytes, count: int = 1) -> None:
    """``count`` requests after the other, so that no more than these wait; then one more, of which none is answered."""
    state = connection.server_state
    answered = state.total_requests

    def done() -> bool:
        return connection.flow.write_paused or state.total_requests >= answered

    while not connection.flow.write_paused:
        await ask(sock, request * count)
        answered += count
        await until(done)
    await ask(sock, request)


async def test_requests_that_wait_for_their_answers_are_bounded(nats: Nats) -> None:
    """Without a token, too: each request of 23 bytes is kilobytes here as long as it waits."""
    async with world(nats) as w, deaf(w) as (sock, connection):
        most = 0
        for _ in range(5):
            await ask(sock, 20_000 * PROBE)
            most = max(most, len(connection.pipeline))
        assert most <= 1000


async def test_a_client_that_takes_no_answer_is_cut_off(nats: Nats) -> None:
    async with world(nats, head_timeout=0.2, keep_alive=1) as w, deaf(w) as (sock, connection):
        await ask_until_paused(sock, connection, PROBE, 50)
        await until(lambda: connection._lost, 10, "it is closed")


@pytest.mark.parametrize("asked", [CALL, STREAM])
async def test_a_call_whose_answer_waits_behind_one_that_nobody_took_ends(nats: Nats, asked: bytes) -> None:
    async def large(run: Run) -> None:
        run.out("x" * 60_000)
        run.end()

    async with world(nats, head_timeout=0.2, keep_alive=1, slow_consumer=0.3) as w:
        await w.deploy(manifest("large", timeout=2.0), entry(), script=large)
        async with deaf(w) as (sock, connection):
            await ask_until_paused(sock, connection, asked + b"\r\n")
            await until(lambda: len(w.gateway.calls) == 1, 10, "it is called")
            await until(lambda: not len(w.gateway.calls), 10, "no call is open")
            await until(lambda: connection._lost, 10, "it is closed")

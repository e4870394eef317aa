"""The bus where NATS is reached by a name: of several addresses one is dead, or the resolver takes its time; or where a
server does not keep its connections."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.direct import DirectClient
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.limits import MIB
from tests.fixtures.nats import GATEWAY, Nats

NAME = "nats.internal"


@contextlib.contextmanager
def deaf(port: int) -> Iterator[str]:
    """An address that answers to nothing: its queue is full, so that the kernel drops what asks for a connection."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.2", port))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(("127.0.0.2", port))
        yield "127.0.0.2"


def named(monkeypatch: pytest.MonkeyPatch, addresses: list[str], after_s: float = 0.0) -> None:
    resolve = socket.getaddrinfo

    def found(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != NAME:
            return resolve(host, port, *args, **options)
        time.sleep(after_s)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def settings(nats: Nats) -> Settings:
    url = nats.url.replace("127.0.0.1", NAME)
    return Settings.load({**nats.env(GATEWAY), "SLLM_NATS_URL": url})


async def test_of_two_addresses_the_first_is_dead(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    with deaf(nats.server.port) as dead:
        named(monkeypatch, [dead, "127.0.0.1"])
        bus = await Bus.connect(settings(nats), GATEWAY, name="test")
        await bus.close()


async def test_a_resolver_that_takes_seconds(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose first server does not answer: 5 s by resolv.conf's default, for each look."""
    named(monkeypatch, ["127.0.0.1"], after_s=2.0)
    bus = await Bus.connect(settings(nats), GATEWAY, name="test")
    await bus.close()


async def test_a_server_that_ends_each_connection_soon_is_not_connected_to_in_a_tight_loop() -> None:
    came = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        info = {"server_id": "x", "version": "2.10.0", "headers": True, "max_payload": MIB, "proto": 1, "port": port}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.02):
                while line := await reader.readline():
                    if line.startswith(b"PING"):
                        writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = DirectClient()
    await client.connect(f"nats://127.0.0.1:{port}", reconnect_time_wait=1, max_reconnect_attempts=-1)
    await asyncio.sleep(3.0)
    count = came
    await client.close()
    server.close()
    assert 2 <= count <= 5, f"{count} connections within 3 s"

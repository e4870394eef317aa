"""The bus where NATS is reached by a name: of several addresses one is dead, or the resolver takes its time."""

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.settings import Settings
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

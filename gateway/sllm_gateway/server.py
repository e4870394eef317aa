"""uvicorn with two additions: connections that a response can free, and a life that the daemon governs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sllm_gateway.asgi import Scope
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.protocol.errors import InvalidRequest


class Connection(HttpToolsProtocol):
    """A client's connection. Stands in ``scope["state"]["connection"]`` of its requests."""

    _lost = False
    _on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost = True
        if self._on_lost is not None:
            self._on_lost()

    @contextlib.contextmanager
    def watched(self, on_lost: Callable[[], None]) -> Iterator[None]:
        """Call ``on_lost`` if the client goes away inside, at once if it has gone."""
        self._on_lost = on_lost
        self.flow.resume_reading()  # a large body may have paused it, and what is not read has no end
        if self._lost:
            on_lost()
        try:
            yield
        finally:
            self._on_lost = None

    @property
    def writable(self) -> bool:
        """Whether the client takes what is written, so that a response need not wait."""
        return not self.flow.write_paused

    def chunks(self, scope: Scope) -> Callable[[bytes], None] | None:
        """What writes a piece of a streamed response's body as uvicorn's ``send`` does, in a third of its time. None
        where that cannot be: its headers are not sent, or another request follows it on this connection already."""
        cycle, write = self.cycle, self.transport.write
        if cycle is None or cycle.scope is not scope or not cycle.chunked_encoding or scope["method"] == "HEAD":
            return None

        def write_chunk(data: bytes) -> None:
            if not cycle.disconnected:
                write(b"%x\r\n%b\r\n" % (len(data), data))

        return write_chunk

    def unblock(self) -> None:
        """Let a response that waits for this client write its end: it goes to the buffer, however full that is."""
        self.resume_writing()

    def abort_after(self, seconds: float) -> None:
        """Reset the connection if the client has not taken what is buffered in ``seconds``."""
        self.loop.call_later(seconds, self._abort_if_stuck)

    def _abort_if_stuck(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()


class Server(uvicorn.Server):
    """Ends when ``should_exit`` is set; signals are the daemon's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(settings: GatewaySettings) -> socket.socket:
    """The listening socket. Raises ``InvalidRequest`` if the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(settings.backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another SLLM_PORT"
        ) from error
    return listener


def make_server(app: Any, settings: GatewaySettings) -> Server:
    """A server for ``app``, not started."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=settings.backlog,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    return Server(config)

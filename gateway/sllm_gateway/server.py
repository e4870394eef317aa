"""uvicorn with three additions: connections that a response can free, bounds on what comes before a request is one, and
a life that the daemon governs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Generator, Iterator
from functools import partial
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sllm_gateway import errors
from sllm_gateway.asgi import Scope
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.platform.listening import bound, is_nobodys
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol.errors import HeadTimeout, HeadTooLarge, InvalidRequest
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.limits import MAX_HEAD

_OFFER: Final = frozenset((b"upgrade", b"http2-settings"))
CLOSE_AFTER_S: Final = 10.0
"""A client that was too slow may read the error for so long; then its connection is reset."""
BEHIND: Final = 4 * MAX_HEAD
"""Bytes behind a request that are read while it is answered: who reads nothing does not hear of its client's end."""
PIPELINED: Final = 64
"""Requests that may wait behind the one that is answered: each is kilobytes here, and some twenty bytes to send."""
_KEEPS_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 9),
)
"""An answer in one piece is silent until it is there: whatever forgets such connections on the way (a NAT after 60 s)
is reminded, and a caller whose machine or network is gone is noticed in two minutes, who would be told nothing else."""
_BODY: Final = (
    "the request's body does not end as its headers say: Content-Length is its length in bytes, not in characters, and"
    " the one Transfer-Encoding that is read is chunked"
)
REST_S: Final = 2.0
"""So long after the drain what is still being written may take: less than a supervisor waits beyond the drain."""


class Connection(HttpToolsProtocol):
    """A client's connection. Stands in ``scope["state"]["connection"]`` of its requests.

    Until a request's headers are complete nobody has looked at its token, so what comes before is bounded in bytes
    (MAX_HEAD) and in time (once to twice ``head_s``). So is what may follow a body in chunks: nobody reads trailers.
    """

    _lost = False
    _on_lost: Callable[[], None] | None = None
    _head: int | None = None
    """Bytes so far of a head that is not complete, or since the last of a body that is not."""
    _coming = False
    """Whether a request has begun to come and is not whole."""
    _asked = False
    """Whether its headers are."""
    _fields = 0
    """Bytes of these so far: what is read at once may be a whole head."""
    _why: InvalidRequest | None = None
    """Why the parser was stopped."""
    _offers = False
    """Whether these offer an upgrade: it is read again without (``_Parser``)."""
    _look: asyncio.TimerHandle
    _behind = 0
    """Bytes that have come while a response is watched."""
    _freed = False
    """Whether its client has not taken what a response was freed of (``unblock``)."""
    _left = 0
    """Bytes that its client had still to take when it was last looked at, closed already or with an answer that waits
    for that."""

    def __init__(self, *args: Any, head_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser: Any = _Parser(self, self.parser)
        self._head_s = head_s
        self._served: object = self
        """The last request when this connection was looked at and waited for one; itself: it did not."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}
        self._look = self.loop.call_later(self._head_s, self._look_after)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost = True
        self._look.cancel()
        if self._on_lost is not None:
            self._on_lost()

    # --- before there is a request ------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        body = self._coming and self._asked
        super().data_received(data)
        if self._head is not None:
            if not body or self._asked:  # else it may all be of the request before
                self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(_too_large())
        elif self._coming:
            self._head = 0
        if self._on_lost is not None and self._behind < BEHIND:
            self._behind += len(data)
            self.flow.resume_reading()  # uvicorn reads no more once another request has begun

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head, self._coming, self._asked, self._fields = 0, True, False, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._asked:  # else it is a trailer: what a request asks for, and who asks, is decided by then
            self._count(len(name) + len(value))
            super().on_header(name, value)

    def _count(self, nbytes: int) -> None:
        self._fields += nbytes
        if self._fields > MAX_HEAD:
            self._stop(_too_large())

    def _stop(self, why: InvalidRequest) -> None:
        """Have the parser say that it has failed: nothing more is read of this connection."""
        self._why = why
        raise why

    def on_headers_complete(self) -> None:
        self._offers = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._offers:
            if len(self.pipeline) >= PIPELINED:
                self._stop(InvalidRequest(f"more than {PIPELINED} requests wait for their answers; send less at once"))
            self._head, self._asked = None, True
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                send = partial(_without_chunks, self.cycle, self.cycle.send)
                self.cycle.send = send  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._head = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._offers:
            self._head, self._coming = None, False
            super().on_message_complete()

    def head_without_offer(self) -> bytes:
        """Of the request whose headers offer to go on in another protocol: without that."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(each for each in _tokens(value) if each.lower() not in _OFFER)
            if name not in _OFFER and (value or name != b"connection"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def timeout_keep_alive_handler(self) -> None:
        """Closed it still waits for a client that does not take the end of its last response."""
        super().timeout_keep_alive_handler()
        self.abort_after(CLOSE_AFTER_S)

    def _look_after(self) -> None:
        """Close it if it has waited for the same request since it was last looked at. A connection that waits for its
        next request in good order is left to uvicorn's own timer."""
        self._look = self.loop.call_later(self._head_s, self._look_after)
        closing, served = self.transport.is_closing(), self.cycle
        answers = served is not None and not served.response_complete
        # Who watches its connection has a bound of its own.
        stuck = closing or (answers and self.flow.write_paused and self._on_lost is None)
        left, self._left = self._left, self.transport.get_write_buffer_size() if stuck else 0
        if 0 < self._left == left:  # else who takes nothing keeps it for ever
            self.transport.abort()
        if closing:
            return
        waits = not answers and self.timeout_keep_alive_task is None
        if waits and self._served is served:
            self._refuse(HeadTimeout(f"no request was here after {self._head_s:g} s; connect when there is one"))
            return
        self._served = served if waits else self

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error of ours as well; behind or in the body of a request that has no answer yet, in
        place of that: whose Content-Length counts characters would else hear nothing."""
        cycle = self.cycle
        # One that goes on without its caller, and whose body was taken, was not refused.
        taken = cycle is not None and not (cycle.more_body or cycle.body) and _goes_on(cycle.scope)
        if self._why or self.pipeline or cycle is None or cycle.response_started or taken:
            self._refuse(self._why or InvalidRequest(msg))
            return
        cycle.disconnected = True  # it writes nothing more
        cycle.message_event.set()
        self.transport.write(self._answer(InvalidRequest(_BODY)))
        self.transport.close()

    def _refuse(self, error: InvalidRequest) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else it would be read as part of the response
            self.transport.write(self._answer(error))
        self.transport.close()

    @staticmethod
    def _answer(error: InvalidRequest) -> bytes:
        body = errors.body(error, None, openai=False)
        lines = [*errors.headers(error, None), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % line for line in lines)
        return STATUS_LINE[error.status] + head + b"\r\n" + body

    # --- while it is answered -----------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self, on_lost: Callable[[], None]) -> Iterator[None]:
        """Call ``on_lost`` if the client goes away inside, at once if it has gone."""
        self._on_lost, self._behind = on_lost, 0
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
        self._freed = self._freed or self.flow.write_paused
        self.flow.resume_writing()

    def resume_writing(self) -> None:
        self._freed = False  # the client took it
        super().resume_writing()

    def on_response_complete(self) -> None:
        """After a response that was freed there is no other: nothing would hold that back."""
        if self._freed:
            self.transport.close()
        super().on_response_complete()

    def abort_after(self, seconds: float) -> None:
        """Reset the connection if the client has not taken what is buffered in ``seconds``."""
        self.loop.call_later(seconds, self._abort_if_stuck)

    def _abort_if_stuck(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()


class _Parser:
    """Reads requests that offer an upgrade, as Java's client does and ``curl --http2``, as if they did not: nobody here
    speaks anything else. llhttp takes their bodies for the other protocol, and so for the next request."""

    def __init__(self, connection: Connection, inner: Any) -> None:
        self._connection, self._inner = connection, inner

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                self._inner.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._connection._offers:  # CONNECT
                    raise
                data = self._connection.head_without_offer() + bytes(data[offer.args[0] :])
                self._inner = httptools.HttpRequestParser(self._connection)
                self._inner.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _goes_on(scope: Any) -> bool:
    """Whether what it asks for is done though its caller has gone: a call that is kept, all that is no call."""
    return scope["path"].startswith(f"{API}/") or any(
        name in (b"prefer", b"idempotency-key") for name, _ in scope["headers"]
    )


async def _without_chunks(cycle: Any, send: Callable[[Any], Awaitable[None]], message: Any) -> None:
    """``send`` to a client of HTTP/1.0, which knows no chunks: what has no length ends with its connection."""
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))
    elif not any(name == b"content-length" for name, _ in message["headers"]):
        cycle.chunked_encoding = False
    await send(message)


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the headers are larger than {MAX_HEAD} bytes; send less")


def _tokens(value: bytes) -> list[bytes]:
    return [each.strip() for each in value.split(b",") if each.strip()]


class Server(uvicorn.Server):
    """Ends by ``finish``; signals are the daemon's."""

    async def finish(self, serving: asyncio.Task[None], drain: Awaitable[None]) -> None:
        """Take no new connection, and end ``serving`` (which runs ``serve``) after ``drain``, however long that takes:
        what is still being written has REST_S then. Who reads on without end is cut off."""
        self.should_exit = True
        await drain
        done, _ = await asyncio.wait({serving}, timeout=REST_S)
        if not done:
            await end({serving, *self.server_state.tasks})
        elif error := serving.exception():
            raise error

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(settings: GatewaySettings, port: int | None = None) -> list[socket.socket]:
    """The listening sockets, one for each address that the host stands for, of calls or at another ``port``. Raises
    ``InvalidRequest`` if one cannot be had."""
    variable, port = ("SLLM_PORT", settings.port) if port is None else ("SLLM_METRICS_PORT", port)
    listeners: list[socket.socket] = []
    try:
        listeners = bound(settings.host, port, _KEEPS_ALIVE)  # those that they take have it as well
        for listener in listeners:
            listener.listen(settings.backlog)
            listener.setblocking(False)
    except OSError as error:
        for listener in listeners:
            listener.close()
        nobodys = is_nobodys(error)
        remedy = "SLLM_HOST is to be an address of this machine" if nobodys else f"choose another {variable}"
        raise InvalidRequest(f"cannot listen on {settings.host}:{port}: {error.strerror}; {remedy}") from error
    return listeners


def _is_news(record: logging.LogRecord) -> bool:
    """A reader that is cut off as this gateway stops is none: ``Front`` has said so, and uvicorn calls it a bug."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def make_server(app: Any, settings: GatewaySettings) -> Server:
    """A server for ``app``, not started."""
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    config = uvicorn.Config(
        app,
        http=partial(Connection, head_s=settings.head_timeout),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=settings.backlog,
        timeout_keep_alive=settings.keep_alive,
    )
    return Server(config)

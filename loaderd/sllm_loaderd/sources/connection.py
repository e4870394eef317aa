"""One HTTP/1.1 connection whose bodies are received straight into the caller's memory.

Less than an HTTP client on purpose: requests without a body, answers with a length. Plain sockets are read by
``recv(MSG_WAITALL)`` with the kernel's own time-out, one system call for megabytes and without the GIL.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlsplit

from sllm_loaderd.sources.proxies import Proxy, proxy_for
from sllm_runtime.protocol.errors import InvalidCheckpoint, ProtocolError
from sllm_runtime.protocol.limits import KIB

_MAX_HEAD: Final = 64 * KIB
_MOST_DIGITS: Final = 16
_PROXY_REFUSES: Final = 407
_KEPT: Final = "/%:@!$&'()*+,;=~?[]"
"""Not quoted again in a URL."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The scheme, host and port that a connection goes to."""

    secure: bool
    host: str
    port: int

    @property
    def netloc(self) -> str:
        """For the ``Host`` header: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def split_url(url: str) -> tuple[Origin, str]:
    """Origin and request target of an http(s) URL. Raises ``InvalidCheckpoint`` for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidCheckpoint(f"{url!r} is no URL: {error}", field="model") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise InvalidCheckpoint(f"{url!r} is no http(s) URL without a user name; give http://host/path", field="model")
    secure = parts.scheme == "https"
    target = quote(parts.path or "/", safe=_KEPT)
    target = f"{target}?{quote(parts.query, safe=_KEPT)}" if parts.query else target
    return Origin(secure, parts.hostname, port or (443 if secure else 80)), target


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]

    @property
    def length(self) -> int | None:
        """Bytes of the body, None if the answer does not say."""
        text = self.headers.get("content-length", "")
        plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
        return int(text) if plain and "transfer-encoding" not in self.headers else None


class Connection:
    """Used by one thread at a time; ``abort`` may come from any. ``OSError`` and ``ProtocolError`` end it."""

    def __init__(
        self,
        origin: Origin,
        connect_s: float,
        stall_s: float,
        context: ssl.SSLContext | None,
        proxy: Proxy | None = None,
    ) -> None:
        self.origin = origin
        self.reusable = False
        self._stall_s = stall_s
        self._ahead = b""
        self._asks = None if proxy is None or origin.secure else proxy
        self._socket = _connect(origin, connect_s, stall_s, context, proxy)

    @property
    def peer(self) -> Any:
        """The address that the origin's name led to (or the proxy's), as ``getpeername`` gives it. Raises
        ``ConnectionResetError``."""
        try:
            return self._socket.getpeername()
        except OSError as error:  # ENOTCONN, which is no ``ConnectionError``: the server has reset it
            raise ConnectionResetError(error.errno, "the connection was reset before the request") from error

    def request(self, method: str, target: str, headers: Mapping[str, str]) -> Head:
        """Send a request without a body and receive the head of its answer."""
        if self._asks is not None:  # of http a proxy is asked itself, by the whole URL
            target, headers = f"http://{self.origin.netloc}{target}", {**headers, **self._asks.headers}
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.origin.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = self._head()
        if self._asks is not None and head.status == _PROXY_REFUSES:
            raise ConnectionRefusedError(f"the proxy {self._asks.host}:{self._asks.port} answers with {head.status}")
        return head

    def receive(self, view: memoryview) -> int:
        """Bytes of the body put into ``view``: fewer than it has if none came for ``stall_s``, 0 at the end.

        Raises ``TimeoutError`` if not one came.
        """
        if self._ahead:
            count = min(len(self._ahead), len(view))
            view[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            return count
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.recv_into(view)
        try:
            return self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(f"nothing came for {self._stall_s:g} s") from error

    def abort(self) -> None:
        """Wake the thread that reads; its read ends as if the peer had closed."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def close(self) -> None:
        """Give back the descriptor."""
        self._socket.close()

    def _head(self) -> Head:
        data = self._ahead
        self._ahead = b""
        begun = time.monotonic()
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > _MAX_HEAD:
                raise ProtocolError(f"the answer's headers have more than {_MAX_HEAD} bytes")
            if time.monotonic() - begun >= self._stall_s:
                raise TimeoutError(f"no whole head of an answer came in {self._stall_s:g} s")
            try:
                more = self._socket.recv(_MAX_HEAD)
            except BlockingIOError as error:
                raise TimeoutError(f"no answer for {self._stall_s:g} s") from error
            if not more:
                raise ConnectionResetError("the connection was closed before the answer")
            data += more
        self._ahead = data[end + 4 :]
        head = parse_head(data[:end])
        closes = "close" in head.headers.get("connection", "").lower()
        self.reusable = head.length is not None and not closes
        return head


def parse_head(data: bytes) -> Head:
    """The head of an answer, without the empty line behind it. Raises ``ProtocolError``."""
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdigit() and len(status) == 3):
        raise ProtocolError(f"the answer is no HTTP/1.1: {first[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if version == "HTTP/1.0":
        headers["connection"] = "close"
    return Head(int(status), headers)


def _connect(
    origin: Origin, connect_s: float, stall_s: float, context: ssl.SSLContext | None, proxy: Proxy | None
) -> socket.socket:
    where = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
    plain = socket.create_connection(where, timeout=connect_s)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            if proxy is not None:
                proxy.tunnel(plain, origin.host, origin.port)
            secured = context.wrap_socket(plain, server_hostname=origin.host)
            secured.settimeout(stall_s)
            return secured
        plain.settimeout(None)
        fraction, whole = math.modf(stall_s)
        limit = struct.pack("ll", int(whole), int(fraction * 1e6))
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    except BaseException:
        plain.close()
        raise
    return plain


class Connections:
    """Keep-alive connections of one source, by origin. Thread-safe; as many as threads use it at once."""

    def __init__(self, connect_s: float, stall_s: float, *, direct: bool = False) -> None:
        self._direct = direct
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._closed = False
        self._context: ssl.SSLContext | None = None

    def take(self, origin: Origin) -> tuple[Connection, bool]:
        """A connection, and whether it has served before (then it may have been closed by the peer meanwhile)."""
        with self._lock:
            if idle := self._idle.get(origin):
                connection = idle.pop()
                self._busy.add(connection)
                return connection, True
        context = self._tls_context() if origin.secure else None
        proxy = None if self._direct else proxy_for(origin.secure, origin.host, origin.port)
        connection = Connection(origin, self._connect_s, self._stall_s, context, proxy)
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection, False
        connection.close()
        raise ConnectionAbortedError("the source is closed")

    def _tls_context(self) -> ssl.SSLContext:
        """Made once: reading the machine's certificates takes tens of milliseconds."""
        with self._lock:
            if self._context is None:
                self._context = ssl.create_default_context()
            return self._context

    def give_back(self, connection: Connection) -> None:
        """Its answer has been read whole."""
        with self._lock:
            self._busy.discard(connection)
            if connection.reusable and not self._closed:
                self._idle.setdefault(connection.origin, []).append(connection)
                return
        connection.close()

    def forget_idle(self, origin: Origin) -> None:
        """One that was kept turned out to be closed by the server, or silent: the others of that age are too."""
        with self._lock:
            idle = self._idle.pop(origin, [])
        for connection in idle:
            connection.close()

    def drop(self, connection: Connection) -> None:
        """It is of no further use."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close the idle ones, wake who reads from the others."""
        with self._lock:
            self._closed = True
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
            for connection in self._busy:
                connection.abort()
        for connection in idle:
            connection.close()

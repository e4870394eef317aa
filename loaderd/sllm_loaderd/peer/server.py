"""The HTTP server for peers: `GET /models/<hex>/<file>` signed with the token, ranges sent by ``sendfile``."""

from __future__ import annotations

import http.server
import logging
import os
import re
import socket
import socketserver
import struct
import sys
import threading
import time
from typing import Any, Final

from sllm_loaderd.peer.exports import Exports, Piece
from sllm_loaderd.peer.signature import Asked, address_of, refusal
from sllm_runtime.protocol.errors import InvalidRequest, ModelNotFound, SllmError, Unavailable

log = logging.getLogger(__name__)
_PATH: Final = re.compile(r"/models/([0-9a-f]{64})/([A-Za-z0-9._-]{1,255})")
_RANGE: Final = re.compile(r"bytes=(\d{1,16})-(\d{0,16})")
_PATIENCE_S: Final = 30
"""Longest silence of a peer, between requests too."""
_MOST_PEERS: Final = 128
"""Connections that have shown the token, each with a thread."""
_MOST_STRANGERS: Final = 64
"""Connections that have not: whoever reaches the port can make them. A peer's is one for some milliseconds."""
_STRANGE_S: Final = 10.0
"""After this a connection that has not shown the token ends, however much it says."""
_AGAIN_S: Final = 0.1
_SENT_AT_ONCE: Final = 2**30


def open_peer_server(listen: str, token: str, exports: Exports) -> PeerServer | None:
    """A server that has begun to serve at ``host:port``; None for no address.

    Raises ``InvalidRequest`` for a wrong address or without a token, ``Unavailable`` if the address is taken.
    """
    if not listen:
        return None
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal():
        raise InvalidRequest(f"SLLM_PEER_LISTEN: {listen!r} is no host:port", field="SLLM_PEER_LISTEN")
    if not token:
        raise InvalidRequest(
            "SLLM_PEER_TOKEN is empty: models are served to peers with a token only", field="SLLM_PEER_TOKEN"
        )
    server = PeerServer((host.strip("[]"), int(port)), token, exports)
    server.start()
    return server


class PeerServer(http.server.ThreadingHTTPServer):
    """Serves from its own threads, from ``start`` to ``close``. Raises ``Unavailable`` if the address is taken."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], token: str, exports: Exports) -> None:
        self.exports = exports
        self._token = token
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}
        """Connections that have not shown the token, and when they came: the oldest first."""
        self._peers: set[socket.socket] = set()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise Unavailable(f"peers cannot be served at {address[0]}:{address[1]}: {error.strerror}") from error
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="sllm-peers", daemon=True)

    def server_bind(self) -> None:
        """Without the name of its address, which nobody needs: 10 s are waited for a resolver that is silent."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End all connections, join all threads."""
        self.shutdown()
        with self._lock:
            for connection in (*self._strangers, *self._peers):
                _hang_up(connection)
        self.server_close()
        self._thread.join()

    def refusal(self, asked: Asked, shown: str) -> str:
        """Why a request is not served, empty: it is."""
        return refusal(self._token, shown, asked, time.time())

    def admit(self, connection: socket.socket) -> bool:
        """Whether a connection that has shown the token is served: it is a peer's now, if there are not too many."""
        with self._lock:
            if connection in self._strangers and len(self._peers) < _MOST_PEERS:
                del self._strangers[connection]
                self._peers.add(connection)
            return connection in self._peers

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # short of descriptors: who waits is heard when there are some, and is there all the while
            time.sleep(_AGAIN_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._strangers) >= _MOST_STRANGERS:  # the oldest is the least likely to be a peer
                self._end_stranger(next(iter(self._strangers)))
            self._strangers[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:
            log.warning("the peer %s is hung up on: %s", client_address, error)
            vars(self)["_threads"].reap()  # who closes joins what is there, and what never began cannot be joined
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Now and then: strangers have had their time."""
        over = time.monotonic() - _STRANGE_S
        with self._lock:
            for stranger in [stranger for stranger, came in self._strangers.items() if came < over]:
                self._end_stranger(stranger)

    def _end_stranger(self, stranger: socket.socket) -> None:
        """Its thread sees the end, and closes it."""
        del self._strangers[stranger]
        _hang_up(stranger)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._strangers.pop(request, None)
            self._peers.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away is nothing new; all else is a bug."""
        if not isinstance(sys.exception(), OSError):
            log.exception("serving the peer %s", client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PeerServer
    protocol_version = "HTTP/1.1"
    server_version = "sllm"
    sys_version = ""
    timeout = _PATIENCE_S

    def log_message(self, format: str, *arguments: object) -> None:
        log.debug(format, *arguments)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, *, body: bool) -> None:
        path = _PATH.fullmatch(self.path)
        here = address_of(self.connection.getsockname())
        asked = Asked(self.command, self.path, self.headers.get("Range", ""), here)
        if why := self.server.refusal(asked, self.headers.get("Authorization", "")):
            self._refuse(401, why)
        elif not self.server.admit(self.connection):
            self._refuse(503, f"{_MOST_PEERS} peers are served already")
        elif path is None:
            self._refuse(404, "there is no such file")
        else:
            try:
                self._answer(f"sha256:{path[1]}", path[2], body=body)
            except ModelNotFound as error:
                self._refuse(404, error.message)
            except SllmError as error:
                self._refuse(503, error.message)

    def _answer(self, digest: str, name: str, *, body: bool) -> None:
        total = self.server.exports.size(digest, name)
        # What a digest names never changes: neither does the tag.
        tag = f'"{digest[7:39]}-{name}"'
        if self.headers.get("If-Match", tag) != tag:
            self._refuse(412, "it is another file")
            return
        first, last, status = 0, total - 1, 200
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is not None:
            first, last, status = int(asked[1]), min(int(asked[2] or last), last), 206
            if first > last:
                self._refuse(416, f"it has {total} bytes")
                return
        if not body:
            self._head(status, tag, first, last, total)
            return
        with self.server.exports.pieces(digest, name, first, last + 1 - first) as pieces:
            self._head(status, tag, first, last, total)
            for piece in pieces:
                self._send(piece)

    def _head(self, status: int, tag: str, first: int, last: int, total: int) -> None:
        self.send_response(status)
        self.send_header("ETag", tag)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        self.end_headers()
        self.wfile.flush()

    def _send(self, piece: Piece) -> None:
        """Straight from the page cache or the chunk to the socket; the kernel waits for the peer, for so long."""
        self.connection.settimeout(None)
        limit = struct.pack("ll", _PATIENCE_S, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        done = 0
        while done < piece.nbytes:
            count = min(piece.nbytes - done, _SENT_AT_ONCE)
            sent = os.sendfile(self.connection.fileno(), piece.fd, piece.offset + done, count)
            if not sent:
                raise ConnectionAbortedError("the file ended while it was sent")  # the peer sees a cut answer
            done += sent
        self.connection.settimeout(_PATIENCE_S)

    def _refuse(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already

"""Messages over unix stream sockets: u32 big-endian length + payload, descriptors by SCM_RIGHTS.

``Splitter`` and ``Descriptors`` are sans-I/O; ``BlockingWire`` (threads) and ``AsyncWire`` (asyncio) add the socket.
A message that carries descriptors says how many in its own ``fds`` field; they arrive no later than its first byte.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence

from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.limits import MAX_FDS, MAX_MESSAGE

HEADER = struct.Struct(">I")
_READ = 256 * 1024
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_MAX_QUEUED = 8 * MAX_MESSAGE
_TURN = 64
"""Messages received without letting the loop's other tasks have their turn."""


class Splitter:
    """Bytes in, whole payloads out."""

    def __init__(self, max_message: int = MAX_MESSAGE) -> None:
        self._buffer = bytearray()
        self._max = max_message

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that are complete now. Raises ``ProtocolError`` when a length is above the limit."""
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            if length > self._max:
                raise ProtocolError(f"message of {length} bytes is above the limit of {self._max}")
            end = start + HEADER.size + length
            if end > len(self._buffer):
                break
            payloads.append(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return payloads


class Descriptors:
    """Descriptors that arrived and were not taken yet, at most ``most``; owns them until ``take``."""

    def __init__(self, most: int = 4 * MAX_FDS) -> None:
        self._most = most
        self._waiting: deque[int] = deque()

    def add(self, fds: Iterable[int]) -> None:
        self._waiting.extend(fds)
        if len(self._waiting) > self._most:
            self.close()
            raise ProtocolError("more descriptors arrived than messages name")

    def take(self, count: int) -> list[int]:
        """The next ``count`` descriptors; the caller owns them. Raises ``ProtocolError`` if they are not here."""
        if count > len(self._waiting):
            raise ProtocolError(f"message names {count} descriptors, {len(self._waiting)} arrived")
        return [self._waiting.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close what nobody took."""
        while self._waiting:
            os.close(self._waiting.popleft())


def _frame(payload: bytes) -> bytes:
    if len(payload) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(payload)} bytes is above the limit of {MAX_MESSAGE}")
    return HEADER.pack(len(payload)) + payload


def _receive(sock: socket.socket, fds: Descriptors) -> bytes:
    """One ``recvmsg``; b"" at the end of the stream."""
    data, ancillary, _flags, _address = sock.recvmsg(_READ, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            fds.add(numbers)
    return data


class BlockingWire:
    """For threads: one thread receives, any may send (the caller serialises sends). Owns the socket."""

    def __init__(self, sock: socket.socket, max_message: int = MAX_MESSAGE) -> None:
        self.sock = sock
        self.fds = Descriptors()
        self._splitter = Splitter(max_message)
        self._ready: deque[bytes] = deque()

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message. Raises ``OSError`` when the peer is gone."""
        data = memoryview(_frame(payload))
        if fds:
            data = data[socket.send_fds(self.sock, [data], list(fds)) :]
        if data:
            self.sock.sendall(data)

    def send_now(self, payloads: Iterable[bytes]) -> memoryview:
        """Send these messages as far as the socket takes them at once; the rest is to go first (``send_rest``)."""
        data = memoryview(b"".join(map(_frame, payloads)))
        try:
            while data:
                data = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        return data

    def send_rest(self, rest: memoryview) -> None:
        """Send what ``send_now`` returned."""
        if rest:
            self.sock.sendall(rest)

    def receive_all(self) -> list[bytes] | None:
        """All messages that are here, at least one, ``None`` at the end. Waits as ``receive``."""
        first = self.receive()
        if first is None:
            return None
        found = [first, *self._ready]
        self._ready.clear()
        return found

    def receive(self) -> bytes | None:
        """The next message, ``None`` at the end. The socket's own timeout applies (``TimeoutError``)."""
        while not self._ready:
            data = _receive(self.sock, self.fds)
            if not data:
                return None
            self._ready.extend(self._splitter.feed(data))
        return self._ready.popleft()

    def close(self) -> None:
        """Close the socket and all descriptors nobody took. Repeatable."""
        self.fds.close()
        self.sock.close()


class AsyncWire:
    """For asyncio (any loop): ``receive`` by one task, ``send`` by all; bounded in what waits to be sent.

    ``max_fds``: descriptors that may wait to be taken. 0 for a peer that is not trusted and has none to send.
    """

    def __init__(self, sock: socket.socket, max_message: int = MAX_MESSAGE, *, max_fds: int = 4 * MAX_FDS) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fds = Descriptors(max_fds)
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._splitter = Splitter(max_message)
        self._ready: deque[bytes] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._queued = 0
        self._writing = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._waiter: asyncio.Future[None] | None = None
        self.peer_gone = False
        """The peer takes nothing more; what it had sent before can still be received."""
        self.closed = False

    async def receive(self) -> bytes | None:
        """The next message, ``None`` at the end of the stream or after ``close``."""
        self._turn += 1
        if self._turn >= _TURN:
            self._turn = 0
            await asyncio.sleep(0)  # a peer that never stops sending holds up nobody else
        while not self._ready:
            data = await self._read()
            if not data:
                return None
            self._ready.extend(self._splitter.feed(data))
        return self._ready.popleft()

    async def _read(self) -> bytes:
        while not self.closed:
            try:
                return _receive(self.sock, self.fds)
            except (BlockingIOError, InterruptedError):
                await self._readable()
            except ConnectionError:
                return b""
        return b""

    async def _readable(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiter = waiter
        self._loop.add_reader(self.sock.fileno(), _wake, waiter)
        try:
            await waiter
        finally:
            if self.sock.fileno() >= 0:
                self._loop.remove_reader(self.sock.fileno())

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Queue one message, sent at once if the socket takes it; ``fds`` are duplicated, the caller keeps its own.

        Raises ``Unavailable`` when the peer is gone or takes nothing although much waits.
        """
        if self.closed or self.peer_gone:
            raise Unavailable("the other end of this socket is gone")
        if self._queued > _MAX_QUEUED:
            raise Unavailable(f"the other end of this socket takes nothing: {self._queued} bytes wait")
        data = memoryview(_frame(payload))
        self._out.append((data, _duplicates(fds)))
        self._queued += len(data)
        if not self._writing:
            self._flush()

    async def drain(self) -> None:
        """Wait until everything is handed to the kernel."""
        await self._drained.wait()

    def _flush(self) -> None:
        try:
            while self._out:
                data, fds = self._out[0]
                sent = socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data)
                for fd in fds:
                    os.close(fd)
                self._queued -= sent
                if sent == len(data):
                    self._out.popleft()
                else:
                    self._out[0] = (data[sent:], [])
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._drained.clear()
                self._loop.add_writer(self.sock.fileno(), self._flush)
            return
        except OSError:
            self.peer_gone = True
            self._drop()
        if self._writing:
            self._loop.remove_writer(self.sock.fileno())
            self._writing = False
        self._drained.set()

    def _drop(self) -> None:
        """Give up what waits to be sent."""
        for _data, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        self._queued = 0

    def close(self) -> None:
        """Close the socket, what waits, and all descriptors nobody took. Repeatable."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        self._drop()
        self.fds.close()
        self.sock.close()
        self._drained.set()
        if self._waiter is not None:
            _wake(self._waiter)


def _duplicates(fds: Sequence[int]) -> list[int]:
    """All of ``fds`` duplicated, or none. Raises ``OSError``."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return made


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""Messages over unix stream sockets, framed as ``framing`` says: ``BlockingWire`` for threads, ``AsyncWire`` for
asyncio."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sllm_runtime.platform.framing import READ_BYTES, Descriptors, Splitter, frame, receive
from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.limits import MAX_FDS, MAX_MESSAGE

_MAX_QUEUED = 8 * MAX_MESSAGE
_TURN = 64
"""Messages received without letting the loop's other tasks have their turn."""
_GONE: Final = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN))
_SHORT: Final = frozenset((errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM))
"""What the kernel lacks for a moment: memory, or room for descriptors on their way, which it counts for each user."""
SHORT_S: Final = 10.0
"""What it has no room for is sent again for so long."""
_AGAIN_S: Final = 0.05


class BlockingWire:
    """For threads: one thread receives, any may send (the caller serialises sends). Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds = Descriptors()
        self._splitter = Splitter()
        self._read_into = bytearray(READ_BYTES)
        self._ready: deque[bytes] = deque()

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message. Raises ``OSError`` when the peer is gone."""
        data = memoryview(frame(payload))
        if fds:
            data = data[socket.send_fds(self.sock, [data], list(fds)) :]
        if data:
            self.sock.sendall(data)

    def send_now(self, payloads: Iterable[bytes]) -> memoryview:
        """Send these messages as far as the socket takes them at once; the rest is to go first (``send_rest``)."""
        data = memoryview(b"".join(map(frame, payloads)))
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
            data = receive(self.sock, self.fds, self._read_into)
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

    def __init__(self, sock: socket.socket, *, max_fds: int = 4 * MAX_FDS) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fds = Descriptors(max_fds)
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._splitter = Splitter()
        self._read_into = bytearray(READ_BYTES)
        self._ready: deque[bytes] = deque()
        self._out: deque[tuple[memoryview, list[int], bool]] = deque()
        self._queued = 0
        """Bytes that wait, without those that the peer has granted."""
        self._writing = False
        self._again: asyncio.TimerHandle | None = None
        self._short_since: float | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[bytes], None] | None = None
        self._reading = False
        """Whether the loop watches the socket."""
        self._ended = False
        self._failure: Exception | None = None
        self.peer_gone = False
        """Nothing more can be sent; what the peer had sent before it went can still be received."""
        self.closed = False

    async def receive(self) -> bytes | None:
        """The next message, ``None`` at the end of the stream or after ``close``. Raises ``ProtocolError`` and
        ``OSError`` if none can be read, ``Unavailable`` once none can be sent although the peer is there."""
        self._turn += 1
        if self._turn >= _TURN:
            self._turn = 0
            await asyncio.sleep(0)  # a peer that never stops sending holds up nobody else
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._ended or self.closed:
                return None
            await self._readable()
        return self._ready.popleft()

    async def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call ``listener`` with each message where it is read, without a task's turn for it, until the end of the
        stream or ``close``. Raises as ``receive``, and what ``listener`` raises."""
        self._hand_on(listener)
        self._listener = listener
        try:
            while not (self._failure or self._ended or self.closed):
                await self._readable()
        finally:
            self._listener = None
        if self._failure is not None:
            raise self._failure

    def _hand_on(self, listener: Callable[[bytes], None]) -> None:
        while self._ready:
            listener(self._ready.popleft())

    async def _readable(self) -> None:
        """Wait for ``_read`` to have something. It stays registered while messages are asked for one after another."""
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self.sock.fileno(), self._read)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _read(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._stop_reading()  # nobody asks: what comes stays with the kernel
            return
        try:
            data = receive(self.sock, self.fds, self._read_into)
            self._ready.extend(self._splitter.feed(data))
            self._ended = not data
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            self._ended = True
        except (ProtocolError, OSError) as error:
            self._failure = error
        if self._listener is not None:
            try:
                self._hand_on(self._listener)
            except Exception as error:  # raised again by who listens
                self._failure = error
        if self._ended or self._failure is not None:
            self._stop_reading()
        if self._ready or not self._reading:
            _wake(self._waiter)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.sock.fileno())

    def send(self, payload: bytes, fds: Sequence[int] = (), *, granted: bool = False) -> None:
        """Queue one message, sent at once if the socket takes it; ``fds`` are duplicated, the caller keeps its own.
        ``granted``: it was asked for, with room for it, and may wait however long that takes.

        Raises ``Unavailable`` when the peer is gone or takes nothing although much else waits.
        """
        self._send(frame(payload), fds, granted)

    def send_together(self, payloads: Iterable[bytes]) -> None:
        """As ``send``, in one write: the peer reads all of them at once, if its socket has room."""
        self._send(b"".join(map(frame, payloads)), (), False)

    def _send(self, framed: bytes, fds: Sequence[int], granted: bool) -> None:
        if self.closed or self.peer_gone:
            raise Unavailable("the other end of this socket is gone")
        if self._queued > _MAX_QUEUED and not granted:
            raise Unavailable(f"the other end of this socket takes nothing: {self._queued} bytes wait")
        data = memoryview(framed)
        self._out.append((data, _duplicates(fds), granted))
        self._queued += 0 if granted else len(data)
        if not self._writing and self._again is None:
            self._flush()

    async def drain(self) -> None:
        """Wait until everything is handed to the kernel."""
        await self._drained.wait()

    def _flush(self) -> None:
        self._again = None
        try:
            while self._out:
                data, fds, granted = self._out[0]
                sent = socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data)
                for fd in fds:
                    os.close(fd)
                self._queued -= 0 if granted else sent
                self._short_since = None
                if sent == len(data):
                    self._out.popleft()
                else:
                    self._out[0] = (data[sent:], [], granted)
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._drained.clear()
                self._loop.add_writer(self.sock.fileno(), self._flush)
            return
        except OSError as error:
            if error.errno in _SHORT and self._later():
                return
            self._lose(error)
        self._stop_writing()
        self._drained.set()

    def _later(self) -> bool:
        """Try again in a moment. False: that has been done for SHORT_S."""
        now = self._loop.time()
        if self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= SHORT_S:
            return False
        self._stop_writing()
        self._again = self._loop.call_later(_AGAIN_S, self._flush)
        self._drained.clear()
        return True

    def _lose(self, error: OSError) -> None:
        """Nothing more can be sent. A peer that is gone ends the stream; of one that is not, who receives is told."""
        self.peer_gone = True
        self._drop()
        if error.errno not in _GONE:
            self._failure = Unavailable(f"nothing can be sent over this socket: {error}")
            self._stop_reading()
            if self._waiter is not None:
                _wake(self._waiter)

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self.sock.fileno())

    def _drop(self) -> None:
        """Give up what waits to be sent."""
        for _data, fds, _granted in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        self._queued = 0

    def close(self) -> None:
        """Close the socket, what waits, and all descriptors nobody took. Repeatable."""
        if self.closed:
            return
        self.closed = True
        self._stop_reading()
        self._stop_writing()
        if self._again is not None:
            self._again.cancel()
        self._drop()
        self.fds.close()
        self.sock.close()
        self._read_into = bytearray()  # who holds a closed wire, in a cycle for long perhaps, holds no READ_BYTES
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

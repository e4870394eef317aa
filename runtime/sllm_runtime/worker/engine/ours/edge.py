"""One process's place among stages: an edge that messages come from and one that they go to. Used from one thread.

While a message waits to be taken, what comes is read, so stages that send to each other in a ring never wait for one
another. What may come is bounded by the steps that may be on their way.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from sllm_runtime.platform.framing import READ_BYTES, Descriptors, Splitter, frame, receive
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InstanceLost, ProtocolError, SllmError
from sllm_runtime.protocol.limits import MAX_PART
from sllm_runtime.protocol.stages import MAX_STEPS, Failed, Hello, OnEdge, Rows
from sllm_runtime.worker.engine.ours import ring
from sllm_runtime.worker.engine.ours.ring import Slots

_STEP_MESSAGES: Final = 3
"""A step's announcement, its rows, and the adapters that it is the first to name."""
_OTHER_MESSAGES: Final = 64


def dtype_name(dtype: torch.dtype) -> str:
    """As ``Hello.dtype`` has it."""
    return str(dtype).removeprefix("torch.")


class Edges:
    """Owns both sockets. ``patience_s``: longest wait for a peer that owes something.

    Unix sockets join processes of one node: rows then travel in shared memory, otherwise in the stream.
    """

    def __init__(
        self,
        before: socket.socket,
        behind: socket.socket,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patience_s = patience_s
        self.shared = behind.family == socket.AF_UNIX
        self.before, self.behind = "the stage before", "the stage behind"
        """Who they are, for errors."""
        self._before, self._behind = before, behind
        self.told = False
        """Whether a ``Failed`` came."""
        self._ended = False
        self._clock = clock
        self._splitter = Splitter()
        self._read_into = bytearray(READ_BYTES)
        self._fds = Descriptors(MAX_STEPS + 1)
        self._inbox: deque[bytes] = deque()
        self._most = _OTHER_MESSAGES
        self._into: torch.Tensor | None = None
        self._from: torch.Tensor | None = None
        self._slots: Slots | None = None
        for each in (before, behind):
            each.setblocking(False)
            if each.family != socket.AF_UNIX:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def duplex(cls, sock: socket.socket, *, patience_s: float) -> Edges:
        """Both edges over one stream, which it owns."""
        return cls(sock, sock.dup(), patience_s=patience_s)

    def open(self, hello: Hello) -> None:
        """Say ``hello`` to the stage behind, with the memory that rows will be in."""
        self._slots = Slots.of(hello)
        parts = self._slots.rows * self._slots.row_bytes // MAX_PART
        self._most = hello.slots * (_STEP_MESSAGES + parts) + _OTHER_MESSAGES
        if not hello.shared:
            self.send(hello)
            return
        fd, self._into = ring.create(self._slots)
        try:
            self.send(hello, (fd,))
        finally:
            os.close(fd)

    def accept(self, timeout_s: float) -> Hello:
        """The hello of the stage before. Raises ``ProtocolError``, ``InstanceLost``, or the error that it tells."""
        hello = self.receive(timeout_s)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a stage began with {type(hello).__name__}, not Hello")
        slots = Slots.of(hello)
        if hello.shared:
            fd = self.descriptor()
            try:
                self._from = ring.attach(fd, slots)
            finally:
                os.close(fd)
        return hello

    def send(self, message: OnEdge, fds: Sequence[int] = ()) -> None:
        """Hand ``message`` on. Raises ``InstanceLost`` if the stage behind is gone or takes nothing."""
        data, beside = memoryview(frame(codec.pack(message))), list(fds)
        until = self._clock() + self.patience_s
        try:
            while data:
                try:
                    sent = socket.send_fds(self._behind, [data], beside) if beside else self._behind.send(data)
                    data, beside = data[sent:], []
                except BlockingIOError:
                    self._wait(until, sending=True)
        except OSError as error:
            raise InstanceLost(f"{self.behind} is gone: {error.strerror or error}") from error

    def send_rows(self, step: int, rows: torch.Tensor) -> None:
        """Hand on the rows of a step; waits for the device that they are on."""
        assert self._slots is not None
        if rows.dtype != self._slots.dtype or rows.shape[0] > self._slots.rows:
            raise ProtocolError(f"{rows.dtype} rows {tuple(rows.shape)} do not fit {self._slots}")
        count = rows.shape[0]
        if self._into is not None:
            self._into[step % self._slots.count, :count].copy_(rows)
            self.send(Rows(step, count))
            return
        content = rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for at in range(0, max(1, len(content)), MAX_PART):
            self.send(Rows(step, count, at, content[at : at + MAX_PART]))

    def receive_rows(self, step: int, count: int) -> torch.Tensor:
        """The ``count`` rows of ``step``, a copy on the CPU. Raises ``ProtocolError`` if something else comes."""
        assert self._slots is not None
        slots = self._slots
        first = self._rows(step, count, 0)
        if self._from is not None:
            return self._from[step % slots.count, :count].clone()
        content = bytearray(first.data)
        while len(content) < count * slots.row_bytes:
            more = self._rows(step, count, len(content)).data
            if not more:
                raise ProtocolError(f"rows of step {step} end after {len(content)} bytes")
            content += more
        if len(content) != count * slots.row_bytes:
            raise ProtocolError(f"{count} rows of step {step} came as {len(content)} bytes")
        if not count:
            return torch.empty(0, slots.hidden, dtype=slots.dtype)
        return torch.frombuffer(content, dtype=slots.dtype).view(count, slots.hidden)

    def _rows(self, step: int, count: int, at: int) -> Rows:
        message = self.receive(self.patience_s)
        if not isinstance(message, Rows) or (message.step, message.rows, message.at) != (step, count, at):
            raise ProtocolError(f"{count} rows of step {step} from byte {at} on were due, {_words(message)} came")
        return message

    def receive(self, timeout_s: float | None) -> OnEdge:
        """The next message; without ``timeout_s`` for as long as the stage before lives. Raises ``InstanceLost`` when
        it is gone or says nothing in time, and the error that a ``Failed`` tells."""
        until = None if timeout_s is None else self._clock() + timeout_s
        while not self._inbox:
            self._wait(until, sending=False)
        message: OnEdge = codec.unpack(OnEdge, self._inbox.popleft())  # type: ignore[arg-type]
        if isinstance(message, Failed):
            self.told = True
            raise message.error.to_error()
        return message

    def descriptor(self) -> int:
        """The one that the last message says came along; the caller owns it. Raises ``ProtocolError``."""
        (fd,) = self._fds.take(1)
        return fd

    def tell(self, error: SllmError) -> None:
        """Send why nothing more is computed, if anybody is there to hear it."""
        with contextlib.suppress(SllmError, OSError):
            self.send(Failed(error.body()))

    def close(self) -> None:
        """Give everything back; both neighbours see it at once. Repeatable."""
        self._fds.close()
        self._before.close()
        self._behind.close()
        self._into = self._from = None

    def _wait(self, until: float | None, *, sending: bool) -> None:
        """Until a message has come, or with ``sending`` until the stage behind takes more."""
        poll = select.poll()
        if not self._ended:
            poll.register(self._before, select.POLLIN)
        elif not sending:
            raise InstanceLost(f"{self.before} is gone")
        if sending:
            poll.register(self._behind, select.POLLOUT)
        left = None if until is None else max(0.0, until - self._clock()) * 1000
        ready = dict(poll.poll(left))
        if not ready:
            who = f"{self.behind} takes" if sending else f"{self.before} says"
            raise InstanceLost(f"{who} nothing although it is due")
        if self._before.fileno() in ready:
            self._read()

    def _read(self) -> None:
        data: bytes | memoryview
        try:
            data = receive(self._before, self._fds, self._read_into)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._ended = not data  # what had come before is still to be read
        self._inbox.extend(self._splitter.feed(data))
        if len(self._inbox) > self._most:
            raise ProtocolError("a stage sends more than the steps that are on their way")


def _words(message: OnEdge) -> str:
    if isinstance(message, Rows):
        return f"{message.rows} rows of step {message.step} from byte {message.at} on"
    return type(message).__name__

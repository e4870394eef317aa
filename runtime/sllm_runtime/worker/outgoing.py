"""What one call sends: a numbered stream of frames within its gateway's credit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec

from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.clipping import clip_error
from sllm_runtime.protocol.errors import Cancelled, ErrorBody
from sllm_runtime.protocol.frames import End, Frame, FrameKind
from sllm_runtime.worker.sender import Sender


class CallEnded(BaseException):
    """Raised inside a function whose call was cancelled: no ``except Exception`` of a user's stops it."""

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(body.message)
        self.body = body


class Outgoing:
    """The frames of one call. ``send`` is for threads, ``asend`` for coroutines; one producer at a time.

    Both wait for credit, and raise ``CallEnded`` once the call is cancelled.
    """

    def __init__(self, number: int, sender: Sender, credit: int) -> None:
        self._number = number
        self._sender = sender
        self._index = 0
        self._sent = 0
        self._limit = credit
        self._ended = False
        self._cancelled: ErrorBody | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiter: asyncio.Event = asyncio.Event()

    @property
    def cancelled(self) -> ErrorBody | None:
        """Why this call is to end, if it is."""
        return self._cancelled

    def check(self) -> None:
        """Raise ``CallEnded`` if the call is cancelled."""
        if self._cancelled is not None:
            raise CallEnded(self._cancelled)

    def grant(self, limit: int) -> None:
        """Frames may be sent up to ``limit``, the sum of their costs. On the loop."""
        with self._changed:
            self._limit = max(self._limit, limit)
            self._changed.notify_all()
        self._waiter.set()

    def cancel(self, body: ErrorBody) -> None:
        """The producer is to stop at its next step. On the loop."""
        with self._changed:
            self._cancelled = self._cancelled or body
            self._changed.notify_all()
        self._waiter.set()

    def send(self, kind: FrameKind, data: bytes, deadline_s: float) -> None:
        """Send one value, in parts where it needs them, waiting at most ``deadline_s`` for credit."""
        for part, more in _parts(data):
            with self._changed:
                room = self._may(part) or self._changed.wait_for(
                    lambda part=part: self._may(part),  # type: ignore[misc]
                    timeout=deadline_s,
                )
                self._push(kind, part, more, room)
            self._sender.go()

    async def asend(self, kind: FrameKind, data: bytes, deadline_s: float) -> None:
        """``send`` for coroutines."""
        for part, more in _parts(data):
            room = self._may(part) or await self._credit(part, deadline_s)
            with self._lock:
                self._push(kind, part, more, room)
            if self._sender.go():
                await self._sender.turn()

    async def _credit(self, part: bytes, deadline_s: float) -> bool:
        """Whether there is room for it in time."""
        try:
            async with asyncio.timeout(deadline_s):
                while not self._may(part):
                    self._waiter.clear()
                    await self._waiter.wait()
        except TimeoutError:
            return False
        return True

    def try_send(self, kind: FrameKind, data: bytes) -> bool:
        """Send a small value if there is credit for it now. From any thread, also the loop's."""
        with self._lock:
            if self._cancelled is not None or self._ended or not self._fits(data):
                return False
            self._push(kind, data, False, True)
        self._sender.go()
        return True

    def end(self, end: End) -> None:
        """The last frame, in one part; needs no credit. A second one is ignored."""
        if end.error is not None:  # it may quote what the caller sent
            end = msgspec.structs.replace(end, error=clip_error(end.error))
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._sender.queue(self._number, Frame(self._index, FrameKind.END, codec.pack(end)))
            self._index += 1
        self._sender.go()

    def _may(self, part: bytes) -> bool:
        return self._cancelled is not None or self._fits(part)

    def _fits(self, part: bytes) -> bool:
        return self._sent + len(part) + limits.FRAME_COST <= self._limit

    def _push(self, kind: FrameKind, part: bytes, more: bool, room: bool) -> None:
        if self._cancelled is not None:
            raise CallEnded(self._cancelled)
        if not room:
            raise CallEnded(Cancelled("nobody took this call's output").body())
        if self._ended:
            raise CallEnded(Cancelled("output after the end of its call").body())
        frame = Frame(self._index, kind, part, more)
        self._sender.queue(self._number, frame)
        self._index += 1
        self._sent += frame.cost


def _parts(data: bytes) -> Sequence[tuple[bytes, bool]]:
    if len(data) <= limits.MAX_PART:
        return ((data, False),)
    starts = range(0, len(data), limits.MAX_PART)
    return [(data[start : start + limits.MAX_PART], start + limits.MAX_PART < len(data)) for start in starts]

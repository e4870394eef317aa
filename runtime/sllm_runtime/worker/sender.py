"""What leaves a worker: all messages to the invoker's socket, frames as soon as they are made, the rest by a thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import psutil

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.frames import End, Frame, FrameKind
from sllm_runtime.protocol.worker import CallFrames, FromWorker, Heartbeat, Log
from sllm_runtime.worker.words import sendable

_MAX_LOG_BYTES = limits.MIB
_LINE_COST = 128
"""What a line takes beside its text, here and on its way."""
_TOGETHER_S = 0.001
_AT_ONCE = 4
_TURN_S = 0.002
"""An async function that yields without ever waiting holds up the loop no longer than this, nor do its outputs wait."""


class Pace:
    """Allows ``most`` events at once, and one more for each ``every_s`` seconds that pass."""

    def __init__(self, most: int, every_s: float, now: float) -> None:
        self._most = most
        self._every_s = every_s
        self._left = float(most)
        self._since = now

    def take(self, now: float) -> bool:
        """Whether one more may be now; then it is counted."""
        self._left = min(self._most, self._left + (now - self._since) / self._every_s)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Sender:
    """The only way to the invoker's socket.

    Frames are written by who made them, if nobody writes just now: a thread at once, the event loop at the end of its
    turn, in one piece for all calls. Neither ever waits for the socket: what it does not take, what came meanwhile, and
    everything that is no frame is written by a thread, which also beats.
    """

    def __init__(self, wire: BlockingWire, state: Callable[[], Heartbeat]) -> None:
        """``state``: what a heartbeat says of the calls. From the sender's thread."""
        self._wire = wire
        self._state = state
        # Reentrant: what a garbage collection runs under this lock may print.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._messages: deque[FromWorker] = deque()
        self._frames: dict[int, list[Frame]] = {}
        self._flushes: list[threading.Event] = []
        self._log_bytes = 0
        self._dropped = 0
        self._closing = False
        self._writing = threading.Lock()
        """Held by who writes. Whoever does not get it leaves its frames to the one who has it."""
        self._rest = memoryview(b"")
        """What the socket did not take; goes first."""
        self._gone = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._turned = time.monotonic()
        """When the loop is known to have turned last."""
        self._turning = False
        """Whether frames wait for the end of the loop's turn."""
        self._pace = Pace(_AT_ONCE, _TOGETHER_S, self._turned)
        """Of writes of the loop's frames that need not wait."""
        self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._started = False
        self._rss = 0

    def start(self) -> None:
        """Start writing and beating."""
        self._started = True
        self._thread.start()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on heartbeats tell the age of this loop's last turn, and its frames leave together. On the loop."""
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._beaten = self._turned = time.monotonic()

    def send(self, body: object) -> None:
        """Queue one message; messages and frames keep their order among their own kind."""
        with self._changed:
            self._messages.append(FromWorker(body))  # type: ignore[arg-type]
            self._changed.notify()

    def flush(self, timeout_s: float) -> None:
        """Wait until what was queued before is written: what follows may end this process."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return
        written = threading.Event()
        with self._changed:
            self._flushes.append(written)
            self._changed.notify()
        written.wait(timeout_s)

    def log(self, number: int | None, stream: str, text: str, level: str = "info") -> None:
        """Queue a log line. It never blocks: above 1 MiB of waiting lines they are dropped and counted."""
        text = sendable(text)
        with self._changed:
            cost = len(text) + _LINE_COST
            if self._log_bytes + cost > _MAX_LOG_BYTES:
                self._dropped += 1
                return
            self._log_bytes += cost
            self._messages.append(FromWorker(Log(number=number, stream=stream, text=text, level=level)))
            self._changed.notify()

    def queue(self, number: int, frame: Frame) -> None:
        """Keep one frame for ``go``; its credit was taken by ``Outgoing``, which bounds this queue."""
        with self._lock:
            self._frames.setdefault(number, []).append(frame)

    def go(self) -> bool:
        """Have what is queued written. On the loop: whether it was held up so long that it should turn now."""
        if threading.get_ident() != self._loop_thread:
            self._write_now()
            return False
        if not self._turning:
            self._turning = True
            assert self._loop is not None
            self._loop.call_soon(self._end_of_turn)
        now = time.monotonic()
        if now - self._turned < _TURN_S:
            return False
        self._turned = now
        self._pace.take(now)
        self._write_now()
        return True

    async def turn(self) -> None:
        """Let the loop turn: others have theirs, cancellations arrive."""
        await asyncio.sleep(0)
        self._turned = time.monotonic()

    def _end_of_turn(self) -> None:
        """Write at once, but on average once a millisecond: each message costs every process on its way more than the
        frames in it."""
        self._turned = time.monotonic()
        if self._pace.take(self._turned):
            self._write_turn()
        else:
            assert self._loop is not None
            self._loop.call_later(_TOGETHER_S, self._write_turns)

    def _write_turns(self) -> None:
        self._pace.take(time.monotonic())
        self._write_turn()

    def _write_turn(self) -> None:
        self._turning = False
        self._write_now()

    def _write_now(self) -> None:
        """Write what waits, as far as the socket takes it."""
        # Looked at again after each release: who did not get the lock meanwhile has relied on it.
        while self._frames and self._started and self._writing.acquire(blocking=False):
            try:
                if not self._rest and not self._gone:
                    self._rest = self._wire.send_now(self._collect())
            except (OSError, ValueError):
                self._gone = True  # the invoker is dead; the kernel kills this process with its parent
            finally:
                self._writing.release()
            if self._rest or self._gone:
                with self._changed:
                    self._changed.notify()
                return

    def mute(self) -> None:
        """Nothing is written any more: in a child that user code forked, which would speak as its parent.

        Of what the parent's threads held when it forked nothing is ever released there, so locks are made anew.
        """
        self._gone = True
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._writing = threading.Lock()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, then end the thread. Repeatable."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        beat_at = time.monotonic()
        process = psutil.Process()
        while True:
            with self._changed:
                self._changed.wait_for(self._work, timeout=max(0.0, beat_at - time.monotonic()))
            if time.monotonic() >= beat_at:
                self.send(self._beat(process))
                beat_at = time.monotonic() + limits.HEARTBEAT_S
            with self._writing:
                with self._lock:
                    flushes, self._flushes = self._flushes, []
                    closing = self._closing
                going_on = self._write()
            for written in flushes:
                written.set()
            if not going_on or (closing and not self._messages):
                return

    def _work(self) -> bool:
        return bool(self._messages or self._frames or self._rest or self._flushes or self._closing)

    def _write(self) -> bool:
        """Write everything, however long the socket takes."""
        if self._gone:
            return False
        try:
            self._wire.send_rest(self._rest)
            self._rest = memoryview(b"")
            self._wire.send_rest(self._wire.send_now(self._collect()))
        except (OSError, ValueError):
            self._gone = True
        return not self._gone

    def _collect(self) -> list[bytes]:
        """All that waits. Logs first: a line printed before an output is in the log before the caller has that."""
        with self._lock:
            messages, self._messages = self._messages, deque()
            frames, self._frames = self._frames, {}
            if self._dropped:
                messages.append(_dropped(self._dropped))
            self._log_bytes = self._dropped = 0
        return [_packed(message) for message in itertools.chain(messages, _batches(frames))]

    def _beat(self, process: psutil.Process) -> Heartbeat:
        age = 0.0
        if self._loop is not None:
            age = time.monotonic() - self._beaten
            try:
                self._loop.call_soon_threadsafe(self._beat_heard)
            except RuntimeError:
                self._loop = None
        loop_s = max(0.0, age - limits.HEARTBEAT_S)
        with contextlib.suppress(OSError, MemoryError, psutil.Error):  # its function may have all descriptors
            self._rss = process.memory_info().rss
        return msgspec.structs.replace(self._state(), loop_s=loop_s, rss=self._rss)

    def _beat_heard(self) -> None:
        self._beaten = time.monotonic()


def _packed(message: FromWorker) -> bytes:
    """As it travels. What cannot must not cost the others that wait with it: it is told of in its place."""
    try:
        packed = codec.pack(message)
    except (TypeError, ValueError) as error:  # a text that has no UTF-8, or is none
        return codec.pack(_instead(message, str(error)))
    if len(packed) > limits.MAX_MESSAGE:
        why = f"{len(packed)} bytes are above the limit of {limits.MAX_MESSAGE}"
        return codec.pack(_instead(message, why))
    return packed


def _instead(message: FromWorker, why: str) -> FromWorker:
    """The calls that ``message`` has frames of end: with a frame left out they cannot go on."""
    text = f"{type(message.body).__name__} of this worker cannot be sent: {why}"
    if not isinstance(message.body, CallFrames):
        return FromWorker(Log(number=None, stream="stderr", text=sendable(text), level="error"))
    end = codec.pack(End(error=ProtocolError(text).body()))
    ended = [(number, (Frame(frames[0].index, FrameKind.END, end),)) for number, frames in message.body.items]
    return FromWorker(CallFrames(tuple(ended)))


def _dropped(lines: int) -> FromWorker:
    text = f"({lines} lines dropped: written faster than they could be taken)"
    return FromWorker(Log(number=None, stream="stderr", text=text, level="warning"))


def _batches(frames: dict[int, list[Frame]]) -> Iterator[FromWorker]:
    """``CallFrames`` of at most BATCH_BYTES, each call's frames together and in order."""
    batch: list[tuple[int, tuple[Frame, ...]]] = []
    size = 0
    for number, items in frames.items():
        start = 0
        for at, frame in enumerate(items):
            nbytes = len(frame.data) + limits.FRAME_ENVELOPE
            if size and size + nbytes > limits.BATCH_BYTES:
                if at > start:
                    batch.append((number, tuple(items[start:at])))
                yield FromWorker(CallFrames(tuple(batch)))
                batch, size, start = [], 0, at
            size += nbytes
        batch.append((number, tuple(items[start:])))
    if batch:
        yield FromWorker(CallFrames(tuple(batch)))

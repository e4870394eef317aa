"""Reliable, ordered, flow-controlled delivery of a call's frames over a bus that may lose, repeat and re-order.

Sans-I/O: the owner feeds what arrived and the time, and asks what to send. ``Outbox`` keeps frames until they are
acknowledged; ``Inbox`` hands each frame on once and in order. Credit is a cumulative limit in bytes (as QUIC's
MAX_DATA), so a repeated or re-ordered acknowledgement can do no harm. A frame takes ``Frame.cost`` of it, which is more
than its data: bytes below are such bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.frames import Frame, FrameKind

_END: Final = FrameKind.END  # an enum's member is found through its class: for every token that counts


class Outbox:
    """The sending side of one stream. ``limit``: bytes that may be sent before the first acknowledgement."""

    def __init__(self, limit: int = limits.WINDOW) -> None:
        self.limit = limit
        self.next_index = 0
        """Index the next pushed frame gets."""
        self.acked = 0
        self.pushed_bytes = 0
        """Bytes of all frames but the end, which needs no credit."""
        self._unacked: deque[Frame] = deque()
        self._cursor = 0
        """Next index to be sent; a resend moves it back."""
        self.sent_bytes = 0
        """Cumulative bytes of the frames that were taken to be sent; a resend takes them back."""
        self.ended = False

    def push(self, kind: FrameKind, data: bytes, *, more: bool = False) -> Frame:
        """Append one frame. Raises ``ProtocolError`` after the end or above MAX_PART."""
        if self.ended:
            raise ProtocolError("frame after the end of its stream")
        if len(data) > limits.MAX_PART:
            raise ProtocolError(f"frame of {len(data)} bytes is above the limit of {limits.MAX_PART}")
        frame = Frame(self.next_index, kind, data, more)
        self.next_index += 1
        self.ended = kind is _END
        if not self.ended:
            self.pushed_bytes += frame.cost
        self._unacked.append(frame)
        return frame

    def extend(self, frames: Iterable[Frame]) -> None:
        """Append frames that carry their index already. Raises ``ProtocolError`` as ``push``, and for a wrong index."""
        for frame in frames:
            if frame.index != self.next_index:
                raise ProtocolError(f"frame {frame.index} of a stream whose next is {self.next_index}")
            if self.ended:
                raise ProtocolError("frame after the end of its stream")
            size = len(frame.data)
            if size > limits.MAX_PART:
                raise ProtocolError(f"frame of {size} bytes is above the limit of {limits.MAX_PART}")
            self._unacked.append(frame)
            self.next_index += 1
            if frame.kind is _END:
                self.ended = True
            else:
                self.pushed_bytes += size + limits.FRAME_COST

    def push_value(self, kind: FrameKind, data: bytes) -> None:
        """Append a value of any size, in parts where it needs them."""
        for start in range(0, max(len(data), 1), limits.MAX_PART):
            self.push(kind, data[start : start + limits.MAX_PART], more=start + limits.MAX_PART < len(data))

    def close(self) -> None:
        """Nothing follows (streams whose last frame is no END, as a request's body)."""
        self.ended = True

    def take(self, budget: int = limits.BATCH_BYTES) -> tuple[Frame, ...]:
        """Frames to send now: in order, within credit and about ``budget`` bytes. Ask again until empty."""
        taken: list[Frame] = []
        for at in range(self._cursor - self.acked, self.next_index - self.acked):
            frame = self._unacked[at]
            size = len(frame.data)
            sent = self.sent_bytes + size + limits.FRAME_COST
            if budget <= 0 or (taken and size > budget) or (sent > self.limit and frame.kind is not _END):
                break
            taken.append(frame)
            budget -= size + limits.FRAME_ENVELOPE
            self.sent_bytes = sent
            self._cursor += 1
        return tuple(taken)

    def on_ack(self, next_index: int, limit: int) -> None:
        """The other side has everything below ``next_index``. Raises ``ProtocolError`` if that was never sent."""
        if next_index > self.next_index:
            raise ProtocolError(f"acknowledgement of frame {next_index}, of {self.next_index} frames")
        self.limit = max(self.limit, limit)
        while self.acked < next_index:
            frame = self._unacked.popleft()
            self.acked += 1
            if self._cursor < self.acked:  # a resend had moved the cursor back over it
                self._cursor = self.acked
                self.sent_bytes += frame.cost

    def on_resend(self, index: int) -> None:
        """Send again from ``index``. What is acknowledged is gone; asking for it again is a late message."""
        index = max(index, self.acked)
        while self._cursor > index:
            self._cursor -= 1
            self.sent_bytes -= self._unacked[self._cursor - self.acked].cost

    @property
    def unacked_bytes(self) -> int:
        """Bytes held for the other side."""
        return sum(frame.cost for frame in self._unacked)

    @property
    def blocked(self) -> bool:
        """Whether there are frames that credit does not let go (sent ones that are sent again do not count)."""
        return self.pushed_bytes > self.limit

    @property
    def done(self) -> bool:
        """Ended, and all of it acknowledged."""
        return self.ended and self.acked == self.next_index


class Inbox:
    """The receiving side. ``window``: bytes that may be in flight or buffered unread beyond what was consumed."""

    def __init__(self, window: int = limits.WINDOW, *, now: float = 0.0) -> None:
        self.window = window
        self.next_index = 0
        """All frames below are here."""
        self.received_bytes = 0
        self.consumed_bytes = 0
        self.ended = False
        self.heard = now
        """When anything of this stream last arrived."""
        self._ahead: dict[int, Frame] = {}
        self.ahead_bytes = 0
        """Bytes of frames that came before their turn."""
        self._known = 0
        """Frames below this index exist (from a gap or a heartbeat)."""
        self._acked = 0
        self._granted = window
        self._ack_since: float | None = None
        self._asked = -1e9
        self._wait = limits.RESEND_AFTER_S
        self._gap_since: float | None = None

    def on_frames(self, frames: Sequence[Frame], now: float) -> list[Frame]:
        """The frames that are now complete in order; repeated ones are dropped, early ones kept (bounded)."""
        self.heard = now
        ready = list(frames) if self._in_turn(frames) else self._sort(frames, now)
        if ready:
            self._wait = limits.RESEND_AFTER_S
            if self._ack_since is None:
                self._ack_since = now
        if self.ended or self.next_index >= self._known:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now
        return ready

    def _in_turn(self, frames: Sequence[Frame]) -> bool:
        """Accept frames that are the next ones and not the end: nearly all. False: nothing is accepted yet."""
        if self._ahead or self.ended:
            return False
        index, received = self.next_index, self.received_bytes
        for frame in frames:
            if frame.index != index or frame.kind is _END:
                return False
            index += 1
            received += len(frame.data) + limits.FRAME_COST
        if received > self.consumed_bytes + self.window:
            return False
        self.next_index, self.received_bytes = index, received
        return True

    def _sort(self, frames: Sequence[Frame], now: float) -> list[Frame]:
        ready: list[Frame] = []
        for frame in frames:
            if self.ended or frame.index != self.next_index:
                self._out_of_turn(frame, now)
                continue
            self._accept(frame, ready)
            while self._ahead and (following := self._ahead.pop(self.next_index, None)) is not None:
                self.ahead_bytes -= following.cost
                self._accept(following, ready)
        return ready

    def _out_of_turn(self, frame: Frame, now: float) -> None:
        """A frame that was here before, or one that came early: that is kept if it fits, else it will be sent again."""
        if self.ended or frame.index < self.next_index:
            self._ack_since = now if self._ack_since is None else self._ack_since  # the ack was lost
            return
        self._known = max(self._known, frame.index + 1)
        if frame.index not in self._ahead and self.ahead_bytes + frame.cost <= self.window:
            self._ahead[frame.index] = frame
            self.ahead_bytes += frame.cost

    def _accept(self, frame: Frame, ready: list[Frame]) -> None:
        if self.ended:
            return
        received = self.received_bytes + frame.cost
        if received > self.limit and frame.kind is not _END:
            raise ProtocolError(f"frame {frame.index} is beyond the credit of {self.limit} bytes")
        self.next_index += 1
        self.received_bytes = received
        self.ended = frame.kind is _END
        ready.append(frame)

    def on_beat(self, next_index: int, now: float) -> None:
        """The sender lives and has made frames below ``next_index``."""
        self.heard = now
        self._known = max(self._known, next_index)
        if self.gap and self._gap_since is None:
            self._gap_since = now
        if self._ack_since is None:  # the last acknowledgement, and the credit in it, may have been lost
            self._ack_since = now - limits.ACK_AFTER_S

    def close(self) -> None:
        """All that was expected is here (streams whose end is known by size)."""
        self.ended = True

    def consume(self, nbytes: int) -> None:
        """The reader took ``nbytes``: as much new credit will be granted."""
        self.consumed_bytes += nbytes

    @property
    def gap(self) -> bool:
        """Whether a frame is known to be missing."""
        return not self.ended and self.next_index < self._known

    @property
    def owes(self) -> bool:
        """Whether an acknowledgement will be due by age."""
        return self._ack_since is not None

    @property
    def limit(self) -> int:
        """Cumulative bytes the sender may send."""
        return self.consumed_bytes + self.window

    @property
    def owes_much(self) -> bool:
        """Whether an acknowledgement is due whatever its age: for frames, or for credit."""
        frames, credit = self.next_index - self._acked, self.consumed_bytes + self.window - self._granted
        return frames >= limits.ACK_FRAMES or credit >= self.window // 4

    def ack(self, now: float, *, force: bool = False) -> tuple[int, int] | None:
        """``(next_index, limit)`` if an acknowledgement is due now: enough frames, enough credit, age, or the end."""
        since = self._ack_since
        due = force or self.owes_much or (since is not None and (self.ended or now - since >= limits.ACK_AFTER_S))
        if not due:
            return None
        self._acked, self._granted, self._ack_since = self.next_index, self.limit, None
        return self.next_index, self.limit

    def resend(self, now: float, *, force: bool = False) -> int | None:
        """Index to ask for again, if a gap is old enough (or ``force``, after a reconnect); backs off to 2 s."""
        if self.ended:
            return None
        overdue = self._gap_since is not None and now - self._gap_since >= 0.02 and now - self._asked >= self._wait
        if not (force or overdue):
            return None
        self._wait = limits.RESEND_AFTER_S if force else min(2.0, self._wait * 2)
        self._asked = now
        return self.next_index

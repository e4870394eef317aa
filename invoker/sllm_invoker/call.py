"""One call at one instance: both of its streams, and what is known of its gateway and its worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sllm_invoker.bounds import check_ids, clip_end
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import ErrorBody, ProtocolError
from sllm_runtime.protocol.frames import CallHead, End, Frame, FrameKind
from sllm_runtime.protocol.stream import Inbox, Outbox

CREDIT_SLACK: Final = 8 * limits.MIB
"""A worker may run ahead of its credit by what it had already made; by this much, it is misbehaving."""

PLENTY: Final = 0.75
"""Of a window. What is left beyond it is not passed on yet: a window holds two frames of the largest size."""

_BODY: Final = FrameKind.BODY  # an enum's member is found through its class: for every token that counts
_IDS: Final = FrameKind.IDS
_END: Final = FrameKind.END

Key = tuple[str, int]


class Call:
    """State of one call between its gateway and its worker. Does no I/O; the clock is handed in."""

    def __init__(self, number: int, gateway: str, head: CallHead, now: float) -> None:
        self.number = number
        self.gateway = gateway
        self.head = head
        self.key: Key = (head.call, head.epoch)
        self.outbox = Outbox(head.credit)
        self.body = Inbox(now=now)
        self._body_bytes = 0
        """Of the body itself that are here."""
        self.began = now
        self.ended_at: float | None = None
        self.followed = head.follow
        """Whether the worker knows that its ids are wanted as they are drawn."""
        self.cancel: tuple[str, str] | None = None
        """Code and reason, once somebody asked to stop it."""
        self.cancelled_at = 0.0
        self.told = head.credit
        """Credit that the worker knows of."""
        self.sent = 0
        """Frames below this index were sent at least once: what a beat may claim, since more was held by credit."""
        self.said = now
        """When anything of it was last sent to its gateway."""
        self.held = head.held
        """Whether it draws nothing before its gateway lets it."""
        self.heard = now
        """When its gateway last said anything of it."""
        self._unheard_since: float | None = None
        """Since when frames are out with no acknowledgement at all."""

    # --- the body, from the gateway ---------------------------------------------------------------
    def take_body(self, frames: Sequence[Frame], now: float) -> list[bytes]:
        """Parts of the body that are now here in order. Raises ``ProtocolError`` if there is more than was said."""
        parts = [frame.data for frame in self.body.on_frames(frames, now)]
        self._body_bytes += sum(map(len, parts))
        if self._body_bytes > self.head.body_bytes:
            raise ProtocolError(f"call {self.head.call}: more than the {self.head.body_bytes} bytes its head names")
        if self._body_bytes == self.head.body_bytes:
            self.body.close()
        return parts

    # --- the answer, from the worker --------------------------------------------------------------
    def push(self, frames: Sequence[Frame], now: float) -> None:
        """Take what the worker made. Raises ``ProtocolError`` on anything a right worker does not send."""
        for frame in frames:
            kind = frame.kind
            if kind is _BODY:
                raise ProtocolError("a worker sent a frame of a request's body")
            if kind is _IDS:
                check_ids(frame)
            elif kind is _END and frame is not frames[-1]:
                raise ProtocolError(f"call {self.head.call}: frames after the end of its stream")
        if frames and frames[-1].kind is _END:
            frames = (*frames[:-1], clip_end(frames[-1]))
            self.ended_at = now
        self.outbox.extend(frames)
        if self.outbox.pushed_bytes > self.outbox.limit + CREDIT_SLACK:
            raise ProtocolError(f"{self.outbox.pushed_bytes} bytes of frames, credit for {self.outbox.limit}")

    def fail(self, error: ErrorBody, now: float, *, stopped: bool = False) -> None:
        """End it here with ``error``, unless it has ended. A half value stays half: END says that nothing follows.
        ``stopped`` as ``End`` has it."""
        if not self.outbox.ended:
            self.outbox.push(FrameKind.END, codec.pack(End(error=error, stopped=stopped)))
            self.ended_at = now

    # --- towards the gateway ----------------------------------------------------------------------
    def take(self, budget: int, now: float) -> tuple[Frame, ...]:
        """Frames to send now."""
        frames = self.outbox.take(budget)
        if frames:
            self.sent = max(self.sent, frames[-1].index + 1)
            self.said = now
            if self._unheard_since is None:
                self._unheard_since = now
        return frames

    def on_ack(self, next_index: int, limit: int, now: float) -> bool:
        """The gateway has all frames below ``next_index``. Whether it gave new credit."""
        old = self.outbox.limit
        self.outbox.on_ack(next_index, limit)
        self._unheard_since = now if self.outbox.acked < self.sent else None
        return self.outbox.limit > old

    def new_credit(self) -> int | None:
        """The limit to tell the worker; None while it has plenty left of what it knows, as nearly always."""
        if self.outbox.limit <= self.told or self.told - self.outbox.pushed_bytes > self.head.credit * PLENTY:
            return None
        self.told = self.outbox.limit
        return self.told

    def unheard_s(self, now: float) -> float:
        """Seconds that sent frames have waited without any acknowledgement; 0 if none waits."""
        return 0.0 if self._unheard_since is None else now - self._unheard_since

    def forgive(self, now: float) -> None:
        """Silence until now has another reason (the bus was away, this process did not run)."""
        self.heard = now
        if self._unheard_since is not None:
            self._unheard_since = now
        if self.ended_at is not None:
            self.ended_at = now

    @property
    def running(self) -> bool:
        """Whether the worker still owes its end."""
        return not self.outbox.ended

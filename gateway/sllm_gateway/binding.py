"""A call's stay on one instance, under one epoch: what is owed to the node, and when. No I/O; time is handed in."""

from __future__ import annotations

from sllm_gateway.link import Outgoing
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.frames import Ack, Cancel, Feed, Frame, FrameKind, Hold, Parts, Resend
from sllm_runtime.protocol.records import RouteEntry
from sllm_runtime.protocol.stream import Inbox, Outbox

GAP_LOOK_S = 0.02
MOST_WAIT_S = 2.0
NEVER = float("inf")


class Binding:
    """Methods return what to send now, in order; ``due`` is when ``tend`` wants to be called next."""

    def __init__(self, call: str, epoch: int, entry: RouteEntry, body: bytes, window: int, now: float) -> None:
        self.call = call
        self.epoch = epoch
        self.entry = entry
        self.inbox = Inbox(window, now=now)
        self.outbox = Outbox()
        self._first_bytes = min(len(body), limits.MAX_PART)
        for start in range(0, len(body), limits.MAX_PART):
            self.outbox.push(FrameKind.BODY, body[start : start + limits.MAX_PART])
        self.outbox.close()
        self.asked = False
        """Whether its instance has been asked to take the call, so that its node owes a word."""
        self.accepted = False
        """Whether the instance has the call: it said so, or sent something of it."""
        self.following = False
        """Whether its ids are wanted as they are drawn."""
        self.followed_at = now
        """Since when."""
        self.held = False
        """Whether it is to draw nothing there before it is told to (``CallHead.held``)."""
        self.resends = 0
        """Times it asked for frames again."""
        self.due = NEVER
        self._with_request = 0
        """Frames of the body below this index travelled with the request."""
        self._body_again = NEVER
        self._body_wait = limits.RESEND_AFTER_S
        self._cancel: Cancel | None = None
        self._cancel_again = NEVER
        self._cancel_wait = limits.RESEND_AFTER_S
        self._insisted: list[Feed] = []
        self._let_at: float | None = None
        """Since when it is insisted that it draws again."""
        self._insist_again = NEVER
        self._insist_wait = limits.RESEND_AFTER_S

    @property
    def node(self) -> str:
        return self.entry.node

    @property
    def instance(self) -> str:
        return self.entry.instance

    @property
    def cancelled(self) -> bool:
        """Whether the node was asked to end it."""
        return self._cancel is not None

    # --- the answer's frames ----------------------------------------------------------------------
    def on_frames(self, frames: tuple[Frame, ...], now: float) -> list[Frame]:
        """Frames that are complete now, in order."""
        ready = self.inbox.on_frames(frames, now)
        if self._let_at is not None and now - self._let_at >= limits.RESEND_AFTER_S:
            self.heeded()  # what was drawn before it was held came long ago
        due = now + (GAP_LOOK_S if self.inbox.gap else limits.ACK_AFTER_S)
        if due < self.due:
            self.due = due
        return ready

    def on_beat(self, next_index: int, now: float) -> None:
        self.inbox.on_beat(next_index, now)
        self.due = min(self.due, now + GAP_LOOK_S)

    def consumed(self, cost: int, now: float) -> list[Outgoing]:
        """The reader took frames of this ``cost``: an acknowledgement, if so much was taken that one is due. One that
        is due by its age goes with those of other calls (``tend``): alone it would be a message of its own."""
        self.inbox.consume(cost)
        return self.acknowledge(now) if self.inbox.owes_much else []

    def acknowledge(self, now: float, *, force: bool = False) -> list[Outgoing]:
        """An acknowledgement, if one is due."""
        due = self.inbox.ack(now, force=force)
        return [] if due is None else [Ack(self.call, self.epoch, *due, self.following)]

    def follow(self, now: float) -> list[Outgoing]:
        """The call moves away: its ids are wanted as they are drawn."""
        self.following, self.followed_at = True, now
        return self.acknowledge(now, force=True)

    # --- the request's body -----------------------------------------------------------------------
    def first(self, room: int) -> tuple[Frame, ...]:
        """What of the body travels with the request to take the call, in ``room`` bytes: ``body`` sends the rest."""
        frames = self.outbox.take(room) if self._first_bytes <= room else ()
        self._with_request = len(frames)
        return frames

    def accept(self, now: float) -> None:
        """The instance has the call, and with it what travelled with the request."""
        self.accepted = True
        self.inbox.heard = now
        self.outbox.on_ack(self._with_request, self.outbox.limit)

    def body(self, now: float) -> list[Outgoing]:
        """Parts that may be sent now."""
        items: list[Outgoing] = []
        while frames := self.outbox.take():
            items.append(Parts(self.call, self.epoch, frames))
        if not self.outbox.done:
            self._body_again = now + self._body_wait
            self.due = min(self.due, self._body_again)
        return items

    def on_ack(self, next_index: int, limit: int, now: float) -> list[Outgoing]:
        """The node has the body below ``next_index``. Raises ``ProtocolError``."""
        self.outbox.on_ack(next_index, limit)
        self._body_wait = limits.RESEND_AFTER_S
        return self.body(now)

    def on_resend(self, index: int, now: float) -> list[Outgoing]:
        """The node lacks the body from ``index`` on."""
        self.outbox.on_resend(index)
        return self.body(now)

    # --- ids that it is to go on from -------------------------------------------------------------
    def insist(self, feeds: list[Feed], now: float) -> list[Outgoing]:
        """Tell it ``feeds``, again and again until they are ``heeded``."""
        self._insisted, self._insist_wait = feeds, limits.RESEND_AFTER_S
        return self._insist_now(now)

    def heeded(self) -> None:
        """It does as it was told."""
        self._insisted, self._let_at = [], None

    def hold(self, interval_s: float = 0.0) -> list[Outgoing]:
        """It is to draw no more there, or only a token each ``interval_s``. Said once: that costs only tokens, and what
        it drew is told."""
        self.heeded()
        return [Hold(self.call, self.epoch, interval_s)]

    def let_draw(self, now: float) -> list[Outgoing]:
        """It is held no longer, it stays there: said until it tells something."""
        self._let_at = now
        return self.insist([Feed(self.call, self.epoch, 0, 0, ())], now)

    def _insist_now(self, now: float) -> list[Outgoing]:
        if not self._insisted:
            return []
        self._insist_again = now + self._insist_wait
        self._insist_wait = min(MOST_WAIT_S, self._insist_wait * 2)
        self.due = min(self.due, self._insist_again)
        return list(self._insisted)

    # --- the end, and what was lost ---------------------------------------------------------------
    def cancel(self, code: str, reason: str, now: float) -> list[Outgoing]:
        """End it there. What still comes is counted as read, so that nothing keeps the END frame back."""
        self._cancel = Cancel(self.call, self.epoch, code, reason[:500])
        self.inbox.consumed_bytes = self.inbox.received_bytes
        return self._cancel_now(now)

    def _cancel_now(self, now: float) -> list[Outgoing]:
        assert self._cancel is not None
        self._cancel_again = now + self._cancel_wait
        self._cancel_wait = min(MOST_WAIT_S, self._cancel_wait * 2)
        self.due = min(self.due, self._cancel_again)
        return [self._cancel]

    def recovered(self, now: float) -> list[Outgoing]:
        """The connection was gone: say again what counts, ask again for what may be missing."""
        self.inbox.heard = now
        self.due = now
        if not self.accepted:
            return []
        items = self.acknowledge(now, force=True)
        index = self.inbox.resend(now, force=True)
        if index is not None:
            items.append(Resend(self.call, self.epoch, index))
        self.outbox.on_resend(self.outbox.acked)
        items += self.body(now)
        items += self._insist_now(now)
        return items + (self._cancel_now(now) if self._cancel else [])

    def tend(self, now: float) -> list[Outgoing]:
        """Everything that time alone makes due."""
        self.due = NEVER
        items: list[Outgoing] = []
        index = self.inbox.resend(now)
        if index is not None:
            self.resends += 1
            items.append(Resend(self.call, self.epoch, index))
        items += self.acknowledge(now)
        if self.inbox.gap:
            self.due = now + GAP_LOOK_S
        elif self.inbox.owes:
            self.due = now + limits.ACK_AFTER_S
        if self.accepted and not self.outbox.done:
            items += self._body_due(now)
        if self._insisted:
            items += self._insist_now(now) if now >= self._insist_again else []
            self.due = min(self.due, self._insist_again)
        if self._cancel is not None:
            items += self._cancel_now(now) if now >= self._cancel_again else []
            self.due = min(self.due, self._cancel_again)
        return items

    def _body_due(self, now: float) -> list[Outgoing]:
        if now < self._body_again:
            self.due = min(self.due, self._body_again)
            return []
        self._body_wait = min(MOST_WAIT_S, self._body_wait * 2)
        self.outbox.on_resend(self.outbox.acked)
        return self.body(now)

    def silent(self, now: float) -> bool:
        """Whether the node has said nothing for so long that the call counts as lost."""
        return now - self.inbox.heard >= limits.LOST_AFTER_S

"""The gateway's line to the nodes: one subscription for all frames; the other way one message per node and tick."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.platform.hearing import Hearing
from sllm_runtime.platform.presence import SETTLE_S
from sllm_runtime.protocol import codec, limits, subjects
from sllm_runtime.protocol.errors import DeadlineExceeded, SllmError, Unavailable
from sllm_runtime.protocol.frames import (
    Ack,
    Beat,
    Cancel,
    Feed,
    FrameKind,
    Hold,
    Open,
    Opened,
    Parts,
    Resend,
    Segment,
    ToGateway,
    ToNode,
    Unknown,
)

log = logging.getLogger(__name__)

LATER_S = 0.005
"""What is in no hurry waits this long for company."""
OPEN_TRY_S = 1.0
"""An unanswered ``Open`` is asked again after this long (it is idempotent): its reply may have been lost."""

Incoming = Segment | Beat | Unknown | Ack | Resend
Outgoing = Parts | Ack | Resend | Feed | Hold | Cancel


class Receiver(Protocol):
    """Who the frames are for."""

    def on_items(self, node: str, items: tuple[Incoming, ...]) -> None: ...

    def on_reconnect(self) -> None: ...


class _Way:
    """Whether anything can come from a node just now."""

    def __init__(self, bus: Bus, now: float) -> None:
        self._bus, self._hearing = bus, Hearing(bus.heard, now)

    def stands(self, now: float) -> bool:
        """Whether there is a connection, by which something comes."""
        if not self._bus.connected:
            self._hearing = Hearing(self._bus.heard, now)
            return False
        return not self._hearing.deaf(self._bus.heard, now)


class Link:
    """Sends and receives for one gateway. ``start`` before use, ``close`` after."""

    def __init__(self, bus: Bus, gateway: str, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._gateway = gateway
        self._clock = clock
        self._pending: dict[str, list[Outgoing]] = {}
        self._flushing: asyncio.Handle | None = None
        self._hurry = False
        self._subscription: Subscription | None = None
        self._anew = 0
        """How often the connection was made anew."""

    async def start(self, receiver: Receiver) -> None:
        """Subscribe; frames go to ``receiver`` from now on."""

        def on_message(subject: str, _reply: str, data: bytes) -> None:
            receiver.on_items(subject.rpartition(".")[2], codec.unpack(ToGateway, data).items)

        self._subscription = await self._bus.listen(subjects.frames_of(self._gateway), on_message)
        self._bus.on_reconnect(self._reconnected)
        self._bus.on_reconnect(receiver.on_reconnect)

    def _reconnected(self) -> None:
        self._anew += 1

    @property
    def connected(self) -> bool:
        return self._bus.connected

    @property
    def heard(self) -> int:
        """As ``Bus.heard``."""
        return self._bus.heard

    def send(self, node: str, item: Outgoing) -> None:
        """Send at the end of this loop tick, with everything else for that node."""
        self._pending.setdefault(node, []).append(item)
        if not self._hurry:
            self._hurry = True
            if self._flushing is not None:
                self._flushing.cancel()
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def send_all(self, node: str, items: Sequence[Outgoing]) -> None:
        """``send`` each of ``items``, in order."""
        for item in items:
            self.send(node, item)

    def send_all_later(self, node: str, items: Sequence[Outgoing]) -> None:
        """Send with whatever goes next, or soon: the node waits for no answer to them."""
        if not items:
            return
        self._pending.setdefault(node, []).extend(items)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(LATER_S, self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing, self._hurry = None, False
        pending, self._pending = self._pending, {}
        for node, items in pending.items():
            subject = subjects.node_calls(node, self._gateway)
            for batch in batches(items):
                try:
                    self._bus.publish_now(subject, ToNode(batch))
                except SllmError as error:  # all of it is repeated: acknowledgements, parts, cancellations
                    log.warning("%s", error.message)

    async def open(self, node: str, request: Open, before: Callable[[], Awaitable[None]] | None = None) -> Opened:
        """Ask ``node`` to take a call; asked again until it answers. Time without a connection, or in which nothing at
        all comes by it, does not count, and nothing is asked then: it would lie in a buffer until somebody else has
        the call. ``before`` comes before the first time after it, and each more while the node is not there either.

        Raises ``Unavailable`` if nobody is there, ``DeadlineExceeded`` if there is and it does not answer, or is no
        more and may have taken it: it was asked before, and did not answer. And what ``before`` raises.
        """
        subject = subjects.node_open(node, self._gateway)
        left, asked, away, first = limits.RPC_TIMEOUT_S, False, False, self._clock()
        way, settling = _Way(self._bus, first), 0.0
        while True:
            if not way.stands(self._clock()):
                away, left, settling = True, limits.RPC_TIMEOUT_S, SETTLE_S
                await asyncio.sleep(limits.RESEND_AFTER_S)
                continue
            if away and before is not None:
                await before()
            away = False
            began, anew = self._clock(), self._anew
            try:
                opened = await self._bus.call(subject, request, Opened, timeout_s=OPEN_TRY_S)
            except Unavailable as error:
                if not self._bus.connected:
                    asked, away, settling = True, True, SETTLE_S  # it may have been on its way as the connection broke
                elif not asked or settling <= 0:
                    raise (DeadlineExceeded(error.message) if asked else error) from error.__cause__
                away = True  # the call may end meanwhile, and its cancellation reaches nobody
                settling -= limits.RESEND_AFTER_S  # the node, whom the same cut off, may be on its way as well
                await asyncio.sleep(limits.RESEND_AFTER_S)
            except DeadlineExceeded:
                asked, away = True, not self._bus.connected or self._anew != anew  # or broke, and stands again
                settling = SETTLE_S if away else settling
                left -= 0.0 if away else self._clock() - began
                if left <= 0:
                    raise
            else:
                return _believed(opened, node, self._clock() - first if asked else 0.0)

    async def close(self) -> None:
        """Send what is left, stop receiving. Repeatable, also where nothing was begun."""
        self._flush()
        if self._subscription is None:
            return
        subscription, self._subscription = self._subscription, None
        try:
            await subscription.unsubscribe()
        except SllmError as error:
            log.debug("unsubscribing: %s", error)


def answer_stray(item: Incoming) -> list[Outgoing]:
    """For what belongs to no call here (any more): let the node drop it, and stop what still runs."""
    stop = Cancel(item.call, item.epoch, reason="this gateway has no such call")
    if isinstance(item, Segment) and item.frames:
        last = item.frames[-1]
        seen = Ack(item.call, item.epoch, last.index + 1, 0)
        return [seen] if last.kind is FrameKind.END else [seen, stop]
    if isinstance(item, Beat):
        return [Ack(item.call, item.epoch, item.next_index, 0), stop]
    return []


def _nbytes(item: Outgoing) -> int:
    """About what it takes in a message."""
    if isinstance(item, Parts):
        return 64 + sum(32 + len(frame.data) for frame in item.frames)
    if isinstance(item, Cancel):
        return 128 + len(item.reason.encode())
    return 64 + (5 * len(item.ids) if isinstance(item, Feed) else 0)


def batches(items: list[Outgoing]) -> list[tuple[Outgoing, ...]]:
    """``items`` in order, in messages of at most BATCH_BYTES (or one part)."""
    done: list[tuple[Outgoing, ...]] = []
    batch: list[Outgoing] = []
    size = 0
    for item in items:
        nbytes = _nbytes(item)
        if batch and size + nbytes > limits.BATCH_BYTES:
            done.append(tuple(batch))
            batch, size = [], 0
        batch.append(item)
        size += nbytes
    if batch:
        done.append(tuple(batch))
    return done


def _believed(opened: Opened, node: str, since_s: float) -> Opened:
    """What ``node`` says of a call that it was first asked to take ``since_s`` ago. Raises ``DeadlineExceeded`` where
    one that it has not may have been taken by its life before."""
    if opened.status != "accepted" and opened.knows_s < since_s:
        raise DeadlineExceeded(f"node {node} began anew meanwhile, and knows of no call before that")
    return opened

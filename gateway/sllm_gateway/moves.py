"""Carries running calls over to another instance (ServerlessLLM, section 5.3): a route's entry says which goes where.

The source generates until the destination, which is told the ids so far in rounds, keeps up with it.
Until then whatever goes wrong with the destination costs nothing: the call stays where it is, and is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from sllm_gateway.binding import Binding
from sllm_gateway.call import Call
from sllm_gateway.dispatch import Dispatcher
from sllm_gateway.link import Incoming, Link
from sllm_gateway.metrics import Metrics
from sllm_gateway.move import Move, Stage, leaving
from sllm_gateway.news import Tell
from sllm_gateway.open_calls import OpenCalls
from sllm_gateway.pace import Pace
from sllm_gateway.resumption import Resumption
from sllm_gateway.table import Version
from sllm_gateway.under_way import Next, UnderWay, going, together
from sllm_runtime.platform import trace
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Cancelled, Draining, InstanceLost, NotDeterministic, SllmError
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.frames import Ack, Beat, Cancel, Frame, Open, Resend, Segment
from sllm_runtime.protocol.records import RouteEntry

log = logging.getLogger(__name__)

FIRST_S: Final = 1.0
"""So long a call that has just begun may take to tell a first id: without one its destination draws along."""
RESERVE_S: Final = 0.3
"""So long calls wait for their reserves (``pace``) at most before their destination is opened."""
AGAIN_S: Final = 1.0
"""A destination that failed a call is asked again for it after this long."""


class Moves:
    """All moves of this gateway's calls. ``tick`` begins them and looks after them."""

    def __init__(
        self,
        calls: OpenCalls,
        link: Link,
        dispatcher: Dispatcher,
        metrics: Metrics,
        window: int,
        clock: Callable[[], float],
        tasks: Tasks,
        *,
        deliver: Callable[[Call, Binding, list[Frame], float], None],
        fail: Callable[[Call, SllmError], None],
        tell: Tell,
    ) -> None:
        """``deliver`` takes frames of a call's binding that are new to its caller."""
        self._calls = calls
        self._link = link
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._window = window
        self._clock = clock
        self._tasks = tasks
        self._deliver = deliver
        self._fail = fail
        self._tell = tell
        self._leaving: dict[tuple[str, int], dict[str, RouteEntry]] = {}
        """By version: where the calls of an instance are to go."""
        self._moving = UnderWay()
        self._followed: dict[str, Call] = {}
        """Calls that are to begin to move."""
        self._changed: set[str] = set()
        """Instances on their way to which something has come of a call since ``look``."""

    def on_version(self, version: Version) -> None:
        """Its route has changed, or it was removed."""
        self._leaving.pop(version.key, None)
        if not version.removed and (found := leaving(version.route.entries)):
            self._leaving[version.key] = found

    def tick(self, now: float) -> None:
        """Begin what should move, look after what moves."""
        for call, move in self._moving.all():
            self._tend(call, move, now)
        self._changed |= self._moving.instances()
        self.look(now)
        for key, where in self._leaving.items():
            self._consider(tuple(self._calls.of(key)), where, now)
        for call in [call for call in self._followed.values() if not self._leaves(call)]:
            del self._followed[call.id]
            self._unfollow(call)

    def to_go(self, key: tuple[str, int]) -> Iterator[str]:
        """Where each running call of a version is that could begin to move, now or soon."""
        for call in self._calls.of(key):
            if call.binding is not None and _may_move(call):
                yield call.binding.instance

    def _consider(self, calls: Sequence[Call], where: dict[str, RouteEntry], now: float) -> None:
        """Begin what may, of the ``calls`` of a version: those of one instance together, since what the destination
        computes for one of them slows all, and who has its reserve by then is not seen to be slowed."""
        known: dict[str, list[tuple[Call, Resumption, RouteEntry]]] = {}
        for call in calls:
            source, kept = call.binding, call.resumption
            if now < call.move_after or source is None or kept is None or not _may_move(call):
                continue
            entry = where.get(source.instance)
            if entry is None or not source.accepted or not self._dispatcher.may_ask(call, entry.instance, now):
                continue
            self._follow(call, source, kept, now)
            if kept.count or now - source.followed_at >= FIRST_S:
                known.setdefault(source.instance, []).append((call, kept, entry))
        for group in known.values():
            if all(_has_reserve(call, now) for call, _, _ in group):
                for call, kept, entry in group:
                    if self._dispatcher.may_ask(call, entry.instance, now):  # those before it took some of the room
                        self._begin(call, kept, entry)

    def _leaves(self, call: Call) -> bool:
        """Whether it is to go from where it is, and is followed there."""
        source = call.binding
        if source is None or not source.following or call.over:
            return False
        return source.instance in self._leaving.get(call.version.key, {})

    def _follow(self, call: Call, source: Binding, kept: Resumption, now: float) -> None:
        """It is told from now on as it draws, and its reader makes a reserve; anew where that was given back since
        its destination had no room. Repeatable."""
        if not source.following:
            self._followed[call.id] = call
            self._link.send_all(source.node, source.follow(now))
            kept.watch()
        if call.pace is not None and call.pace.stays(now):
            return
        if pace := _pace(call, kept, now):
            pace.expect(now)

    # --- the destination ------------------------------------------------------------------------------
    def _begin(self, call: Call, kept: Resumption, entry: RouteEntry) -> None:
        now = self._clock()
        call.epoch += 1
        binding = Binding(call.id, call.epoch, entry, call.order.body, self._window, now)
        binding.following = binding.asked = True
        binding.held = bool(kept.counts)  # who knows no id of it cannot tell it how far to go
        call.move = Move(binding, kept)
        self._followed.pop(call.id, None)
        self._moving.begin(call, call.move)
        if pace := _pace(call, kept, now):
            pace.go_on()
        self._dispatcher.take(call, entry.instance)
        request = call.request(binding, now)  # now: the move counts from what it says
        self._tasks.start(self._open(call, call.move, request), "move")

    async def _open(self, call: Call, move: Move, request: Open) -> None:
        binding = move.binding
        try:
            with trace.within(call.order.traceparent):
                opened = await self._link.open(binding.node, request, partial(self._still, call, move))
        except SllmError as error:
            move.opened(False, self._clock())
            if not binding.accepted and call.move is move:
                self.drop(call, error.message, gone=True)
            return
        if opened.status != "accepted":
            why = f"instance {binding.instance} is {opened.status}: {opened.note}"
            if call.move is move:
                self.drop(call, why, gone=opened.status == "gone", busy=opened.status == "busy")
            return
        move.opened(binding.held and opened.holds, self._clock())
        self._accept(call, binding)
        if binding is call.binding or call.move is move:
            self._link.send_all(binding.node, binding.body(self._clock()))
        if move.switched and call.move is move:  # it died before this answer was here
            self._let_draw(move)

    @staticmethod
    async def _still(call: Call, move: Move) -> None:
        """As ``Handover._still``: its cancellation may have been sent to nobody."""
        if call.over or (call.move is not move and call.binding is not move.binding):
            raise Cancelled("it has ended, or stays, while there was no connection to ask over")

    def _accept(self, call: Call, binding: Binding) -> None:
        if not binding.accepted:
            binding.accept(self._clock())
            self._dispatcher.accepted(call, binding.instance)

    def on_item(self, call: Call, move: Move, item: Incoming, now: float) -> None:
        """What the destination says before it has the call."""
        binding = move.binding
        if isinstance(item, Segment):
            self._accept(call, binding)
            self._on_frames(call, move, item.frames, now)
        elif isinstance(item, Beat):
            self._accept(call, binding)
            binding.on_beat(item.next_index, now)
        elif isinstance(item, Ack):
            self._link.send_all(binding.node, binding.on_ack(item.next_index, item.limit, now))
        elif isinstance(item, Resend):
            self._link.send_all(binding.node, binding.on_resend(item.index, now))
        elif binding.accepted:
            self.drop(call, f"node {binding.node} no longer has the call")

    def _on_frames(self, call: Call, move: Move, frames: tuple[Frame, ...], now: float) -> None:
        binding = move.binding
        try:
            _, dropped = move.take(binding.on_frames(frames, now), now)
        except SllmError as error:
            gone = isinstance(error, InstanceLost | Draining)
            call.stays = call.stays or not gone
            self.drop(call, error.message, gone=gone)
            return
        binding.inbox.consume(dropped)
        self._link.send_all_later(binding.node, binding.acknowledge(now))
        self._changed.add(binding.instance)

    def on_source(self, call: Call, frames: Sequence[Frame], now: float) -> None:
        """It has told more, ``frames``."""
        move = call.move
        if move is not None and not move.switched:
            if dropped := move.heard(frames, now):
                move.binding.inbox.consume(dropped)
                self._link.send_all_later(move.binding.node, move.binding.acknowledge(now))
            self._changed.add(move.binding.instance)

    def look(self, now: float) -> None:
        """Do what is to be done next, when all is taken in that came together: what a step made is one message."""
        while self._changed:
            instance = self._changed.pop()
            for move in going([move for _, move in self._moving.towards(instance)], now):
                self._switch(self._moving.call(move), move, now)
            for call, move in self._moving.towards(instance):
                if move.stuck(now):
                    self._let_draw(move)
                if move.hopeless(now):
                    self._hand(call, move, now)
                self._slow_down(call, move)
            what, which = together([move for _, move in self._moving.towards(instance)], now)
            for move in which:
                match what:
                    case Next.FEED:
                        self._link.send_all(move.binding.node, move.feed(now))
                    case Next.BESIDE:
                        self._draw_beside(self._moving.call(move), move, now)
                    case Next.HAND:
                        self._hand(self._moving.call(move), move, now)

    def _draw_beside(self, call: Call, move: Move, now: float) -> None:
        """The destination draws, and the source slower than it could, until the destination is ahead."""
        self._let_draw(move)
        move.beside(now)
        self._slow_down(call, move)

    def _slow_down(self, call: Call, move: Move) -> None:
        if interval_s := move.slower():
            assert call.binding is not None
            self._link.send_all(call.binding.node, call.binding.hold(interval_s))

    def _hand(self, call: Call, move: Move, now: float) -> None:
        """The source ends the step that it is in, and draws no more."""
        assert call.binding is not None
        self._link.send_all(call.binding.node, call.binding.hold())
        move.hand(now)

    def _let_draw(self, move: Move) -> None:
        binding = move.binding
        self._link.send_all(binding.node, binding.insist(move.let_draw(), self._clock()))

    def _tend(self, call: Call, move: Move, now: float) -> None:
        binding = move.binding
        if binding.accepted and binding.silent(now) and self._link.connected:
            self.drop(call, f"node {binding.node} is silent", gone=True)
            return
        self._link.send_all(binding.node, binding.tend(now))

    # --- how it ends ----------------------------------------------------------------------------------
    def _switch(self, call: Call, move: Move, now: float) -> None:
        """The source stops, the destination draws, and its frames are the caller's."""
        source = call.binding
        assert source is not None
        missing = move.gap
        try:
            new, dropped = move.switch(now)
        except NotDeterministic as error:
            call.stays = True
            self.drop(call, error.message)
            return
        if missing or not move.let:
            self._let_draw(move)
        self._link.send(source.node, Cancel(call.id, source.epoch, reason=f"it goes on at {move.binding.instance}"))
        self._dispatcher.release(call, source.instance)
        self._metrics.resent.inc(source.resends)
        self._metrics.moved.labels(call.version.function).inc()
        text = "call goes on at %s after %d round(s), %d token(s) behind"
        with trace.within(call.order.traceparent):
            log.info(text, move.binding.instance, move.rounds, missing, extra={"call": call.id})
        self._adopt(call, move, new, dropped, now)
        self._tell(Kind.CALL_MOVED, call, f"from {source.instance} to {move.binding.instance}")

    def take_over(self, call: Call, *, stopped: bool) -> bool:
        """The source has died (``stopped``: see ``Call.break_off``): whether the destination goes on at once with
        what it was told."""
        move = call.move
        if move is None or move.switched or not move.binding.accepted or call.over or call.resumption is None:
            return False
        try:
            move.compare()
        except NotDeterministic as error:  # before its death is counted: it is resumed as after any other
            call.stays = True
            self.drop(call, error.message)
            return False
        if not call.break_off(stopped=stopped):
            return False
        new, dropped = move.switch(self._clock())
        self._let_draw(move)
        with trace.within(call.order.traceparent):
            log.warning("call goes on at %s: its instance died", move.binding.instance, extra={"call": call.id})
        self._metrics.resumed.labels(call.version.function).inc()
        self._adopt(call, move, new, dropped, self._clock())
        self._tell(Kind.CALL_RESUMED, call, f"its instance died on its way to {move.binding.instance}")
        return True

    def _adopt(self, call: Call, move: Move, new: list[Frame], dropped: int, now: float) -> None:
        self._moving.end(call)
        binding = call.binding = move.binding
        call.of_before = call.buffered
        call.marks.moved(now)
        call.due = now
        binding.inbox.consume(dropped)
        self._finish_if_over(call, move)
        self._deliver(call, binding, new, now)

    def sift(self, call: Call, binding: Binding, frames: list[Frame], now: float) -> tuple[list[Frame], int]:
        """Of the frames of a call's binding those that are new to its caller, and the cost of the others."""
        move = call.move
        if move is None or binding is not move.binding:
            return frames, 0
        try:
            new, dropped = move.take(frames, now)
        except NotDeterministic as error:
            self._fail(call, error)
            return [], sum(frame.cost for frame in frames)
        binding.inbox.consume(dropped)
        self._finish_if_over(call, move)
        return new, dropped

    def _finish_if_over(self, call: Call, move: Move) -> None:
        if move.over:
            call.move = None
            move.binding.heeded()
            self._unfollow(call)

    def drop(self, call: Call, why: str, *, gone: bool = False, busy: bool = False) -> None:
        """The call stays where it is, or is over. Repeatable."""
        move = call.move
        if move is None:
            return
        if move.switched:
            call.move = None
            self._unfollow(call)
            return
        with trace.within(call.order.traceparent):
            log.info("call does not move to %s: %s", move.binding.instance, why, extra={"call": call.id})
        self._let_go(call, move, why, gone=gone, busy=busy)
        now, source = self._clock(), call.binding
        if move.stage in (Stage.BESIDE, Stage.HANDED) and source is not None and not (call.over or source.cancelled):
            self._link.send_all(source.node, source.let_draw(now))
            call.due = min(call.due, source.due)
        if not busy:  # it is asked again when it is held no longer (``Dispatcher.refused``)
            call.move_after = now + AGAIN_S
            self._unfollow(call)
        else:
            self._followed[call.id] = call
            if call.pace is not None:
                call.pace.end()

    def _unfollow(self, call: Call) -> None:
        """Nobody compares it with another one any more, and no pause is to come."""
        if call.pace is not None:
            call.pace.end()
        if call.binding is not None:
            call.binding.following = False
        if call.resumption is not None:
            call.resumption.unwatch()

    def _let_go(self, call: Call, move: Move, why: str, *, gone: bool, busy: bool) -> None:
        binding = move.binding
        call.move = None
        self._moving.end(call)
        self._link.send(binding.node, Cancel(call.id, binding.epoch, reason=why[:500]))
        if gone or busy:
            self._dispatcher.refused(call, binding.instance, gone=gone)
        else:
            self._dispatcher.release(call, binding.instance)

    def on_lost_node(self, node: str, why: str) -> None:
        """A node was started anew, or has left: what was on its way there stays."""
        for call, _ in self._moving.all(node):
            self.drop(call, why, gone=True)

    def on_reconnect(self, now: float) -> None:
        """Messages may have been lost in both directions."""
        for _, move in self._moving.all():
            self._link.send_all(move.binding.node, [*move.binding.recovered(now), *move.lacking()])


def _pace(call: Call, kept: Resumption, now: float) -> Pace | None:
    """Its reserve, from now on if it had none; None where its reader has none."""
    if call.pace is None and call.paces:
        marks, gaps = call.marks, kept.delivered - 1
        usual = (marks.last - marks.first) / gaps if gaps > 0 and marks.first and marks.last else 0.0
        call.pace = Pace(usual, marks.last or now)
    return call.pace


def _has_reserve(call: Call, now: float) -> bool:
    """Whether it need not be waited for: also where none is to be had."""
    return call.pace is None or call.pace.full(now) or now - call.pace.expected_at >= RESERVE_S


def _may_move(call: Call) -> bool:
    """Whether it could, if its instance were to go, and has not begun to."""
    source = call.binding
    running = source is not None and not source.cancelled and not call.over
    return running and call.resumption is not None and not call.stays and call.move is None

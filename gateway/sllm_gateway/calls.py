"""The life of every call of this gateway, from admission to its last frame. One state table: ``states.CALL``.

Frames come in by ``on_items``, deadlines by ``Timers``, the caller's reader by ``consumed`` and ``leave``. A call that
has ended for its caller stays here until its node has confirmed the end, because until then it holds a slot there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sllm_gateway.arrivals import Arrivals
from sllm_gateway.binding import Binding
from sllm_gateway.call import Call, Marks, Order
from sllm_gateway.dispatch import Dispatcher
from sllm_gateway.link import Incoming, Link, Outgoing, answer_stray
from sllm_gateway.metrics import Metrics
from sllm_gateway.retry import worth_retrying
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.starts import Starts
from sllm_gateway.timers import Timers
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InstanceLost,
    OutputTooLarge,
    ProtocolError,
    SllmError,
    SlowConsumer,
)
from sllm_runtime.protocol.frames import Ack, Beat, Cancel, End, Frame, FrameKind, Open, Resend, Segment
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.records import RouteEntry
from sllm_runtime.protocol.states import CallState

log = logging.getLogger(__name__)

STOPPING = "the gateway is stopping; call again"


class Calls:
    """All calls by id. ``start`` before use; ``close`` ends what is left."""

    def __init__(
        self,
        bus: Bus,
        settings: GatewaySettings,
        metrics: Metrics,
        clock: Callable[[], float],
        starts: Starts,
        on_end: Callable[[Call], None] = lambda _: None,
    ) -> None:
        """``on_end`` is told of each call that is over, once."""
        self._settings = settings
        self._metrics = metrics
        self._on_end = on_end
        self._clock = clock
        self._starts = starts
        self._link = Link(bus, settings.gateway, clock)
        self.dispatcher = Dispatcher(bus, settings.gateway, clock, place=self._place, fail=self.fail)
        self._calls: dict[str, Call] = {}
        self._timers = Timers(self._calls, self._link, self.dispatcher, starts, settings, clock, self)
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks = Tasks("calls")
        self._draining = False
        self._arrivals = Arrivals(self.fail)

    def __len__(self) -> int:
        return len(self._calls)

    async def start(self) -> None:
        """Listen for frames, begin to look at deadlines."""
        await self._link.start(self)
        self._tasks.start(self._timers.run(), "ticks")

    async def drain(self, seconds: float) -> None:
        """Take no new call; those that run have ``seconds``, then they end with ``draining``."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            self._fail_all()

    def _fail_all(self) -> None:
        for call in list(self._calls.values()):
            self.fail(call, Draining(STOPPING))

    async def close(self) -> None:
        """End everything; nodes are told to cancel what still runs."""
        self._draining = True
        self._fail_all()
        await self._tasks.close()
        await self.dispatcher.close()
        await self._link.close()

    # --- the caller's side ------------------------------------------------------------------------
    def admit(self, order: Order) -> Call:
        """Begin a call. Raises ``QueueFull`` or ``Draining``."""
        if self._draining:
            raise Draining(STOPPING)
        now = self._clock()
        call = Call(order, Marks(order.version.route, sent=order.accepted), due=now)
        self._calls[call.id] = call
        self._timers.some.set()
        self._empty.clear()
        try:
            self.dispatcher.submit(call)
        except SllmError as error:
            self._over(call, error)
            self.leave(call)
            raise
        return call

    def consumed(self, call: Call, cost: int) -> None:
        """The reader has written frames of this ``cost``: the node may send as much again."""
        call.buffered -= cost
        binding = call.binding
        if binding is not None and not call.over:
            now = call.marks.read = self._clock()
            binding.inbox.consume(cost)
            self._acknowledge(binding, now)

    def leave(self, call: Call) -> None:
        """The reader is done with it. What still runs for it is cancelled."""
        call.reading = False
        call.unblock = None
        self.fail(call, Cancelled("the caller went away"))
        self._forget_if_over(call)

    def fail(self, call: Call, error: SllmError) -> None:
        """End the call with ``error`` for its caller, and cancel it on its node."""
        if call.over:
            return
        if call.binding is None:
            self.dispatcher.withdraw(call)
        else:
            self._send(call.binding, call.binding.cancel(error.code, error.message, self._clock()))
            call.due = min(call.due, call.binding.due)
        self._over(call, error)

    def _over(self, call: Call, error: SllmError) -> None:
        """The end, as far as the caller goes."""
        if isinstance(error, Cancelled):
            call.frames.clear()
        call.error = error
        call.go(CallState.CANCELLED if type(error) is Cancelled else CallState.FAILED)
        self._free_reader(call)
        self._forget_if_over(call)

    def _free_reader(self, call: Call) -> None:
        call.wake()
        if call.writing is not None and call.unblock is not None:
            call.unblock()

    def _forget_if_over(self, call: Call) -> None:
        if not call.over or call.reading or call.binding is not None:
            return
        if self._calls.pop(call.id, None) is not None:
            self._metrics.ended(call, self._clock())
            self._on_end(call)
        if not self._calls:
            self._timers.some.clear()
            self._empty.set()

    # --- to an instance ---------------------------------------------------------------------------
    def _send(self, binding: Binding, items: list[Outgoing]) -> None:
        for item in items:
            self._link.send(binding.node, item)

    def _acknowledge(self, binding: Binding, now: float, *, force: bool = False) -> None:
        for item in binding.acknowledge(now, force=force):
            self._link.send_later(binding.node, item)

    def _place(self, call: Call, entry: RouteEntry) -> None:
        now = self._clock()
        if all(known.instance != entry.instance for known in call.marks.route.entries):
            call.marks.started, call.marks.ready = entry, now
        call.epoch += 1
        call.marks.sent = call.due = now
        call.binding = Binding(call.id, call.epoch, entry, call.order.body, self._settings.window, now)
        self._tasks.start(self._open(call, call.binding), "open")

    async def _open(self, call: Call, binding: Binding) -> None:
        request = Open(head=call.head(binding, self._clock()), first=binding.first())
        try:
            opened = await self._link.open(binding.node, request)
        except DeadlineExceeded:
            if not binding.accepted and call.binding is binding:
                self.lost(call, binding, f"node {binding.node} did not answer for instance {binding.instance}")
            return
        except SllmError as error:
            self._refused(call, binding, "gone", error.message)
            return
        if opened.status == "accepted":
            self._accepted(call, binding)
            if call.binding is binding and not call.over:
                self._send(binding, binding.body(self._clock()))
        else:
            self._refused(call, binding, opened.status, opened.note)

    def _accepted(self, call: Call, binding: Binding) -> None:
        if binding.accepted or call.binding is not binding:
            return
        call.due = self._clock()
        binding.accept(call.due)
        self.dispatcher.accepted(call, binding.instance)
        if not call.over:
            call.attempts += 1
            call.go(CallState.RUNNING)

    def _refused(self, call: Call, binding: Binding, status: str, note: str) -> None:
        """It was never taken there: back to the head of the queue."""
        if call.binding is not binding or binding.accepted:
            return
        call.binding = None
        log.debug("%s by %s: %s", status, binding.instance, note, extra={"call": call.id})
        self.dispatcher.refused(call, binding.instance, gone=status == "gone")
        if call.over:
            self._forget_if_over(call)
        else:
            self._again(call)

    def _again(self, call: Call) -> None:
        call.go(CallState.QUEUED)
        call.frames.clear()
        call.buffered = 0
        call.due = self._clock()
        self.dispatcher.submit_again(call)

    # --- from the nodes ---------------------------------------------------------------------------
    def on_items(self, node: str, items: tuple[Incoming, ...]) -> None:
        """One message of ``node``: what it says counts only for calls that were sent to it, in their present epoch."""
        now = self._clock()
        for item in items:
            call = self._calls.get(item.call)
            binding = call.binding if call is not None else None
            if call is None or binding is None or binding.epoch != item.epoch or binding.node != node:
                for answer in answer_stray(item):
                    self._link.send(node, answer)
                continue
            try:
                self._on_item(call, binding, item, now)
            except ProtocolError as error:
                log.error("node %s: %s", node, error.message, extra={"call": call.id})
                self._link.send(node, Cancel(call.id, binding.epoch, error.code, error.message))
                self._ended(call, binding, End(error=error.body()))

    def _on_item(self, call: Call, binding: Binding, item: Incoming, now: float) -> None:
        if isinstance(item, Segment):
            self._on_frames(call, binding, item.frames, now)
        elif isinstance(item, Beat):
            self._accepted(call, binding)
            binding.on_beat(item.next_index, now)
        elif isinstance(item, Ack):
            self._send(binding, binding.on_ack(item.next_index, item.limit, now))
        elif isinstance(item, Resend):
            self._send(binding, binding.on_resend(item.index, now))
        elif binding.accepted:
            self.lost(call, binding, f"node {node_text(binding)} no longer has the call")
        call.due = min(call.due, binding.due)

    def _on_frames(self, call: Call, binding: Binding, frames: tuple[Frame, ...], now: float) -> None:
        if not binding.accepted:
            self._accepted(call, binding)
        ready = binding.on_frames(frames, now)
        end = ready.pop() if ready and ready[-1].kind is FrameKind.END else None
        if ready:
            self._deliver(call, binding, ready, now)
        if end is not None:
            self._ended(call, binding, codec.unpack(End, end.data))
        elif binding is call.binding and not (ready and call.order.stream):  # those the reader acknowledges
            self._acknowledge(binding, now)

    def _deliver(self, call: Call, binding: Binding, ready: list[Frame], now: float) -> None:
        cost = sum([frame.cost for frame in ready])
        if call.over:
            binding.inbox.consume(cost)
            return
        marks = call.marks
        marks.first = now if marks.first is None else marks.first
        marks.last = now
        call.frames += ready
        call.buffered += cost
        if call.order.stream:
            self._arrivals.add(call)
            return
        binding.inbox.consume(cost)  # collected here, and bounded by max_output
        if call.buffered > self._settings.max_output:
            limit = self._settings.max_output
            self.fail(call, OutputTooLarge(f"the answer is larger than {limit} bytes; stream it, or answer less"))

    # --- the end ----------------------------------------------------------------------------------
    def _ended(self, call: Call, binding: Binding, end: End) -> None:
        """The call is over on its instance."""
        self._acknowledge(binding, self._clock(), force=True)
        self._metrics.resent.inc(binding.resends)
        call.binding = None
        error = end.error.to_error() if end.error is not None else None
        if isinstance(error, InstanceLost):
            self.dispatcher.refused(call, binding.instance, gone=True)
        else:
            self.dispatcher.release(call, binding.instance)
        if error is None and not call.over:
            call.end = end
            call.go(CallState.SUCCEEDED)
            call.wake()
        elif error is not None and not self._retry(call, error):
            call.end = end
            self._end_with(call, error)
        self._forget_if_over(call)

    def lost(self, call: Call, binding: Binding, why: str) -> None:
        """Nothing more is to be expected of its instance."""
        call.binding = None
        self._link.send(binding.node, Cancel(call.id, binding.epoch, reason=why))
        self.dispatcher.refused(call, binding.instance, gone=True)
        error = InstanceLost(f"{why}; call again")
        if not self._retry(call, error):
            self._end_with(call, error)
        self._forget_if_over(call)

    def cut(self, call: Call, error: SllmError) -> None:
        """All of the answer is here, and its caller does not take it: it is not waited for any longer."""
        if call.writing is not None and not isinstance(call.error, SlowConsumer | DeadlineExceeded):
            call.error = error
            call.frames.clear()
            self._free_reader(call)

    def _end_with(self, call: Call, error: SllmError) -> None:
        if not call.over:
            call.error = error
            call.go(CallState.FAILED)
            call.wake()

    def _retry(self, call: Call, error: SllmError) -> bool:
        """Whether the call begins again: allowed so often by the function, and the caller has seen nothing of it."""
        if call.over or call.taken or call.attempts > call.version.manifest.retries or not worth_retrying(error):
            return False
        log.info("call begins again: %s", error.message, extra={"call": call.id, "attempt": call.attempts})
        self._again(call)
        return True

    # --- the nodes' reports and the bus -----------------------------------------------------------
    def on_status(self, status: NodeStatus, subject: str) -> None:
        """A node's report: progress for those who wait, room on instances, and whether the node was started anew."""
        if subject.rpartition(".")[2] != status.node:  # rights bind a node to its subject, not to the name it gives
            return
        now = self._clock()
        restarted = self._starts.restarted(status)
        for key in self._starts.on_status(status, now):
            for call in self.dispatcher.waiting_calls(key):
                call.wake()
        for instance in status.instances:
            self.dispatcher.on_room((instance.function, instance.version), instance.instance, instance.running)
        if restarted:
            self._ask_node(status.node)

    def _ask_node(self, node: str) -> None:
        """A restarted node answers ``Unknown`` for the calls it has lost."""
        for call in self._calls.values():
            binding = call.binding
            if binding is not None and binding.node == node and binding.accepted:
                self._link.send(node, Resend(call.id, binding.epoch, binding.inbox.next_index))

    def on_reconnect(self) -> None:
        """Messages may have been lost in both directions."""
        now = self._clock()
        for call in self._calls.values():
            call.due = now
            if call.binding is not None:
                self._send(call.binding, call.binding.recovered(now))


def node_text(binding: Binding) -> str:
    return f"{binding.node} (instance {binding.instance})"

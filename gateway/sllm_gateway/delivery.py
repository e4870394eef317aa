"""What nodes say of calls, to whom it belongs: frames to readers, the rest to the call's binding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from sllm_gateway.arrivals import Arrivals
from sllm_gateway.binding import Binding
from sllm_gateway.call import Call
from sllm_gateway.ending import Ending
from sllm_gateway.handover import Handover
from sllm_gateway.link import Incoming, Link, answer_stray
from sllm_gateway.moves import Moves
from sllm_gateway.open_calls import OpenCalls
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import NotDeterministic, OutputTooLarge, ProtocolError
from sllm_runtime.protocol.frames import Ack, Beat, Cancel, End, Frame, FrameKind, Resend, Segment

log = logging.getLogger(__name__)
_END: Final = FrameKind.END  # an enum's member is found through its class: for every token that counts
FRAME_BYTES: Final = 32
"""An answer that is not streamed may be in as many frames as ``max_output`` holds pieces of this size: each takes some
150 bytes of memory beside its data. 128 continuations of 4,096 tokens come in half of what 32 MiB allow."""


class Delivery:
    """The link's ``Receiver``. ``max_output``: bytes of an answer that is not streamed; ``all_outputs``: what
    all of them cost."""

    def __init__(
        self,
        calls: OpenCalls,
        link: Link,
        handover: Handover,
        ending: Ending,
        moves: Moves,
        max_output: int,
        all_outputs: int,
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._link = link
        self._handover = handover
        self._ending = ending
        self._moves = moves
        self._max_output, self._all_outputs = max_output, all_outputs
        self._clock = clock
        self._arrivals = Arrivals(ending.fail, clock)

    def on_items(self, node: str, items: tuple[Incoming, ...]) -> None:
        """One message of ``node``: what it says counts only for calls that were sent to it, in their present epoch."""
        now = self._clock()
        for item in items:
            call = self._calls.get(item.call)
            binding = call.bound(item.epoch, node) if call is not None else None
            if call is None or binding is None:
                self._link.send_all(node, answer_stray(item))
                continue
            try:
                self._on_item(call, binding, item, now)
            except (ProtocolError, NotDeterministic) as error:
                self._broken(call, binding, error)
        self._moves.look(now)

    def _broken(self, call: Call, binding: Binding, error: ProtocolError | NotDeterministic) -> None:
        """What came of its instance is not to be had."""
        log.error("node %s: %s", binding.node, error.message, extra={"call": call.id})
        self._link.send(binding.node, Cancel(call.id, binding.epoch, error.code, error.message))
        if binding is call.binding:
            self._ending.ended(call, binding, End(error=error.body()))
        else:
            self._moves.drop(call, error.message)

    def _on_item(self, call: Call, binding: Binding, item: Incoming, now: float) -> None:
        if call.move is not None and binding is not call.binding:
            self._moves.on_item(call, call.move, item, now)
        elif isinstance(item, Segment):
            self._on_frames(call, binding, item.frames, now)
        elif isinstance(item, Beat):
            self._handover.accepted(call, binding)
            binding.on_beat(item.next_index, now)
        elif isinstance(item, Ack):
            self._link.send_all(binding.node, binding.on_ack(item.next_index, item.limit, now))
        elif isinstance(item, Resend):
            self._link.send_all(binding.node, binding.on_resend(item.index, now))
        elif binding.accepted:
            why = f"node {binding.node} (instance {binding.instance}) no longer has the call"
            self._ending.lost(call, binding, why)
        if binding.due < call.due:
            call.due = binding.due

    def _on_frames(self, call: Call, binding: Binding, frames: tuple[Frame, ...], now: float) -> None:
        if not binding.accepted:
            self._handover.accepted(call, binding)
        before = binding.inbox.received_bytes
        ready = binding.on_frames(frames, now)
        cost = binding.inbox.received_bytes - before
        if call.move is not None:
            ready, dropped = self._moves.sift(call, binding, ready, now)
            cost -= dropped
        self._arrived(call, binding, ready, cost, now)
        if call.move is not None and binding is call.binding:
            self._moves.on_source(call, ready, now)

    def written(self, call: Call) -> None:
        """See ``Arrivals.written``."""
        self._arrivals.written(call)

    def moved(self, call: Call, binding: Binding, frames: list[Frame], now: float) -> None:
        """Frames of ``binding`` that have waited until it was the call's."""
        try:
            self._arrived(call, binding, frames, sum(frame.cost for frame in frames), now)
        except (ProtocolError, NotDeterministic) as error:
            self._broken(call, binding, error)

    def _arrived(self, call: Call, binding: Binding, ready: list[Frame], cost: int, now: float) -> None:
        end = ready.pop() if ready and ready[-1].kind is _END else None
        if ready:
            self._deliver(call, binding, ready, cost if end is None else cost - end.cost, now)
        if end is not None:
            self._ending.ended(call, binding, codec.unpack(End, end.data))
        elif not (ready and call.order.stream) and binding is call.binding:  # those the reader acknowledges
            self._link.send_all_later(binding.node, binding.acknowledge(now))

    def _deliver(self, call: Call, binding: Binding, ready: list[Frame], cost: int, now: float) -> None:
        if call.resumption is not None:
            call.resumption.take(ready)
        if call.over:
            binding.inbox.consume(cost)
            return
        marks = call.marks
        if marks.first is None:
            marks.first = now
        marks.last = now
        fits, why = _gather(call, ready, self._max_output) if call.journaled else (len(ready), "")
        call.frames += ready[:fits]
        call.buffered += cost
        if not why and call.journaled and call.gathered.nbytes:  # such a value is here until it is whole, and written
            why = self._no_room(call, call.collected + cost)
            if why:
                call.drop_gathered()
                self._calls.collects(call, 0)  # for the others, at once
        if why:
            self._ending.fail(call, OutputTooLarge(f"a value of the answer {why}; yield it in several, or answer less"))
        elif call.order.stream:
            self._arrivals.add(call)
        else:
            self._collect(call, binding, cost)

    def _collect(self, call: Call, binding: Binding, cost: int) -> None:
        """It is to be whole: collected here, and bounded."""
        binding.inbox.consume(cost)
        nbytes = call.buffered - len(call.frames) * limits.FRAME_COST
        full = self._no_room(call, call.buffered)  # frames too: each takes more memory than a token in it
        why = too_large(nbytes, len(call.frames), self._max_output) or full
        if why:
            self._ending.fail(call, OutputTooLarge(f"the answer {why}; stream it, or answer less"))
            call.frames.clear()
            self._calls.collects(call, 0)  # for the others, at once

    def _no_room(self, call: Call, cost: int) -> str:
        """So much of its answer is here: why that is too much, with all others'."""
        self._calls.collects(call, cost)
        return no_room(self._all_outputs) if self._calls.collected > self._all_outputs else ""

    def on_restart(self, node: str) -> None:
        """A node was started anew. It answers ``Unknown`` for the calls it has lost."""
        self._moves.on_lost_node(node, f"node {node} was restarted")
        for call, binding in self._bound_to(node):
            self._link.send(node, Resend(call.id, binding.epoch, binding.inbox.next_index))

    def _bound_to(self, node: str) -> list[tuple[Call, Binding]]:
        bound = ((call, call.binding) for call in self._calls.values() if call.binding is not None)
        return [(call, binding) for call, binding in bound if binding.node == node and binding.accepted]

    def overdue(self) -> list[str]:
        """Nodes that run calls of this gateway, and should have said something of them since."""
        heard: dict[str, float] = {}
        for binding in self._bindings():
            heard[binding.node] = max(heard.get(binding.node, 0.0), binding.inbox.heard)
        before = self._clock() - limits.CALL_OVERDUE_S
        return [node for node, at in heard.items() if at <= before]

    def _bindings(self) -> Iterator[Binding]:
        for call in self._calls.values():
            for binding in (call.binding, call.move.binding if call.move is not None else None):
                if binding is not None and binding.accepted:
                    yield binding

    def on_left(self, node: str) -> None:
        """A node has left NATS: what runs there is lost, without waiting for its silence."""
        why = f"node {node} has left"
        self._moves.on_lost_node(node, why)
        for call, binding in self._bound_to(node):
            self._ending.lost(call, binding, why)

    def on_reconnect(self) -> None:
        """Messages may have been lost in both directions."""
        now = self._clock()
        self._moves.on_reconnect(now)
        for call in self._calls.values():
            call.due = now
            if call.binding is not None:
                self._link.send_all(call.binding.node, call.binding.recovered(now))


def _gather(call: Call, frames: list[Frame], most: int) -> tuple[int, str]:
    """How many of them fit, and what is wrong with the value that the next one is of; empty: nothing. Its reader has to
    gather what comes in parts: credit alone does not bound that."""
    for at, frame in enumerate(frames):
        call.gathered.take(frame)
        if why := too_large(call.gathered.nbytes, call.gathered.frames, most):
            return at, why
    return len(frames), ""


def too_large(nbytes: int, frames: int, most: int) -> str:
    """What is wrong with an answer of so many bytes in so many frames, where it is to be whole and of ``most`` bytes;
    empty: nothing."""
    if nbytes > most:
        return f"is larger than {most} bytes"
    pieces = most // FRAME_BYTES
    return f"is in more than {pieces} pieces" if frames > pieces else ""


def no_room(most: int) -> str:
    """What is wrong with an answer where all that are to be whole have ``most`` bytes."""
    return f"has no room: those that this gateway collects have {most} bytes together"

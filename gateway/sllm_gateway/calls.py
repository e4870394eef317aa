"""All calls of this gateway, from admission to their last frame: the parts put together, and the caller's side.

One state table: ``states.CALL``. ``dispatch`` finds an instance, ``handover`` asks it, ``delivery`` takes its frames,
``timers`` looks at deadlines, ``ending`` ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from sllm_gateway.call import Call, Earlier, Marks, Order
from sllm_gateway.delivery import Delivery, no_room
from sllm_gateway.dispatch import Dispatcher
from sllm_gateway.ending import Ending
from sllm_gateway.handover import Handover
from sllm_gateway.journal import moved
from sllm_gateway.leader import Leader
from sllm_gateway.link import Link
from sllm_gateway.metrics import Metrics
from sllm_gateway.moves import Moves
from sllm_gateway.news import Tell
from sllm_gateway.open_calls import OpenCalls
from sllm_gateway.resumption import Resumption
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.starts import Starts
from sllm_gateway.table import Version
from sllm_gateway.timers import Timers
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.presence import Presence
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import CallMoved, Cancelled, Draining, GatewayStopped, SllmError
from sllm_runtime.protocol.frames import ToNode
from sllm_runtime.protocol.node import NodeStatus, Progress
from sllm_runtime.protocol.states import CallState

log = logging.getLogger(__name__)

STOPPING: Final = "the gateway is stopping; call again"
STOPPED: Final = (
    "the gateway stopped while the call ran, and what it did stands; call again where doing it twice does no harm"
)


class Calls:
    """All calls. ``start`` before use; ``close`` ends what is left."""

    def __init__(
        self,
        bus: Bus,
        leader: Leader,
        settings: GatewaySettings,
        metrics: Metrics,
        clock: Callable[[], float],
        starts: Starts,
        on_end: Callable[[Call], None] = lambda _: None,
        tell: Tell = lambda kind, call, why, others=(): None,
        on_place: Callable[[Call], None] = lambda _: None,
    ) -> None:
        """``on_end`` is told of each call that is over, once; ``on_place`` as in ``Handover``."""
        self._clock = clock
        self._starts = starts
        self._tasks = Tasks("calls")
        self._draining = False
        self._open = OpenCalls()
        self._all_outputs = settings.all_outputs()
        self._link = Link(bus, settings.gateway, clock)
        self.dispatcher = Dispatcher(
            leader,
            settings.gateway,
            clock,
            place=lambda call, entry, came, now: self._handover.place(call, entry, came, now),
            fail=self.fail,
            to_go=lambda key: self._moves.to_go(key),
            tell=tell,
        )
        self._moves = Moves(
            self._open,
            self._link,
            self.dispatcher,
            metrics,
            settings.window,
            clock,
            self._tasks,
            deliver=lambda call, binding, frames, now: self._delivery.moved(call, binding, frames, now),
            fail=self.fail,
            tell=tell,
        )
        self._ending = Ending(self._open, self._link, self.dispatcher, self._moves, metrics, clock, on_end, tell)
        self._handover = Handover(
            self._link, self.dispatcher, self._ending, settings.window, clock, self._tasks, tell, on_place
        )
        self._delivery = Delivery(
            self._open,
            self._link,
            self._handover,
            self._ending,
            self._moves,
            settings.max_output,
            self._all_outputs,
            clock,
        )
        self._presence = Presence(
            bus,
            lambda node: subjects.node_calls(node, settings.gateway),
            ToNode(()),
            self._delivery.overdue,
            self._delivery.on_left,
            clock,
        )
        self._timers = Timers(
            self._open, self._link, self.dispatcher, self._moves, starts, settings, clock, self._ending
        )

    def __len__(self) -> int:
        return len(self._open)

    def get(self, call: str) -> Call | None:
        """The call of that id, if it is open."""
        return self._open.get(call)

    def open(self) -> list[Call]:
        """Those that have not ended, in the order in which they came."""
        return [call for call in self._open.values() if not call.settled]

    def waits(self, call: Call) -> Progress | None:
        """What the call waits for: a start and how far it is, a node, or room; None: nothing, or it is not known."""
        if call.binding is not None or call.over:
            return None
        key = call.version.key
        return self._starts.of(key, self._clock()) or self.dispatcher.waits(key)

    def drawn(self) -> dict[str, int]:
        """Completion tokens so far of the open calls whose ids are kept here, by function."""
        found: dict[str, int] = {}
        for call in self._open.values():
            if call.resumption is not None:
                found[call.version.function] = found.get(call.version.function, 0) + call.resumption.count
        return found

    async def start(self) -> None:
        """Listen for frames, begin to look at deadlines."""
        await self._link.start(self._delivery)
        self._tasks.start(self._timers.run(), "ticks")
        self._presence.start()

    async def drain(self, seconds: float) -> None:
        """Take no new call; those that are open have ``seconds`` to end."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._open.none.wait()
        except TimeoutError:
            log.info("%d call(s) have not ended within %g s", len(self._open), seconds)

    def hand_on(self, calls: Iterable[Call], why: str) -> None:
        """Another gateway goes on with these: their callers are sent there."""
        for call in calls:
            self._ending.hand_on(call, moved(call.id, why))

    def stop(self, but: Collection[Call] = ()) -> None:
        """Take no call; end all that are open, ``but`` these, and those whose answer is all here. Repeatable."""
        self._draining = True
        for call in [each for each in self._open.values() if not each.over and each not in but]:
            begun = call.binding is not None or call.attempts > 0
            self.fail(call, GatewayStopped(STOPPED) if begun else Draining(STOPPING))

    async def close(self) -> None:
        """End everything; nodes are told to cancel what still runs."""
        self.stop()
        await self._presence.close()
        await self._tasks.close()
        await self.dispatcher.close()
        await self._link.close()

    # --- the caller's side ------------------------------------------------------------------------
    @property
    def draining(self) -> bool:
        """Whether no call is begun any more, since this gateway ends."""
        return self._draining

    def left(self, call: Call) -> bool:
        """Whether it has ended here alone: another gateway, or the next life of this one, goes on with it."""
        if isinstance(call.error, CallMoved):
            return True
        return self._draining and call.journaled and isinstance(call.error, Draining)  # or says how it has ended

    def require_open(self) -> None:
        """Raises ``Draining`` where no call is begun any more."""
        if self._draining:
            raise Draining(STOPPING)

    def admit(self, order: Order, earlier: Earlier | None = None) -> Call:
        """Begin a call, or go on with an ``earlier`` one. Raises ``QueueFull`` or ``Draining``."""
        self.require_open()
        call = Call(order, Marks(order.version.route, sent=order.accepted), due=self._clock())
        if order.version.manifest.engine and order.version.manifest.resumable:
            call.resumption = Resumption()
        if earlier is not None:
            call.epoch, call.numerics, call.taken = earlier.epoch, earlier.numerics, earlier.taken
            call.resumption, call.exact, call.inherited = earlier.resumption, earlier.exact, True
        self._open.add(call)
        try:
            self.dispatcher.submit(call)
        except SllmError as error:
            if earlier is not None:  # it has not ended: who takes it up tries again, or gives it up
                self._open.discard(call)
                raise
            self._ending.over(call, error)
            self._ending.left(call)
            raise
        return call

    def consumed(self, call: Call, cost: int, now: float) -> None:
        """The reader has written frames of this ``cost``: the node may send as much again."""
        call.buffered -= cost
        if call.of_before:
            of_before = min(cost, call.of_before)
            call.of_before -= of_before
            cost -= of_before
        binding = call.binding
        if binding is not None and not call.over:
            call.marks.read = now
            if acknowledgement := binding.consumed(cost, now):
                self._link.send_all_later(binding.node, acknowledgement)

    def stored(self, call: Call) -> None:
        """Its journal has what there was, but for what is here still."""
        if call.collected:
            self._open.collects(call, sum(frame.cost for frame in (*call.held, *call.frames)))

    def written(self, call: Call) -> None:
        """Its reader waits, and has written what was due."""
        self._delivery.written(call)

    def leave(self, call: Call) -> None:
        """The reader is done with it. What still runs for it is cancelled."""
        self._ending.left(call)

    def fail(self, call: Call, error: SllmError) -> None:
        """End the call with ``error`` for its caller, and cancel it on its node."""
        self._ending.fail(call, error)

    def cancel(self, call: str) -> bool:
        """End the call of that id on request: whether it is cancelled. One that is over stays as it is."""
        found = self._open.get(call)
        if found is None:
            return False
        self._ending.fail(found, Cancelled("cancelled on request"))
        return found.state is CallState.CANCELLED

    def on_version(self, version: Version) -> None:
        """Its route has changed, or it was removed."""
        self.dispatcher.on_version(version)
        self._moves.on_version(version)

    def collects(self, cost: int) -> str:
        """A reader of a kept call that wants it whole holds so much more of it, or less: why that is too much."""
        self._open.collected += cost
        return no_room(self._all_outputs) if self._open.collected > self._all_outputs else ""

    # --- the nodes' reports -----------------------------------------------------------------------
    def on_status(self, status: NodeStatus, subject: str) -> None:
        """A node's report: how far starts are (``Timers`` tells who waits), room on instances, and whether the node was
        started anew."""
        if subject.rpartition(".")[2] != status.node:  # rights bind a node to its subject, not to the name it gives
            return
        now = self._clock()
        restarted = self._starts.restarted(status)
        self._starts.on_status(status, now)
        for instance in status.instances:
            self.dispatcher.on_room((instance.function, instance.version), instance.instance, instance.running)
        if restarted:
            self._delivery.on_restart(status.node)

"""Hands calls to instances, each of which says whether it takes the call: what it refuses goes back to the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from sllm_gateway.binding import Binding
from sllm_gateway.call import Call
from sllm_gateway.dispatch import Dispatcher
from sllm_gateway.ending import Ending
from sllm_gateway.link import Link
from sllm_gateway.news import Tell
from sllm_runtime.platform import trace
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import CallMoved, Cancelled, DeadlineExceeded, InstanceLost, JournalExpired, SllmError
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.records import RouteEntry
from sllm_runtime.protocol.states import CallState

log = logging.getLogger(__name__)


class Handover:
    """``window``: bytes of an answer that may be on their way, as credit counts them."""

    def __init__(
        self,
        link: Link,
        dispatcher: Dispatcher,
        ending: Ending,
        window: int,
        clock: Callable[[], float],
        tasks: Tasks,
        tell: Tell,
        on_place: Callable[[Call], None],
    ) -> None:
        """``on_place`` is told of each call that an instance is asked to take, before that is."""
        self._link = link
        self._dispatcher = dispatcher
        self._ending = ending
        self._window = window
        self._clock = clock
        self._tasks = tasks
        self._tell = tell
        self._on_place = on_place

    def place(self, call: Call, entry: RouteEntry, came: float, now: float) -> None:
        """Ask the instance of ``entry``, which is there since ``came``, to take the call, under a new epoch."""
        call.due = now
        if call.bound_to_numerics and call.numerics != entry.fingerprint:  # none of its own lives
            self._dispatcher.release(call, entry.instance)
            text = f"the instance died, and {entry.instance} computes other bits, or serves another context: the rest"
            text += " would be of another answer"
            self._ending.fail(call, InstanceLost(f"{text}; call again"))
            return
        if call.numerics and call.numerics != entry.fingerprint:
            call.draw_anew()
        if call.marks.first is not None:
            call.marks.resumed, call.marks.offered = now, None
        else:
            call.marks.sent = now
            known = any(each.instance == entry.instance for each in call.marks.route.entries)
            call.marks.offered = (entry, came) if not known and came >= call.order.accepted else None
        call.epoch += 1
        call.binding = Binding(call.id, call.epoch, entry, call.order.body, self._window, now)
        self._on_place(call)
        self._tasks.start(self._open(call, call.binding), "open")

    async def _open(self, call: Call, binding: Binding) -> None:
        if not await self._may_open(call, binding):
            return
        binding.asked, binding.inbox.heard = True, self._clock()
        request = call.request(binding, binding.inbox.heard)
        try:
            with trace.within(call.order.traceparent):
                opened = await self._link.open(binding.node, request, partial(self._still, call, binding))
        except DeadlineExceeded:
            if not binding.accepted and call.binding is binding:
                call.attempts += 1  # it may have been taken, and run: only `retries` lets it begin again
                call.marks.again = None
                why = f"node {binding.node} did not answer for instance {binding.instance}"
                self._ending.lost(call, binding, why)
            return
        except (CallMoved, JournalExpired, Cancelled) as error:  # it is over, or another gateway has it
            if call.binding is binding:
                self._ending.fail(call, error)  # its node may have it, and is told
                if not binding.accepted:
                    self._ending.spared(call, binding)
            return
        except SllmError as error:
            self._refused(call, binding, "gone", error.message)
            return
        if opened.status == "accepted":
            self.accepted(call, binding)
            if call.binding is binding and not call.over:
                self._link.send_all(binding.node, binding.body(self._clock()))
        else:
            self._refused(call, binding, opened.status, opened.note)

    @staticmethod
    async def _still(call: Call, binding: Binding) -> None:
        """As ``_may_open``, after a time without a connection. Raises why it is not to be asked."""
        if call.before_open is not None:
            await call.before_open()
        if call.over or call.binding is not binding:
            raise Cancelled("it has ended while there was no connection to ask over")

    async def _may_open(self, call: Call, binding: Binding) -> bool:
        """Whether it is to be asked still, when what comes before that is done. Else its slot is free again."""
        if call.before_open is not None:
            try:
                await call.before_open()
            except SllmError as error:
                self._ending.fail(call, error)
        if call.binding is not binding:
            return False
        if call.over:
            self._ending.spared(call, binding)
            return False
        return True

    def accepted(self, call: Call, binding: Binding) -> None:
        """The instance has the call: it said so, or sent something of it. Repeatable."""
        if binding.accepted or call.binding is not binding:
            return
        call.due = self._clock()
        binding.accept(call.due)
        call.marks.heard = call.due  # what came before it was asked is not the function's silence
        self._dispatcher.accepted(call, binding.instance)
        if not call.over:
            call.attempts += 1
            call.marks.waited = 0.0  # should it have to wait again
            call.marks.again = None
            call.numerics = call.numerics or binding.entry.fingerprint
            call.exact = call.exact and binding.entry.exact
            call.go(CallState.RUNNING)
            if call.marks.offered is not None and binding.instance not in call.cold:
                call.marks.started, call.marks.ready = call.marks.offered
                call.cold += (binding.instance,)
                self._tell(Kind.CALL_COLD, call, f"began after {call.due - call.order.accepted:.2f} s")

    def _refused(self, call: Call, binding: Binding, status: str, note: str) -> None:
        """It was never taken there: back to the head of the queue."""
        if call.binding is not binding or binding.accepted:
            return
        call.binding = None
        log.debug("%s by %s: %s", status, binding.instance, note, extra={"call": call.id})
        self._dispatcher.refused(call, binding.instance, gone=status == "gone")
        if call.over:
            self._ending.forget_if_over(call)
        else:
            call.go_on(self._clock())
            self._dispatcher.submit_again(call)

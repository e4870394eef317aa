"""How a call ends: for its caller, on its instance, and here, when both have ended. Or begins again instead."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sllm_gateway.binding import Binding
from sllm_gateway.call import Call
from sllm_gateway.dispatch import Dispatcher
from sllm_gateway.link import Link
from sllm_gateway.metrics import Metrics
from sllm_gateway.moves import Moves
from sllm_gateway.news import Tell
from sllm_gateway.open_calls import OpenCalls
from sllm_gateway.retry import worth_resuming, worth_retrying
from sllm_runtime.platform import trace
from sllm_runtime.protocol.errors import (
    CallMoved,
    Cancelled,
    DeadlineExceeded,
    Draining,
    GatewaySilent,
    InstanceLost,
    NotDeterministic,
    SllmError,
    SlowConsumer,
)
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.frames import Cancel, End
from sllm_runtime.protocol.states import CallState

log = logging.getLogger(__name__)


class Ending:
    """Ends calls. One that has ended for its caller stays open until its node has confirmed the end."""

    def __init__(
        self,
        calls: OpenCalls,
        link: Link,
        dispatcher: Dispatcher,
        moves: Moves,
        metrics: Metrics,
        clock: Callable[[], float],
        on_end: Callable[[Call], None],
        tell: Tell,
    ) -> None:
        """``on_end`` is told of each call that is over, once."""
        self._calls = calls
        self._link = link
        self._dispatcher = dispatcher
        self._moves = moves
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self._tell = tell

    # --- for its caller ---------------------------------------------------------------------------
    def fail(self, call: Call, error: SllmError) -> None:
        """End the call with ``error`` for its caller, and cancel it on its node."""
        if call.settled:
            return
        if call.binding is None:
            self._dispatcher.withdraw(call)
        else:
            self._link.send_all(call.binding.node, call.binding.cancel(error.code, error.message, self._clock()))
            call.due = min(call.due, call.binding.due)
        self.over(call, error)

    def hand_on(self, call: Call, error: CallMoved) -> None:
        """Another gateway goes on with it: its caller is sent there, also one that lags behind a whole answer."""
        if call.over:
            self.cut(call, error)
        else:
            self.fail(call, error)

    def over(self, call: Call, error: SllmError) -> None:
        """The end, as far as the caller goes."""
        self._moves.drop(call, "it has ended")
        if isinstance(error, Cancelled | CallMoved):
            call.frames.clear()
            call.held.clear()
            self._calls.collects(call, 0)
        call.error, call.marks.failed = error, self._clock()
        call.go(CallState.CANCELLED if type(error) is Cancelled else CallState.FAILED)
        call.free_reader()
        self.forget_if_over(call)

    def left(self, call: Call) -> None:
        """Its reader is done with it. What still runs for it is cancelled."""
        call.reading = False
        call.unblock = None
        self.fail(call, Cancelled("the caller went away"))
        call.frames.clear()  # of one that has failed too: its node may be slow to confirm that
        self._calls.collects(call, 0)
        self.forget_if_over(call)

    def cut(self, call: Call, error: SllmError) -> None:
        """All of the answer is here, and its caller, or its journal, does not take it: it is not waited for any
        longer."""
        if not call.settled:
            self.fail(call, error)
        elif call.writing is not None and not isinstance(call.error, SlowConsumer | DeadlineExceeded):
            call.error = error
            call.frames.clear()
            call.free_reader()

    # --- on its instance --------------------------------------------------------------------------
    def ended(self, call: Call, binding: Binding, end: End) -> None:
        """The call is over on its instance."""
        self._link.send_all_later(binding.node, binding.acknowledge(self._clock(), force=True))
        self._metrics.resent.inc(binding.resends)
        call.binding, call.marks.instance = None, binding.instance
        error = end.error.to_error() if end.error is not None else None
        if error is None and not call.over and call.resumption is not None and call.resumption.lacks:
            error = NotDeterministic(
                "there are fewer outputs than before the call's gateway died: its function is not deterministic; call"
                " again"
            )
        if isinstance(error, InstanceLost | Draining):
            self._dispatcher.refused(call, binding.instance, gone=True)
        else:
            self._dispatcher.release(call, binding.instance)
        stopped = end.stopped or isinstance(error, GatewaySilent)
        if isinstance(error, InstanceLost) and self._moves.take_over(call, stopped=stopped):
            return
        self._moves.drop(call, "it has ended")
        if error is None and not call.over:
            call.answered(end)
            call.wake()
        elif error is not None and end.unseen and binding.inbox.next_index == 1 and not call.over:
            self._elsewhere(call)  # END is all that came of it
        elif error is not None and not self._again(call, error, stopped=stopped):
            call.end = end
            if isinstance(error, Draining) and not end.unseen:  # which says of a call that no function has seen it
                error = InstanceLost(f"{error.message}, which a call that has begun cannot do; call again")
            self._end_with(call, error)
        self.forget_if_over(call)

    def lost(self, call: Call, binding: Binding, why: str) -> None:
        """Nothing more is to be expected of its instance."""
        stopped = not binding.accepted
        call.binding, call.marks.instance = None, binding.instance
        self._link.send(binding.node, Cancel(call.id, binding.epoch, reason=why))
        self._dispatcher.refused(call, binding.instance, gone=True)
        if self._moves.take_over(call, stopped=stopped):
            return
        self._moves.drop(call, why)
        error = InstanceLost(f"{why}; call again")
        if not self._again(call, error, stopped=stopped):
            self._end_with(call, error)
        self.forget_if_over(call)

    def spared(self, call: Call, binding: Binding) -> None:
        """It is over, and its instance was never asked: that one's slot is free."""
        call.binding = None
        self._dispatcher.release(call, binding.instance)
        self.forget_if_over(call)

    def _end_with(self, call: Call, error: SllmError) -> None:
        if not call.over:
            call.error, call.marks.failed = error, self._clock()
            call.go(CallState.FAILED)
            call.wake()

    def _elsewhere(self, call: Call) -> None:
        """As where its instance had refused it: what it has of others stands."""
        call.attempts -= 1
        call.go_on(self._clock())
        self._dispatcher.submit_again(call)

    def _again(self, call: Call, error: SllmError, *, stopped: bool) -> bool:
        """Whether another instance has it: it goes on, or begins again. ``stopped``: see ``Call.break_off``."""
        with trace.within(call.order.traceparent):
            return self._resume(call, error, stopped) or self._retry(call, error)

    def _resume(self, call: Call, error: SllmError, stopped: bool) -> bool:
        """Whether the call goes on elsewhere from its tokens; its caller sees a gap and nothing else."""
        if call.over or call.resumption is None or not worth_resuming(error):
            return False
        if not call.break_off(stopped=stopped):
            return False
        delivered = call.resumption.delivered
        if call.collected:  # without the half that was dropped
            self._calls.collects(call, call.buffered)
        log.warning("call goes on elsewhere after %d output(s): %s", delivered, error.message, extra={"call": call.id})
        self._metrics.resumed.labels(call.version.function).inc()
        self._tell(Kind.CALL_RESUMED, call, error.message)
        call.go_on(self._clock())
        self._dispatcher.submit_again(call)
        return True

    def _retry(self, call: Call, error: SllmError) -> bool:
        """Whether the call begins again: allowed so often by the function, and the caller has seen nothing of it."""
        if call.over or call.taken or call.attempts > call.version.manifest.retries or not worth_retrying(error):
            return False
        log.info("call begins again: %s", error.message, extra={"call": call.id, "attempt": call.attempts})
        self._tell(Kind.CALL_RETRIED, call, error.message)
        call.begin_again(self._clock())
        self._calls.collects(call, 0)
        self._dispatcher.submit_again(call)
        return True

    # --- here -------------------------------------------------------------------------------------
    def forget_if_over(self, call: Call) -> None:
        """Let go of a call that nobody waits for any more."""
        if not call.over or call.reading or call.binding is not None:
            return
        if self._calls.discard(call):
            try:
                self._metrics.ended(call, self._clock())
            finally:
                self._on_end(call)  # who else knows of it looks at it no more

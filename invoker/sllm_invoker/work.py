"""The calls that one worker runs: numbered, fed, credited, cancelled, ended. Messages to and from it, no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from sllm_invoker.call import Call
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import BY_CODE, Cancelled, ErrorBody, ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.frames import Feed
from sllm_runtime.protocol.node import StartInstance
from sllm_runtime.protocol.worker import (
    Assign,
    CallBody,
    CallFrames,
    CancelCall,
    Credit,
    FeedCall,
    Follow,
    Hello,
    HoldCall,
    StartCall,
    Stop,
    ToWorker,
)

Said: TypeAlias = Assign | StartCall | CallBody | Credit | Follow | FeedCall | HoldCall | CancelCall | Stop
REMEMBERED = 256
"""Ended calls whose late log lines still get their call's id."""


class Work:
    """What the relay sees of a worker (``relay.Host``), and what its instance does."""

    def __init__(
        self,
        order: StartInstance,
        wire: AsyncWire,
        ready: Callable[[Call], None],
        consumed: Callable[[Call, int], None],
        silent: Callable[[SllmError], None],
        clock: Callable[[], float],
    ) -> None:
        self._order = order
        self._wire = wire
        self._ready = ready
        self._consumed = consumed
        self._silent = silent
        self._clock = clock
        self._calls: dict[int, Call] = {}
        self._names: OrderedDict[int, str] = OrderedDict()
        self._last = 0
        self._open = False
        self.holds = False
        """Whether they may be held, and take ids."""
        self._idle_since = clock()
        self.served = 0
        """Calls that ended, but for those that were cancelled."""
        self.whole = 0
        """Of these, those that had begun here: how long one takes that came from elsewhere nobody knows."""
        self.worked_s = 0.0
        """Seconds that these took together."""
        self._ids: list[FeedCall | HoldCall] = []
        """To be told at the end of this loop tick."""
        self._fed: list[tuple[Call, int]] = []
        self._feeding = asyncio.Event()

    # --- slots --------------------------------------------------------------------------------------
    @property
    def open_for_calls(self) -> bool:
        """READY, and not draining."""
        return self._open

    @property
    def free_slot(self) -> bool:
        """Whether it can take one more call now."""
        return len(self._calls) < self._order.manifest.concurrency

    @property
    def running(self) -> int:
        """Calls it works on."""
        return len(self._calls)

    def idle_s(self, now: float) -> float:
        """Seconds since the last call ended, or since it was ready; 0 while it works or starts."""
        return 0.0 if self._calls or not self._open else max(0.0, now - self._idle_since)

    def unused_s(self, now: float) -> float:
        """Seconds since the last call ended, also when it takes no more; 0 while it works."""
        return 0.0 if self._calls else max(0.0, now - self._idle_since)

    def open(self, *, holds: bool) -> None:
        """The worker is ready."""
        self._open, self.holds = True, holds
        self._idle_since = self._clock()

    def close(self) -> None:
        """No new calls from now on."""
        self._open = False

    def next_number(self) -> int:
        """Number of its next call."""
        self._last += 1
        return self._last

    def name(self, number: int | None) -> str | None:
        """Id of the call with this number, if it runs or ran lately."""
        if number is None:
            return None
        call = self._calls.get(number)
        return call.head.call if call is not None else self._names.get(number)

    # --- towards the worker ---------------------------------------------------------------------------
    def tell(self, body: Said, fds: Sequence[int] = (), *, granted: bool = False) -> None:
        """Queue one message. A worker that is gone is noticed by who listens to it. ``granted``: parts of bodies, of
        which each call may have a window on its way, however slowly all of them together are taken."""
        with self._noticing():
            self._wire.send(codec.pack(ToWorker(body)), fds, granted=granted)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            if not self._wire.closed and not self._wire.peer_gone:
                self._silent(error)

    def begin(self, call: Call, body: list[bytes]) -> None:
        """Hand over a call and what is here of its body."""
        self._calls[call.number] = call
        self.tell(StartCall(number=call.number, head=call.head, body=body[0] if body else b""), granted=True)
        if body:
            self._count(call, body[0])
        self.feed(call, body[1:])

    def feed(self, call: Call, body: list[bytes]) -> None:
        """More of the body."""
        for part in body:
            if call.running:
                self.tell(CallBody(call.number, part), granted=True)
            self._count(call, part)

    def _count(self, call: Call, part: bytes) -> None:
        if call.body.ended and not call.body.owes:
            return  # all of it is here, and its gateway knows
        self._fed.append((call, len(part) + limits.FRAME_COST))  # bounded by each call's window
        self._feeding.set()

    async def feed_back(self) -> None:
        """Grant gateways new credit for bodies once the worker has taken what it was given."""
        while True:
            await self._feeding.wait()
            self._feeding.clear()
            await self._wire.drain()
            fed, self._fed = self._fed, []
            for call, cost in fed:
                self._consumed(call, cost)

    def credit(self, call: Call) -> None:
        """The call's gateway takes more."""
        if (limit := call.new_credit()) is not None:
            self.tell(Credit(call.number, limit))

    def follow(self, call: Call, on: bool) -> None:
        """Whether the call's ids are to come as they are drawn. Repeatable: the worker is told once."""
        if call.followed is not on:
            call.followed = on
            self.tell(Follow(call.number, on))

    def tell_ids(self, call: Call, item: Feed) -> None:
        """Ids that the call has where it comes from. Repeatable. Those of calls that move together go together: the
        worker's engine computes them in one step."""
        told = (item.generation, item.first, item.ids, item.held, item.ended, item.cached)
        self._tell_soon(FeedCall(call.number, *told))

    def hold(self, call: Call, interval_s: float) -> None:
        """The call is to draw no more, or only a token each ``interval_s``. Repeatable. Those that move together are
        told in one message."""
        self._tell_soon(HoldCall(call.number, interval_s))

    def _tell_soon(self, item: FeedCall | HoldCall) -> None:
        if not self._ids:
            asyncio.get_running_loop().call_soon(self._tell_ids)
        self._ids.append(item)

    def _tell_ids(self) -> None:
        items, self._ids = self._ids, []
        with self._noticing():
            self._wire.send_together(codec.pack(ToWorker(item)) for item in items)

    def cancel(self, call: Call, code: str, reason: str) -> None:
        """Stop the call; its END follows. Repeatable: the first reason holds."""
        if call.cancel is None:
            call.cancel, call.cancelled_at = (code, reason), self._clock()
            self.tell(CancelCall(call.number, code, reason))

    def forgive(self, now: float) -> None:
        """That no END of what was cancelled came until now has another reason."""
        for call in self._calls.values():
            call.cancelled_at = now

    def deaf(self, now: float) -> Call | None:
        """A call that goes on LOST_AFTER_S after it was cancelled."""
        for call in self._calls.values():
            if call.cancel is not None and now - call.cancelled_at > limits.LOST_AFTER_S:
                return call
        return None

    # --- from the worker ------------------------------------------------------------------------------
    def on_message(self, body: CallFrames | Hello) -> bool:
        """Frames of its calls. Whether a call ended. Raises ``ProtocolError`` on what a right worker does not send."""
        if not isinstance(body, CallFrames):
            raise ProtocolError(f"{type(body).__name__} from a worker at work")
        now, ended = self._clock(), False
        for number, frames in body.items:
            call = self._calls.get(number)
            if call is None:
                raise ProtocolError(f"frames for call number {number}, which does not run")
            call.push(frames, now)
            if not call.running:
                self._done(call)
                ended = True
            self._ready(call)
        return ended

    def _done(self, call: Call) -> None:
        del self._calls[call.number]
        self._names[call.number] = call.head.call
        if len(self._names) > REMEMBERED:
            self._names.popitem(last=False)
        now = self._clock()
        if call.cancel is None:
            self.served += 1
            if not (call.head.recorded or call.head.delivered):
                self.whole, self.worked_s = self.whole + 1, self.worked_s + (now - call.began)
        if not self._calls:
            self._idle_since = now

    def end(self, error: SllmError, *, stopped: bool) -> None:
        """The worker is gone: every running call ends with ``error``, one that was cancelled with its own code.
        ``stopped``: its end was asked for."""
        self._open = False
        for call in list(self._calls.values()):
            call.fail(_cancelled(call) or error.body(), self._clock(), stopped=stopped)
            self._done(call)
            self._ready(call)


def _cancelled(call: Call) -> ErrorBody | None:
    if call.cancel is None:
        return None
    code, reason = call.cancel
    kind = BY_CODE.get(code, Cancelled)
    return kind(reason or f"call {call.head.call} was cancelled").body()

"""One running call: its outputs, usage, recorded ids, and how it is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ErrorBody, FunctionError, NotDeterministic, SllmError
from sllm_runtime.protocol.frames import CallHead, End, FrameKind, Ids, Usage
from sllm_runtime.protocol.timeline import FIRST_TOKEN, TOKENS, Span
from sllm_runtime.worker.fed import Fed
from sllm_runtime.worker.outgoing import Outgoing
from sllm_runtime.worker.own import marked
from sllm_runtime.worker.values import encode

_IDS_TOGETHER = 16
"""Recorded ids may lag behind outputs by this many: a resume samples those anew, and gets the same."""

current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("sllm_current_call", default=None)
"""The call whose code runs here; what a model's ``generate`` finds seed, cancellation and usage by."""


class Call:
    """One running call."""

    def __init__(
        self,
        number: int,
        head: CallHead,
        outgoing: Outgoing,
        *,
        resumable: bool = True,
        late: Callable[[float], tuple[Span, ...]] | None = None,
    ) -> None:
        self.number = number
        self.head = head
        self.resumable = resumable
        self.outgoing = outgoing
        self.body = bytearray()
        self.usage = Usage()
        self.yielded: bool | None = None
        """See ``End``; known before the first output."""
        self.task: asyncio.Task[None] | None = None
        self.following = head.follow
        """Whether ids are sent as they are drawn: another instance is on its way to take over from this one, or this
        one from another."""
        self.fed = Fed(head.recorded, head.ended, cached=head.cached, held=head.held)
        self._cached: dict[int, int] = {}
        """By generation, as they were found here."""
        self._arrived = time.perf_counter()
        self._late = late
        self._first: float | None = None
        self._outputs = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._generations = itertools.count()
        self._stops: dict[int, Callable[[SllmError], None]] = {}
        self._stop_numbers = itertools.count()
        self._lock = threading.Lock()

    # --- output -----------------------------------------------------------------------------------
    def emit(self, value: Any) -> None:
        """Send one value of the function; for threads. Raises ``FunctionError`` or ``CallEnded``."""
        data = _json(value)
        if self._is_new(data):
            self.outgoing.send(FrameKind.OUTPUT, data, self.head.timeout_s)

    async def aemit(self, value: Any) -> None:
        """``emit`` for coroutines."""
        data = _json(value)
        if self._is_new(data):
            await self.outgoing.asend(FrameKind.OUTPUT, data, self.head.timeout_s)

    async def adelta(self, data: bytes) -> None:
        """Send what the engine made for an OpenAI route."""
        if self._is_new(data):
            await self.outgoing.asend(FrameKind.DELTA, data, self.head.timeout_s)

    def _is_new(self, data: bytes) -> bool:
        """False for what a resumed call's caller already has. Raises ``NotDeterministic`` if that was other data."""
        self._first = self._first or time.perf_counter()
        self._outputs += 1
        if self._outputs > self.head.delivered:
            return True
        self._hash.update(data)
        if self._outputs == self.head.delivered and self._hash.digest() != self.head.delivered_hash:
            raise marked(self._differs(f"the first {self._outputs} outputs differ from those delivered"))
        return False

    def _differs(self, how: str) -> NotDeterministic:
        return NotDeterministic(
            f"after a resume {how}; a resumable function must yield the same for the same arguments and tokens; set "
            "resumable=False otherwise"
        )

    # --- generation -------------------------------------------------------------------------------
    def next_generation(self) -> int:
        """Number of this call's next ``generate``."""
        return next(self._generations)

    def record(self, ids: Ids) -> bool:
        """Tell the node which ids were drawn, for a resume. False: there is no credit now; nothing is sent."""
        return self.outgoing.try_send(FrameKind.IDS, codec.pack(ids))

    def count(self, *, prompt: int = 0, completion: int = 0) -> None:
        """Add to the call's usage."""
        with self._lock:
            old = self.usage
            self.usage = Usage(old.prompt + prompt, old.completion + completion)

    def found(self, generation: int, cached: int) -> None:
        """So much of its prompt was computed already. What was found where the call was before counts instead."""
        self._cached[generation] = cached

    def _used(self) -> Usage | None:
        found = dict(self._cached).items()
        cached = sum(own if (first := self.fed.cached(number)) is None else first for number, own in found)
        usage = Usage(self.usage.prompt, self.usage.completion, cached)
        return usage if usage != Usage() else None

    # --- cancellation -----------------------------------------------------------------------------
    def on_cancel(self, stop: Callable[[SllmError], None]) -> Callable[[], None]:
        """Call ``stop`` when the call is cancelled (now, if it is). Returns what takes it back."""
        with self._lock:
            number = next(self._stop_numbers)
            self._stops[number] = stop
            cancelled = self.outgoing.cancelled
        if cancelled is not None:
            stop(cancelled.to_error())
        return lambda: (self._stops.pop(number, None), None)[1]

    def cancel(self, body: ErrorBody) -> None:
        """Stop at the next yield, token or await. On the loop."""
        self.outgoing.cancel(body)
        with self._lock:
            stops = list(self._stops.values())
        for stop in stops:
            stop(body.to_error())
        if self.task is not None:
            self.task.cancel()

    # --- end ----------------------------------------------------------------------------------------
    def end(self, error: ErrorBody | None, *, unseen: bool = False) -> None:
        """Send the last frame. What ends well before it has made all that its caller has, ends as another output.
        ``unseen`` as ``End`` has it."""
        if error is None and self._outputs < self.head.delivered:
            error = self._differs(f"there were {self._outputs} outputs, {self.head.delivered} were delivered").body()
        now = time.perf_counter()
        first = self._first or now
        spans = (
            Span(FIRST_TOKEN, 0.0, round((first - self._arrived) * 1000, 3)),
            Span(TOKENS, round((first - self._arrived) * 1000, 3), round((now - first) * 1000, 3)),
        )
        late = () if self._late is None else self._late(self._arrived)
        end = End(error=error, usage=self._used(), spans=(*late, *spans), unseen=unseen, yielded=self.yielded)
        self.outgoing.end(end)


def _json(value: Any) -> bytes:
    try:
        return encode(value)
    except FunctionError as error:
        marked(error)
        raise


class IdRecorder:
    """Sends the ids of one ``generate`` in small groups, of a call that moves at once but for the ``told`` ones that it
    begins with; without credit they wait for the next ones."""

    def __init__(self, call: Call, generation: int, told: int = 0) -> None:
        self._call, self._generation, self._told = call, generation, told
        self.cached = None if told else 0
        """As ``Ids.cached``. Of ids that it was told it is not known when these are told again."""
        self._first = 0
        self._ids: list[int] = []

    def add(self, ids: tuple[int, ...], *, last: bool) -> None:
        """``ids`` were drawn, the ``last`` of all maybe."""
        self._ids.extend(ids)
        at_once = self._call.following and self._first + len(self._ids) >= self._told
        if last or (self._ids and at_once) or len(self._ids) >= _IDS_TOGETHER:
            self._send(ended=last)

    def rest(self) -> None:
        """No more are drawn for now, which a call that moves says. Without credit it does not: who waits for that goes
        on after a while."""
        if self._ids:
            self._send()
        if self._call.following and not self._ids:
            self._send()

    def _send(self, *, ended: bool = False) -> None:
        cached = None
        if not self._first and (self._ids or ended):
            first = self._call.fed.cached(self._generation)
            cached = self.cached if first is None else first
        if self._call.record(Ids(self._generation, self._first, tuple(self._ids), ended, cached)):
            self._first += len(self._ids)
            self._ids.clear()

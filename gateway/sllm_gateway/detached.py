"""Calls that go on without their caller: their reader is their journal, from which any gateway serves them.

One task per call takes what comes of it, writes it in batches and acknowledges it to the node when it is stored; so a
journal that is slow pauses the call like any slow reader. What had not ended when this gateway did is taken up again at
its next start, from what is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from sllm_gateway.call import Call, Earlier, Order
from sllm_gateway.calls import Calls
from sllm_gateway.journal import Journal, kept_s, known_s
from sllm_gateway.resumption import Resumption
from sllm_gateway.table import RouteTable
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.calls import (
    JOURNAL_TTL_S,
    KNOWN_S,
    Batch,
    Began,
    BodyPart,
    CallOrder,
    Ended,
    Journaled,
    Kept,
    KeyClaim,
)
from sllm_runtime.protocol.errors import (
    Cancelled,
    Draining,
    FunctionNotFound,
    InstanceLost,
    InternalError,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.frames import Frame
from sllm_runtime.protocol.limits import BATCH_BYTES, FRAME_ENVELOPE, MAX_PART
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import CALLS_STREAM, JOURNAL_STREAM

_BEGUN: Final = (CallState.RUNNING, CallState.SUCCEEDED)
"""One that ended before its journal was looked at has begun too."""
log = logging.getLogger(__name__)

BATCH_S: Final = 0.05
"""Between two batches of a call; the first one is written at once."""
LOOK_S: Final = 1.0
"""How often a call without news is looked at: its readers may have gone."""
EPOCHS: Final = 1000
"""What a call that is taken up again goes on from lies so far above what any instance has seen of it."""


class Detached:
    """The calls of this gateway that are journaled. ``window_s``: how long one goes on without a reader that is not
    ``durable``."""

    def __init__(
        self,
        calls: Calls,
        journal: Journal,
        table: RouteTable,
        gateway: str,
        window_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._calls, self._journal, self._table = calls, journal, table
        self._gateway, self._window = gateway, window_s
        self._clock, self._wall, self._pause = clock, wall, pause
        self._running: dict[str, _Run] = {}
        self._taken_up = False
        self._begun: set[str] = set()
        """Calls of this life, until those of the one before are taken up."""
        self._tasks = Tasks("detached")

    def start(self) -> None:
        """Go on with what an earlier life of this gateway has left, as soon as the journals can be read."""
        self._tasks.start(self._take_up_all(), "take up")

    async def close(self) -> None:
        """Journals end here; what goes on is taken up again. After ``Calls.drain``."""
        await self._tasks.close()

    # --- the caller's side ------------------------------------------------------------------------
    async def submit(self, order: Order, asked: CallOrder) -> None:
        """Begin a call once it is written. Raises ``QueueFull``, ``Draining``, ``Unavailable``; then it is none."""
        stream, timeout = stream_of(asked), order.version.manifest.timeout
        keep = known_s(timeout + order.version.manifest.queue_timeout)
        for number, start in enumerate(range(0, len(order.body), MAX_PART)):
            part = BodyPart(number, order.body[start : start + MAX_PART])
            await self._journal.write(stream, asked.call, f"body-{number}", part, keep)
        call = self._calls.admit(order)
        if not self._taken_up:
            self._begun.add(call.id)
        try:
            await self._journal.write(stream, asked.call, "order", asked, keep)
        except BaseException:
            self._calls.leave(call)
            raise
        self._start(call, asked, Journaled(order=asked))

    def cancel(self, call: str) -> bool:
        """End it, if it runs here: whether it does."""
        run = self._running.get(call)
        if run is not None:
            self._calls.fail(run.call, Cancelled("cancelled on request"))
        return run is not None

    def read(self, call: str) -> None:
        """Somebody reads it."""
        if (run := self._running.get(call)) is not None:
            run.read = self._clock()

    # --- taking up again --------------------------------------------------------------------------
    async def _take_up_all(self) -> None:
        while True:
            try:
                await self._take_up()
            except Unavailable as error:
                log.info("calls of an earlier life wait to be taken up: %s", error.message)
                await self._pause(LOOK_S)
                continue
            self._taken_up = True
            self._begun.clear()
            return

    async def _take_up(self) -> None:
        """Each call once, also where the journals can be read only in part at first. Raises ``Unavailable``."""
        for known in (await self._journal.all()).values():
            order = known.order
            if order is None or known.ended is not None or order.gateway != self._gateway:
                continue
            if order.call in self._begun:
                continue
            journaled, entries = await self._journal.now(stream_of(order), order.call)
            frames = Journaled().take_all(entries)
            self._begun.add(order.call)
            try:
                self._again(order, journaled, frames)
            except SllmError as error:
                log.warning("call is given up: %s", error.message, extra={"call": order.call})
                await self._end(order, CallState.FAILED, error)

    def _again(self, asked: CallOrder, journaled: Journaled, frames: list[Frame]) -> None:
        """Raises why it cannot go on."""
        version, body = self._table.get(asked.function, asked.version), journaled.body
        if version is None or body is None:
            raise FunctionNotFound(f"{asked.function} v{asked.version} was deleted while the call waited")
        if journaled.cancelled:
            raise Cancelled("cancelled on request")
        resumable = version.manifest.engine and version.manifest.resumable
        if journaled.began is not None and not resumable and not (version.manifest.retries and not frames):
            raise InstanceLost(f"its gateway {self._gateway} died while it ran, and it is not resumable; call again")
        resumption = Resumption()
        resumption.take(frames)
        earlier = Earlier(
            epoch=journaled.began.epoch + EPOCHS if journaled.began is not None else 0,
            numerics=journaled.began.numerics if journaled.began is not None else "",
            resumption=resumption if resumable else None,
            taken=bool(frames),
            exact=journaled.exact,
        )
        # Its time counts anew: no clock of another life is known.
        now = self._clock()
        order = Order(asked.call, version, asked.kind, True, body, asked.seed, now, asked.traceparent)
        call = self._calls.admit(order, earlier)
        log.info("call goes on after %d frame(s)", len(frames), extra={"call": call.id})
        self._start(call, asked, journaled)

    # --- the journal ------------------------------------------------------------------------------
    def _start(self, call: Call, asked: CallOrder, journaled: Journaled) -> None:
        run = self._running[call.id] = _Run(call, asked, journaled, self._clock())
        self._tasks.start(self._live(run), f"journal of {call.id}")

    async def _live(self, run: _Run) -> None:
        call = run.call
        try:
            while not (call.over and not call.frames):
                if not call.frames:
                    await call.changed(self._clock() + LOOK_S)
                await self._write(run)
                self._judge(run)
                if call.frames and not call.over:
                    await self._pause(BATCH_S)
            if not isinstance(call.error, Draining):  # else its next life goes on with it
                await self._end(run.asked, call.state, call.error, run)
        except Unavailable as error:
            log.error("the journal is given up: %s", error.message, extra={"call": call.id})
            self._calls.fail(call, error)
        finally:
            del self._running[call.id]
            self._calls.leave(call)

    async def _write(self, run: _Run) -> None:
        """What has come: whole values, so that nobody begins to read half a one that another instance says anew."""
        call = run.call
        if call.state in _BEGUN and run.epoch != call.epoch:
            run.epoch = call.epoch
            where = call.binding.instance if call.binding is not None else ""
            began = Began(at=self._wall(), numerics=call.numerics, epoch=call.epoch, instance=where, exact=call.exact)
            await self._journal.write(run.stream, call.id, "began", began, run.keep)
        cost = call.buffered
        run.held += call.take()
        whole = max((at for at, frame in enumerate(run.held, 1) if not frame.more), default=0)
        ready, run.held = run.held[:whole], run.held[whole:]
        for frames in batches(ready):
            batch = Batch(run.journaled.frames, frames)
            await self._journal.write(run.stream, call.id, f"batch-{run.journaled.batches}", batch, run.keep)
            run.journaled.take(batch)
        if cost:
            self._calls.consumed(call, cost, self._clock())

    def _judge(self, run: _Run) -> None:
        """A call that nobody reads does not go on for ever."""
        if not run.asked.durable and self._clock() - run.read > self._window:
            self._calls.fail(run.call, Cancelled(f"nobody has read it for {self._window:g} s"))

    async def _end(self, asked: CallOrder, state: CallState, error: SllmError | None, run: _Run | None = None) -> None:
        stream = stream_of(asked)
        end = run.call.end if run is not None else None
        if error is not None and state is CallState.SUCCEEDED:
            error = None
        if error is None and state is not CallState.SUCCEEDED:
            error = InternalError("the call ended without an end")
        ended = Ended(
            at=self._wall(),
            state=CallState.CANCELLED if isinstance(error, Cancelled) else state,
            error=error.body() if error is not None else None,
            usage=end.usage if end is not None else None,
        )
        if asked.key:
            claim = KeyClaim(call=asked.call, body=asked.key_body)
            await self._journal.hold(asked.key, claim, JOURNAL_TTL_S)
        await self._journal.write(stream, asked.call, "kept", Kept(), JOURNAL_TTL_S)
        await self._journal.write(stream, asked.call, "ended", ended, JOURNAL_TTL_S + KNOWN_S)


class _Run:
    """One call and its journal."""

    def __init__(self, call: Call, asked: CallOrder, journaled: Journaled, now: float) -> None:
        self.call, self.asked, self.journaled = call, asked, journaled
        self.stream = stream_of(asked)
        self.keep = kept_s(call.version.manifest.timeout)
        self.held: list[Frame] = []
        """Of a value of which more is to come."""
        self.epoch = 0
        self.read = now


def stream_of(order: CallOrder) -> str:
    """Where its journal is."""
    return CALLS_STREAM if order.durable else JOURNAL_STREAM


def batches(frames: list[Frame]) -> list[tuple[Frame, ...]]:
    """``frames`` in messages that are not too large."""
    found: list[tuple[Frame, ...]] = []
    batch: list[Frame] = []
    size = 0
    for frame in frames:
        nbytes = len(frame.data) + FRAME_ENVELOPE
        if batch and size + nbytes > BATCH_BYTES:
            found.append(tuple(batch))
            batch, size = [], 0
        batch.append(frame)
        size += nbytes
    return [*found, tuple(batch)] if batch else found

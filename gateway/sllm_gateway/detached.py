"""Calls that go on without their caller: their reader is their journal, from which any gateway serves them.

One task per call takes what comes of it, writes it in batches and acknowledges it to the node when it is stored; so a
journal that is slow pauses the call like any slow reader. What had not ended when its gateway did is taken up by
another one, or by its next life (``taking_up``), from what is written. Every write depends on the call's order: a
gateway that was taken for dead finds it rewritten, and says no more of that call.

A journal that JetStream does not take waits for it, as long as anybody can know of the call: nobody else would ever
write how it ended, and whoever reads it waits for that.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

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
    Entry,
    Journaled,
    Kept,
    KeyClaim,
)
from sllm_runtime.protocol.errors import (
    CallMoved,
    Cancelled,
    Draining,
    FunctionNotFound,
    InstanceLost,
    InternalError,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.frames import End, Frame
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
    """The calls of this gateway that are journaled. ``life``: this gateway's; ``window_s``: how long one
    goes on without a reader that is not ``durable``."""

    def __init__(
        self,
        calls: Calls,
        journal: Journal,
        table: RouteTable,
        life: Callable[[], str],
        window_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._calls, self._journal, self._table = calls, journal, table
        self._life, self._window = life, window_s
        self._clock, self._wall, self._pause = clock, wall, pause
        self._running: dict[str, _Run] = {}
        self._tasks = Tasks("detached")

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
        try:
            fence = await self._journal.write(stream, asked.call, "order", asked, keep)
        except Unavailable as error:
            self._calls.leave(call)
            self._tasks.start(self._take_back(asked, error, self._clock() + keep), f"end of {call.id}")
            raise
        except BaseException:
            self._calls.leave(call)
            raise
        self._start(call, asked, Journaled(order=asked), fence)

    async def _take_back(self, asked: CallOrder, error: Unavailable, until: float) -> None:
        """Its caller was told that it was not begun; its order may be stored all the same, also later. Its key is free
        by now, or another call's."""
        unkeyed = msgspec.structs.replace(asked, key="")
        try:
            await self._insist(asked.call, until, lambda: self.end(unkeyed, CallState.FAILED, error, None))
        except Unavailable as problem:
            log.error("it is not taken back: %s", problem.message, extra={"call": asked.call})

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
    def runs(self, call: str) -> bool:
        """Whether it runs here."""
        return call in self._running

    def go_on(self, asked: CallOrder, journaled: Journaled, frames: list[Frame], fence: int) -> None:
        """Go on with a call of a gateway that is no more. ``fence``: the sequence of its order, which is this gateway's
        now. Raises why it cannot go on."""
        version, body = self._table.get(asked.function, asked.version), journaled.body
        if version is None or body is None:
            raise FunctionNotFound(f"{asked.function} v{asked.version} was deleted while the call waited")
        if journaled.cancelled:
            raise Cancelled("cancelled on request")
        resumable = version.manifest.engine and version.manifest.resumable
        if journaled.began is not None and not resumable and not (version.manifest.retries and not frames):
            raise InstanceLost("its gateway died while it ran, and it is not resumable; call again")
        resumption = Resumption()
        resumption.take(frames)
        earlier = Earlier(
            epoch=(journaled.began.epoch if journaled.began is not None else 0) + EPOCHS,
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
        self._start(call, asked, journaled, fence)

    # --- the journal ------------------------------------------------------------------------------
    def _start(self, call: Call, asked: CallOrder, journaled: Journaled, fence: int) -> None:
        run = self._running[call.id] = _Run(call, asked, journaled, fence, self._clock())
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
                ending = functools.partial(self.end, run.asked, call.state, call.error, run.fence, call.end)
                await self._insist(call.id, run.until, ending)
        except (Unavailable, CallMoved) as error:
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
            await self._store(run, "began", began)
        cost = call.buffered
        run.held += call.take()
        whole = max((at for at, frame in enumerate(run.held, 1) if not frame.more), default=0)
        ready, run.held = run.held[:whole], run.held[whole:]
        for frames in batches(ready):
            batch = Batch(run.journaled.frames, frames)
            await self._store(run, f"batch-{run.journaled.batches}", batch)
            run.journaled.take(batch)
        if cost:
            self._calls.consumed(call, cost, self._clock())

    async def _store(self, run: _Run, name: str, entry: Entry) -> None:
        """What comes meanwhile waits at the node, as for any slow reader. Raises as ``_insist``."""
        write = functools.partial(self._journal.write, run.stream, run.call.id, name, entry, run.keep, run.fence)
        await self._insist(run.call.id, run.until, write)

    async def _insist(self, call: str, until: float, write: Callable[[], Awaitable[object]]) -> None:
        """``write`` until JetStream has taken it. Raises ``CallMoved``, and ``Unavailable`` when it is later than
        ``until``: each try has a patience of its own."""
        while True:
            try:
                await write()
                return
            except Unavailable as error:
                if self._clock() >= until:
                    raise
                log.warning("the journal waits: %s", error.message, extra={"call": call})

    def _judge(self, run: _Run) -> None:
        """A call that nobody reads does not go on for ever."""
        if not run.asked.durable and self._clock() - run.read > self._window:
            self._calls.fail(run.call, Cancelled(f"nobody has read it for {self._window:g} s"))

    async def end(
        self, asked: CallOrder, state: CallState, error: SllmError | None, fence: int | None, end: End | None = None
    ) -> None:
        """Write how it has ended, whoever has it by now where there is no ``fence``. Raises ``Unavailable`` or
        ``CallMoved``."""
        stream = stream_of(asked)
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
        await self._journal.write(stream, asked.call, "kept", Kept(), JOURNAL_TTL_S, fence)
        if asked.key:
            claim = KeyClaim(call=asked.call, body=asked.key_body)
            await self._journal.hold(asked.key, claim, JOURNAL_TTL_S)
        await self._journal.write(stream, asked.call, "ended", ended, JOURNAL_TTL_S + KNOWN_S, fence)


class _Run:
    """One call and its journal."""

    def __init__(self, call: Call, asked: CallOrder, journaled: Journaled, fence: int, now: float) -> None:
        self.call, self.asked, self.journaled, self.fence = call, asked, journaled, fence
        self.stream = stream_of(asked)
        self.keep = kept_s(call.version.manifest.timeout)
        self.until = now + known_s(call.version.manifest.timeout)
        """When nobody knows of the call any more, whatever becomes of it."""
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

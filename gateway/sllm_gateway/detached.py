"""Calls that go on without their caller: their reader is their journal, from which any gateway serves them.

One task per call takes what comes of it, writes it in batches and acknowledges it to the node when it is stored; so a
journal that is slow pauses the call like any slow reader. What had not ended when its gateway did is taken up by
another one, or by its next life (``taking_up``), from what is written. Every write depends on the call's order: a
gateway that was taken for dead finds it rewritten, and says no more of that call.

A journal that JetStream does not take waits for it, as long as anybody can know of the call: nobody else would ever
write how it ended, and whoever reads it waits for that. One that JetStream has let go of (``JournalExpired``) is no
call of anybody any more: it ends, and whoever still reads it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from sllm_gateway.call import Call, Earlier, Order
from sllm_gateway.calls import STOPPED, Calls
from sllm_gateway.journal import CLAIMED_S, Journal, kept_s, known_s, moved
from sllm_gateway.metrics import Metrics
from sllm_gateway.resumption import VALUES, Resumption
from sllm_gateway.table import RouteTable, Version
from sllm_runtime.platform import trace
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.calls import (
    JOURNAL_TTL_S,
    Batch,
    Began,
    BodyPart,
    CallOrder,
    Ended,
    Journaled,
    Kept,
)
from sllm_runtime.protocol.errors import (
    CallMoved,
    Cancelled,
    Conflict,
    Draining,
    FunctionNotFound,
    GatewayStopped,
    InstanceLost,
    InternalError,
    JournalExpired,
    ProtocolError,
    QueueFull,
    SllmError,
    StoreFull,
    Unavailable,
)
from sllm_runtime.protocol.frames import End, Frame
from sllm_runtime.protocol.limits import BATCH_BYTES, FRAME_ENVELOPE, MAX_PART
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import BODIES_STREAM, CALLS_STREAM, JOURNAL_STREAM

log = logging.getLogger(__name__)

BATCH_S: Final = 0.05
"""Between two batches of a call; the first one is written at once."""
LOOK_S: Final = 1.0
"""How often a call without news is looked at: its readers may have gone; and how often a full stream is."""
WAITING_S: Final = 3600.0
"""An order of a function that is not known is kept for so long more."""
EPOCHS: Final = 1000
"""What a call that is taken up again goes on from lies so far above what any instance has seen of it."""


class Detached:
    """The calls of this gateway that are journaled. ``life``: this gateway's, once others can know of it; ``window_s``:
    how long one goes on without a reader that is not ``durable``."""

    def __init__(
        self,
        calls: Calls,
        journal: Journal,
        table: RouteTable,
        metrics: Metrics,
        life: Callable[[], str],
        window_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._calls, self._journal, self._table, self._metrics = calls, journal, table, metrics
        self._life, self.window = life, window_s
        self._clock, self._wall = clock, wall
        self._running: dict[str, _Run] = {}
        self._idle = asyncio.Event()
        """Set while none runs."""
        self._idle.set()
        self._deaf = False
        """Whether readers at other gateways cannot be heard now."""
        self._tasks = Tasks("detached")

    async def finish(self, within_s: float) -> None:
        """Wait until what is here of calls that are over is written, at most so long. After ``Calls.stop``."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            log.info("the journals of %d call(s) are left as they are", len(self._running))
            for run in list(self._running.values()):  # what has all of its answer here was not stopped
                self._calls.fail(run.call, GatewayStopped(STOPPED))

    async def close(self) -> None:
        """Journals end here; what goes on is taken up again. After ``Calls.stop``."""
        await self._tasks.close()

    # --- the caller's side ------------------------------------------------------------------------
    async def submit(self, order: Order, asked: CallOrder) -> None:
        """Begin a call once it is written: no instance hears of one that nobody would know of. Its key was claimed just
        now. Raises ``QueueFull``, ``Draining``, ``Unavailable`` (``StoreFull`` at once), ``Conflict`` where its key is
        another call's; then it is none."""
        keep = _order_s(order.version)
        refusing, function = self._metrics.refusing, order.version.function
        with refusing(function):  # one that would be refused is not written first
            self._calls.require_open()
            self._calls.dispatcher.require_room(order.version)
            await self._journal.admit(asked, len(order.body))
        ordered = False
        try:
            with refusing(function):
                await self._write_body(order, asked, keep)
                ordered = True
                fence = await self._journal.begin(stream_of(asked), asked, keep)
            call = self._calls.admit(order)
        except BaseException as error:
            undo = functools.partial(self._journal.give_back, asked)
            if ordered and not isinstance(error, StoreFull):
                undo = functools.partial(self._take_back, asked, error)
            undoing = self._tasks.start(self._see_to(asked.call, self._clock() + keep, undo), f"undo {asked.call}")
            if isinstance(error, QueueFull | Draining):  # it is stored: nobody is to begin it once its caller is told
                await asyncio.wait({undoing}, timeout=ELECTION_S)
            raise
        self._start(call, asked, Journaled(order=asked), fence)

    async def _write_body(self, order: Order, asked: CallOrder, keep: float) -> None:
        """Its key is claimed anew on the way: JetStream may take longer than a claim stands. One write, and that of the
        claim itself, wait for less than two thirds of that."""
        claimed = self._clock()
        for number, start in enumerate(range(0, len(order.body), MAX_PART)):
            part = BodyPart(number, order.body[start : start + MAX_PART])
            await self._journal.write(BODIES_STREAM, asked.call, part, keep, number=number)
            if asked.key and self._clock() - claimed >= CLAIMED_S / 3:
                await self._journal.hold(asked.key, asked.claim, CLAIMED_S)
                claimed = self._clock()

    async def _take_back(self, asked: CallOrder, why: BaseException) -> None:
        """Its caller was told that it was not begun; its order may be stored all the same, also later. Its key is free
        by now, or another call's."""
        error = why if isinstance(why, SllmError) else Cancelled("its caller went away before it was begun")
        await self.end(msgspec.structs.replace(asked, key=""), CallState.FAILED, error, None)

    async def _see_to(self, call: str, until: float, write: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._insist(call, until, write)
        except Unavailable as problem:
            log.error("what is left of a call that was not begun stays: %s", problem.message, extra={"call": call})

    def cancel(self, call: str) -> bool:
        """As ``Calls.cancel``, if it runs here."""
        return call in self._running and self._calls.cancel(call)

    def read(self, call: str) -> None:
        """Somebody reads it."""
        if (run := self._running.get(call)) is not None:
            run.read = self._clock()

    def deaf(self) -> None:
        """Readers at other gateways cannot be heard: nobody knows whether there are any."""
        self._deaf = True

    def hears(self) -> None:
        """They can again, and those that there were have as long to say so as after any word of them."""
        self._deaf = False
        for call in self._running:
            self.read(call)

    # --- taking up again --------------------------------------------------------------------------
    def runs(self, call: str) -> bool:
        """Whether it runs here."""
        return call in self._running

    def has_room(self, asked: CallOrder) -> bool:
        """Whether ``go_on`` would not raise ``QueueFull``; it may all the same."""
        version = self._table.get(asked.function, asked.version)
        if version is None:
            return True
        try:
            self._calls.dispatcher.require_room(version)
        except QueueFull:
            return False
        return True

    def ends(self, call: str) -> bool:
        """Whether it ends here, as a call of an earlier life of this gateway: its node has yet to confirm that, or its
        caller to be sent on. It is taken up again after that. Or whether this gateway ends: others can run it now."""
        return self._calls.draining or (call not in self._running and self._calls.get(call) is not None)

    def go_on(self, asked: CallOrder, journaled: Journaled, frames: list[Frame], fence: int) -> None:
        """Go on with a call of a gateway that is no more. ``fence``: the sequence of its order, which is this gateway's
        now. Raises why it cannot go on."""
        version, body = self._table.get(asked.function, asked.version), journaled.body
        if version is None:
            raise FunctionNotFound(f"{asked.function} v{asked.version} was deleted while the call waited")
        if body is None:
            raise JournalExpired(f"the request's body of {asked.call} is no longer kept; call again")
        if journaled.cancelled:
            raise Cancelled("cancelled on request")
        resumable = _resumable(version)
        if journaled.began is not None and not resumable and not (version.manifest.retries and not journaled.written):
            raise InstanceLost("its gateway died while it ran, and it is not resumable; call again")
        if not journaled.whole:  # what is left stood longer; another beginning does not fit it
            raise JournalExpired(f"the beginning of the answer of {asked.call} is no longer kept; call again")
        resumption = Resumption(asked.delivered, asked.delivered_hash)
        resumption.take(frames)
        earlier = Earlier(
            # An heir that died may have begun without a word of it in the journal. Nobody else has this fence.
            epoch=(journaled.began.epoch if journaled.began is not None else 0) + fence * EPOCHS,
            numerics=journaled.began.numerics if journaled.began is not None else "",
            resumption=resumption if resumable else None,
            taken=bool(frames),
            exact=journaled.exact,
        )
        # Its time counts anew: no clock of another life is known.
        now = self._clock()
        traced = asked.traceparent, asked.created, asked.tracestate
        order = Order(asked.call, version, asked.kind, True, body, asked.seed, now, *traced)
        with trace.within(asked.traceparent):
            call = self._calls.admit(order, earlier)
            if earlier.resumption is not None:
                self._metrics.inherit(asked.function, resumption.count)
            log.info("call goes on after %d frame(s)", len(frames), extra={"call": call.id})
            self._start(call, asked, journaled, fence, frames)

    # --- the journal ------------------------------------------------------------------------------
    def _start(
        self, call: Call, asked: CallOrder, journaled: Journaled, fence: int, frames: Sequence[Frame] = ()
    ) -> None:
        """``frames``: what its journal has of the answer."""
        call.journaled = True
        run = self._running[call.id] = _Run(call, asked, journaled, fence, self._clock())
        if asked.key or _says_first(call.version):
            call.before_open = functools.partial(self._before_open, run)
        self._idle.clear()
        self._tasks.start(self._live(run, frames), f"journal of {call.id}")

    async def _live(self, run: _Run, frames: Sequence[Frame]) -> None:
        call = run.call
        try:
            try:
                try:
                    await self._hold(run)
                finally:
                    run.held.set()
                await self._write_again(run, frames)
                await self._follow(run)
                call.held.clear()  # half a value that nobody will have: to write the end may take its time
                self._calls.stored(call)
                call.settle()
                stopped = self._calls.draining and isinstance(call.error, Draining)
                if not stopped:  # else its next life goes on with it
                    await self._end(run, call.state, call.error)
            except JournalExpired as error:  # nobody has it, and it may be that somebody still reads it
                log.error("the journal is gone: %s", error.message, extra={"call": call.id})
                self._calls.fail(call, error)
                run.fence = 0
                await self._end(run, CallState.FAILED, error)
        except (Unavailable, CallMoved) as error:
            log.error("the journal is given up: %s", error.message, extra={"call": call.id})
            self._calls.fail(call, error)
        finally:
            del self._running[call.id]
            if not self._running:
                self._idle.set()
            self._calls.leave(call)
            call.held.clear()  # parts of a value that is not whole; and who was to be told of its place knows of it
            call.before_open = None

    async def _hold(self, run: _Run) -> None:
        """Its key is its own for as long as its order stands, from now. One that is another call's by now ends it."""
        asked, keep, call = run.asked, _order_s(run.call.version), run.call
        if not asked.key:
            return
        hold = functools.partial(self._journal.hold, asked.key, asked.claim_begun, keep)
        try:
            await self._insist(asked.call, run.until, hold, lambda: call.over)
        except Conflict as error:
            run.asked = msgspec.structs.replace(asked, key="")
            self._calls.fail(call, error)

    async def _before_open(self, run: _Run) -> None:
        """Its key may have lapsed while its order was written, or until this gateway took it up: no instance hears of
        it before it is known to be nobody else's. Raises as ``_began``."""
        if run.asked.key:
            await run.held.wait()  # for as long as its journal lives, and a try of its own
        if _says_first(run.call.version) and not run.call.over:
            await self._began(run)

    async def _write_again(self, run: _Run, frames: Sequence[Frame]) -> None:
        """What an earlier life has written of its answer would be gone before this one has had its time, and the
        answer could not be read to its end."""
        if frames:
            run.journaled.batches = run.journaled.frames = 0
            await self._write_batches(run, frames)

    async def _follow(self, run: _Run) -> None:
        """To its end."""
        call = run.call
        while not (call.over and not call.frames):
            if not call.frames:
                await call.changed(self._clock() + LOOK_S)
            if run.asked.life != self._life():
                await self._renew(run)
            await self._write(run)
            self._judge(run)
            if call.frames and not call.over:
                await asyncio.sleep(BATCH_S)

    async def _renew(self, run: _Run) -> None:
        """This gateway has begun another life: nobody is to take the call for one of a life that is over. Raises
        ``CallMoved`` where somebody has."""
        known, mine = run.asked, msgspec.structs.replace(run.asked, life=self._life())
        keep = _order_s(run.call.version)

        async def take() -> None:
            try:
                fence = await self._journal.take_over(run.stream, known, mine, keep)
            except ProtocolError as error:  # another gateway has it, which this one cannot read
                raise moved(run.call.id) from error
            if fence is None:
                await self._journal.require(run.stream, run.call.id)  # it is gone, and nobody has the call
                raise moved(run.call.id)
            run.asked, run.fence = mine, fence

        async with run.writing:
            await self._insist(run.call.id, run.until, take)
        await self._hold(run)
        run.place = (0, "")  # that it has begun is written again: it stands for as long as its order

    async def _end(self, run: _Run, state: CallState, error: SllmError | None) -> None:
        ending = functools.partial(self.end, run.asked, state, error, run.fence, run.call.end, run.journaled.frames)
        await self._insist(run.call.id, run.until, ending)

    async def _write(self, run: _Run) -> None:
        """What has come: whole values, so that nobody begins to read half a one that another instance says anew."""
        call = run.call
        while run.place != _place(call) and (call.state is CallState.RUNNING or call.frames):
            if not await self._began(run) and call.error is not None:
                break
        cost = call.buffered
        call.held += call.take()
        end = whole(call.held)
        ready, call.held = call.held[:end], call.held[end:]
        if not await self._write_batches(run, ready):
            call.frames.clear()
        self._calls.stored(call)
        if cost:
            self._calls.consumed(call, cost, self._clock())

    async def _began(self, run: _Run) -> bool:
        """An instance has it, or had: before anything that it has said, which only one of its numerics class goes on
        with. One that can neither go on elsewhere nor begin again is said to be begun before any instance hears of it:
        whoever takes it up must not run it a second time. False: it is spared, since that instance is not to hear of
        it any more. Raises as ``_insist``."""
        call = run.call
        place, where = _place(call), call.binding
        had = call.attempts > 0 or run.journaled.began is not None
        run.started = run.started if had and run.started is not None else self._wall()
        began = Began(
            at=run.started,
            numerics=call.numerics or (where.entry.fingerprint if where is not None else ""),
            epoch=place[0],
            instance=place[1],
            exact=call.exact and (where is None or where.entry.exact),
        )
        keep = _order_s(call.version)
        async with run.writing:
            write = functools.partial(self._journal.write, run.stream, call.id, began, keep, run.fence)

            def spare() -> bool:  # of an answer that is all here it is written all the same: who reads it has to know
                return call.error is not None or call.binding is not where

            if not await self._insist(call.id, run.until, write, spare):
                return False
            run.place = place
        return True

    async def _write_batches(self, run: _Run, frames: Sequence[Frame]) -> bool:
        """Whether all of them are written: there was room, or the call has not failed meanwhile."""
        for some in batches(frames):
            batch = Batch(run.journaled.frames, some)
            if not await self._store(run, batch):
                return False
            run.journaled.take(batch)
        return True

    async def _store(self, run: _Run, batch: Batch) -> bool:
        """What comes meanwhile waits at the node, as for any slow reader. False: it could not be stored, and the call
        has failed meanwhile, so that its answer is none anyway. Raises as ``_insist``."""
        number = run.journaled.batches

        async def write() -> None:
            if run.asked.life != self._life():  # it may have waited for room, or for JetStream, for longer than a life
                await self._renew(run)
            await self._journal.write(run.stream, run.call.id, batch, run.keep, run.fence, number=number)

        return await self._insist(run.call.id, run.until, write, lambda: run.call.error is not None)

    async def _insist(
        self,
        call: str,
        until: float,
        write: Callable[[], Awaitable[object]],
        spare: Callable[[], bool] = lambda: False,
    ) -> bool:
        """``write`` until JetStream has taken it; False: it did not, and can be spared. Raises ``CallMoved``,
        ``JournalExpired``, and ``Unavailable`` when it is later than ``until``: each try has a patience of its own, and
        one that finds no room waits for LOOK_S."""
        while True:
            try:
                await write()
                return True
            except Unavailable as error:
                full = isinstance(error, StoreFull)
                if spare():
                    return False
                if self._clock() >= until:
                    raise
                log.warning("the journal waits: %s", error.message, extra={"call": call})
                if full:
                    await asyncio.sleep(LOOK_S)

    def _judge(self, run: _Run) -> None:
        """A call that nobody reads does not go on for ever."""
        if not (run.call.over or run.asked.durable or self._deaf) and self._clock() - run.read > self.window:
            self._calls.fail(run.call, Cancelled(f"nobody has read it for {self.window:g} s"))

    async def end(
        self,
        asked: CallOrder,
        state: CallState,
        error: SllmError | None,
        fence: int | None,
        end: End | None = None,
        frames: int = -1,
    ) -> None:
        """Write how it has ended, whoever has it by now where there is no ``fence``; then give back its body.
        ``frames`` as in ``Ended``. Raises ``Unavailable``, ``CallMoved`` or ``JournalExpired``."""
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
            frames=frames,
            yielded=end.yielded if end is not None else None,
        )
        await self._journal.write(stream, asked.call, Kept(), JOURNAL_TTL_S, fence)
        if asked.key:
            with contextlib.suppress(Conflict):
                await self._journal.hold(asked.key, asked.claim_begun, JOURNAL_TTL_S)
        # No shorter than what was asked: that would seem to run again, and be taken up once more.
        run = self._running.get(asked.call)
        version = run.call.version if run is not None else self._table.get(asked.function, asked.version)
        keep = _order_s(version) if version is not None else known_s(WAITING_S)
        await self._journal.write(stream, asked.call, ended, keep, fence)
        await self._journal.give_back(asked)


class _Run:
    """One call and its journal."""

    def __init__(self, call: Call, asked: CallOrder, journaled: Journaled, fence: int, now: float) -> None:
        self.call, self.asked, self.journaled, self.fence = call, asked, journaled, fence
        self.stream = stream_of(asked)
        self.keep = kept_s(call.version.manifest.timeout)
        self.until = now + known_s(call.version.manifest.timeout)
        """When nobody knows of the call any more, whatever becomes of it."""
        self.place = (0, "")
        """As ``_place`` was when that was last written."""
        self.started = journaled.began.at if journaled.began is not None else None
        """When an instance first had it, or was asked to."""
        self.read = now
        self.held = asyncio.Event()
        """Set when its key is known to be its own, or the call is over."""
        self.writing = asyncio.Lock()
        """Held while its order is rewritten, or an entry written by another task than its journal's, which knows of the
        order before."""


def _place(call: Call) -> tuple[int, str]:
    """Its epoch, and the instance that has it, or had it last: one that moves is elsewhere in the same epoch."""
    return call.epoch, call.binding.instance if call.binding is not None else call.marks.instance


def _order_s(version: Version) -> float:
    """How long what was asked stands, and with it that it has begun, and its key: nobody runs it who does not know."""
    return known_s(version.manifest.timeout + version.manifest.queue_timeout)


def _resumable(version: Version) -> bool:
    return version.manifest.engine and version.manifest.resumable


def _says_first(version: Version) -> bool:
    """Whether a call of it can neither go on elsewhere nor begin again."""
    return not (_resumable(version) or version.manifest.retries)


def stream_of(order: CallOrder) -> str:
    """Where its journal is."""
    return CALLS_STREAM if order.durable else JOURNAL_STREAM


def whole(frames: Sequence[Frame]) -> int:
    """How many of ``frames`` end with no value half there: ids may come between its parts."""
    end, half = 0, False
    for at, frame in enumerate(frames, 1):
        half = frame.more if frame.kind in VALUES else half
        end = end if half else at
    return end


def batches(frames: Sequence[Frame]) -> list[tuple[Frame, ...]]:
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

"""Brings waiting calls and instances together: a queue per version, and a long poll to the controller meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from sllm_gateway.call import Call
from sllm_gateway.leader import Leader
from sllm_gateway.move import leaving
from sllm_gateway.news import Tell
from sllm_gateway.queue import NONE, SlotQueue
from sllm_gateway.table import Version
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.errors import DeadlineExceeded, FunctionNotFound, QueueFull, SllmError, Unavailable
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.limits import LONG_POLL_S, RPC_TIMEOUT_S
from sllm_runtime.protocol.node import AWAITS_NODE, CAPACITY, Progress
from sllm_runtime.protocol.records import Route, RouteEntry

log = logging.getLogger(__name__)

Key = tuple[str, int]
NOBODY_S = 0.1
"""When no call has waited for so long the controller hears of it: it would start for nobody until its poll ends."""
PAUSE_FIRST_S, PAUSE_MOST_S = 0.05, 1.0
"""Between two acquires that brought nothing; the controller answers at once only when there is something."""


class _Line:
    """The queue of one version with what is known about getting more instances for it."""

    def __init__(self, version: Version, now: float) -> None:
        self.version = version
        self.slots: SlotQueue[Call] = SlotQueue(_bound)
        self.leaving: Mapping[str, RouteEntry] = {}
        """Where the calls of an instance are to go."""
        self.on_route(version.route, now)
        self.pending = ""
        """Why nothing can be started, in the controller's words; callers are told of changes (``Dispatcher._say``)."""
        self.awaits: Progress | None = None
        """The node that is to come for it, while one is."""
        self.away = ""
        """Why the controller does not answer; it may start instances all the same once it does."""
        self.asked = 0
        """Waiting calls that the controller was last told of."""
        self.polling = False
        self.lull: asyncio.TimerHandle | None = None
        self.timer: asyncio.TimerHandle | None = None

    def on_route(self, route: Route, now: float) -> None:
        """It has these instances now."""
        self.slots.on_route(route.entries, now)
        self.leaving = leaving(route.entries)

    @property
    def why(self) -> str:
        """Why its calls wait, as far as that is known."""
        most = self.version.manifest.max_instances
        if self.away or self.pending or self.slots.living < most:
            return self.away or self.pending
        return f"all {most} instance(s) that it may have (`max_instances`) are taken"

    @property
    def waits(self) -> Progress | None:
        """The same for who is told as it goes."""
        node = self.awaits if not self.away else None
        return node or (Progress(stage=CAPACITY, message=self.why) if self.why else None)

    @property
    def coming(self) -> int:
        """Slots that starts may still bring: of instances up to ``max_instances`` that are not there yet. None while
        the controller says that nothing can be started, and that no node is to come for it."""
        manifest = self.version.manifest
        stuck = self.pending and self.awaits is None
        return 0 if stuck else max(0, manifest.max_instances - self.slots.living) * manifest.concurrency

    @property
    def queued(self) -> int:
        """Waiting calls beyond the capacity that is coming: a call that an instance is started for does not queue."""
        return max(0, len(self.slots.waiting) - self.coming)


class Dispatcher:
    """Owns the queues. ``place`` hands a call to an instance (since when it is there, now), ``fail`` ends one;
    ``to_go`` says of each running call of a version that could begin to move where it runs."""

    def __init__(
        self,
        leader: Leader,
        gateway: str,
        clock: Callable[[], float],
        *,
        place: Callable[[Call, RouteEntry, float, float], None],
        fail: Callable[[Call, SllmError], None],
        to_go: Callable[[Key], Iterable[str]],
        tell: Tell,
    ) -> None:
        self._leader = leader
        self._gateway = gateway
        self._clock = clock
        self._place = place
        self._fail = fail
        self._to_go = to_go
        self._tell = tell
        self._lines: dict[Key, _Line] = {}
        self._tasks = Tasks("dispatch")

    async def close(self) -> None:
        """Stop asking. Waiting calls are their owner's to end."""
        for line in self._lines.values():
            for timer in (line.timer, line.lull):
                if timer is not None:
                    timer.cancel()
        await self._tasks.close()

    # --- calls ------------------------------------------------------------------------------------
    def submit(self, call: Call) -> None:
        """Give the call a slot, or let it wait. Raises ``QueueFull`` when ``max_queue`` calls wait already beyond what
        starts will take."""
        line = self._line(call.version)
        slots = line.slots
        slots.push(call)
        self._pump(line, self._clock())
        limit = call.version.manifest.max_queue
        waits = call in slots.waiting
        if waits and line.queued and self._queued(call.version.function) > limit:
            slots.remove(call)
            raise _full(call.version)
        if waits:
            self._tell_queued(line, (call,))
        self._poll(line)

    def require_room(self, version: Version) -> None:
        """Raises ``QueueFull`` where ``submit`` would for a call that is to be written before; it may all the same."""
        line, now = self._line(version), self._clock()
        self._pump(line, now)
        waits = not line.slots.free(now) and len(line.slots.waiting) >= line.coming
        if waits and self._queued(version.function) >= version.manifest.max_queue:
            raise _full(version)

    def submit_again(self, call: Call) -> None:
        """A call that had its turn: it goes to the head, whatever the length of the queue."""
        if call.version.removed:  # another function may have its name by now
            self._fail(call, _deleted(call.version))
            return
        line = self._line(call.version)
        line.slots.push_front(call)
        self._go(line)
        self._set_timer(line, self._clock())  # the hold of who sent it back may end before the one that is waited for

    def withdraw(self, call: Call) -> None:
        """It waits no longer."""
        line = self._lines.get(call.version.key)
        if line is not None:
            line.slots.remove(call)
            self._poll(line)
            self._drop_if_idle(line)

    def may_ask(self, call: Call, instance: str, now: float) -> bool:
        """Whether the call, which is to move to ``instance``, may ask for a slot there: one is free as far as is known,
        and none was refused just now."""
        return self._line(call.version).slots.may_ask(instance, now)

    def take(self, call: Call, instance: str) -> None:
        """The call moves to ``instance``: a slot there is its own, beside the one it has."""
        self._line(call.version).slots.take(instance)

    def accepted(self, call: Call, instance: str) -> None:
        self._line(call.version).slots.accepted(instance)

    def refused(self, call: Call, instance: str, *, gone: bool) -> None:
        """``instance`` has no slot for it after all, or (``gone``) is no more: the controller hears of that with the
        next acquire. The call is its owner's to put back."""
        line, now = self._line(call.version), self._clock()
        if gone:
            line.slots.gone(instance, now)
        else:
            line.slots.busy(instance, now)
        self._set_timer(line, now)
        self._drop_if_idle(line)

    def release(self, call: Call, instance: str) -> None:
        """A call is over on ``instance``."""
        line = self._line(call.version)
        line.slots.release(instance)
        self._go(line)
        self._drop_if_idle(line)

    def waiting(self, function: str) -> int:
        """Calls of all versions of ``function`` that wait."""
        return sum(len(line.slots.waiting) for (name, _), line in self._lines.items() if name == function)

    def _queued(self, function: str) -> int:
        """Those of them that no coming instance will take."""
        return sum(line.queued for (name, _), line in self._lines.items() if name == function)

    def pending(self, key: Key) -> str:
        """Why calls of this version wait; empty where that is not known."""
        line = self._lines.get(key)
        return line.why if line else ""

    def waits(self, key: Key) -> Progress | None:
        """What calls of this version wait for, or how far the node is that is to come for them; None where that is not
        known."""
        line = self._lines.get(key)
        return line.waits if line else None

    def depths(self) -> dict[str, int]:
        """Waiting calls by function."""
        depths: dict[str, int] = {}
        for (function, _), line in self._lines.items():
            depths[function] = depths.get(function, 0) + len(line.slots.waiting)
        return depths

    # --- instances --------------------------------------------------------------------------------
    def on_version(self, version: Version) -> None:
        """Its route has changed, or it was removed."""
        line = self._lines.get(version.key)
        if line is None:
            return
        if version.removed:
            self._fail_all(line, _deleted(version))
            return
        line.version = version  # another one where its function was deleted, and deployed anew, while calls ran
        self._take_route(line, version.route)

    def on_room(self, key: Key, instance: str, running: int) -> None:
        """The node reports that ``instance`` works on ``running`` calls."""
        line = self._lines.get(key)
        entry = line.slots.entries.get(instance) if line else None
        if line is not None and entry is not None and running < entry.concurrency and line.slots.has_room(instance):
            self._go(line)

    # --- inside -----------------------------------------------------------------------------------
    def _line(self, version: Version) -> _Line:
        line = self._lines.get(version.key)
        if line is None:
            line = self._lines[version.key] = _Line(version, self._clock())
        return line

    def _drop_if_idle(self, line: _Line) -> None:
        idle = line.version.removed and not line.slots.waiting and not line.slots.running
        if idle and self._lines.get(line.version.key) is line:  # else another function has its name by now
            del self._lines[line.version.key]

    def _go(self, line: _Line) -> None:
        self._pump(line, self._clock())
        self._poll(line)

    def _pump(self, line: _Line, now: float) -> None:
        for call, entry in line.slots.match(now, self._reserved(line, now)):
            self._place(call, entry, line.slots.came[entry.instance], now)
        if line.timer is None:
            self._set_timer(line, now)

    def _reserved(self, line: _Line, now: float) -> Mapping[str, int]:
        """The slots that calls are yet to move to: who waits would have them first, each time that one is free, and the
        instance that is to go would not."""
        where = line.leaving if line.slots.waiting else {}
        if not any(line.slots.may_ask(entry.instance, now) for entry in where.values()):
            return NONE
        return Counter(where[source].instance for source in self._to_go(line.version.key) if source in where)

    def _set_timer(self, line: _Line, now: float) -> None:
        again = line.slots.next_try(now)
        if again is not None and (line.timer is None or line.timer.when() > self._loop_time(again)):
            if line.timer is not None:
                line.timer.cancel()
            line.timer = asyncio.get_running_loop().call_at(self._loop_time(again), self._timed, line)

    def _loop_time(self, at: float) -> float:
        return asyncio.get_running_loop().time() + max(0.0, at - self._clock()) + 0.001

    def _timed(self, line: _Line) -> None:
        line.timer = None
        self._go(line)

    def _poll(self, line: _Line) -> None:
        """Ask for instances while calls wait; again at once when twice as many wait as were told."""
        waiting = len(line.slots.waiting)
        if not waiting:
            if line.polling and line.asked and line.lull is None:
                line.lull = asyncio.get_running_loop().call_later(NOBODY_S, self._lulled, line)
            return
        if line.lull is not None:
            line.lull.cancel()
            line.lull = None
        if not line.polling:
            line.polling, line.asked = True, waiting
            self._tasks.start(self._poll_while_waiting(line), f"acquire {line.version.function}")
        elif waiting >= 2 * line.asked:
            self._tasks.start(self._ask_more(line), f"acquire more {line.version.function}")
            line.asked = waiting

    async def _poll_while_waiting(self, line: _Line) -> None:
        pause = PAUSE_FIRST_S
        try:
            while line.slots.waiting:
                began = self._clock()
                told = bool(line.pending)
                news = await self._ask(line)
                if line.pending and not told:  # asked on at once: nobody is to think meanwhile that none is wanted
                    continue
                pause = PAUSE_FIRST_S if news else min(PAUSE_MOST_S, pause * 2)
                if line.slots.waiting and self._clock() - began < pause:
                    await asyncio.sleep(pause)
        finally:
            line.polling = False
            # Nobody asks any more, so nobody would hear that it has changed.
            line.pending, line.awaits, line.away = "", None, ""

    def _lulled(self, line: _Line) -> None:
        line.lull = None
        if line.polling and not line.slots.waiting and not line.version.removed:
            line.asked = 0  # only now: a queue that is empty for moments would be told of at each of its calls
            self._tasks.start(self._nobody(line), f"acquire none {line.version.function}")

    async def _nobody(self, line: _Line) -> None:
        """What is asked for no call counts no more; the poll that asked goes on to its end."""
        function, version = line.version.function, line.version.number
        none = Acquire(function=function, version=version, gateway=self._gateway, waiting=0,
                       known=tuple(line.slots.entries), wait_s=0.0)  # fmt: skip
        with contextlib.suppress(SllmError):  # its poll ends soon
            await self._leader.ask("acquire", none, Acquired, timeout_s=RPC_TIMEOUT_S)

    async def _ask_more(self, line: _Line) -> None:
        await self._ask(line)

    async def _ask(self, line: _Line) -> bool:
        """One long poll. Whether it brought an instance that was not known."""
        known = set(line.slots.entries)
        line.asked = max(1, len(line.slots.waiting))  # who made it ask may have a slot by now; ``_lulled`` says so
        gone = line.slots.gone_instances
        request = Acquire(
            function=line.version.function,
            version=line.version.number,
            gateway=self._gateway,
            waiting=line.asked,
            known=tuple(sorted(known - set(gone))),
            gone=gone,
            awaits=line.awaits is not None and not line.away,
            pending=bool(line.pending) and not line.away,
            call=next((call.id for call in line.slots.waiting), ""),
        )
        try:
            acquired = await self._leader.ask("acquire", request, Acquired, timeout_s=LONG_POLL_S + RPC_TIMEOUT_S)
        except (Unavailable, DeadlineExceeded) as error:
            self._say(line, line.pending, line.awaits, f"waits for the controller ({error.message})")
            log.warning("acquire %s v%d: %s", line.version.function, line.version.number, error.message)
            return False
        except SllmError as error:
            self._fail_all(line, error)
            return False
        return self._take(line, acquired, known)

    def _take(self, line: _Line, acquired: Acquired, known: set[str]) -> bool:
        progress = acquired.progress
        awaits = progress if progress is not None and progress.stage == AWAITS_NODE else None
        if acquired.route is not None:
            self._take_route(line, acquired.route)
        self._say(line, acquired.pending, awaits)  # also where some are there, and taken
        if acquired.error is not None and not line.slots.living:
            self._fail_all(line, acquired.error.to_error())
        return bool(set(line.slots.entries) - known)

    def _say(self, line: _Line, pending: str, awaits: Progress | None, away: str = "") -> None:
        """Let those who wait know why, if that is news."""
        if (pending, awaits, away) != (line.pending, line.awaits, line.away):
            line.pending, line.awaits, line.away = pending, awaits, away
            self._explain(line)

    def _explain(self, line: _Line) -> None:
        """Let those who wait see why that has changed."""
        waiting = tuple(line.slots.waiting)
        for call in waiting:
            call.wake()
        self._tell_queued(line, waiting)

    def _tell_queued(self, line: _Line, calls: Sequence[Call]) -> None:
        """Once for each call: the reason comes and goes while it waits."""
        new = [call for call in calls if not call.queued] if line.why else []
        for call in new:
            call.queued = True
        if new:
            self._tell(Kind.CALL_QUEUED, new[0], line.why, new[1:])

    def _take_route(self, line: _Line, route: Route) -> None:
        now, known = self._clock(), line.why
        line.on_route(route, now)
        if route.entries:
            line.pending = line.away = ""
        self._pump(line, now)
        if line.why != known:
            self._explain(line)
        if not line.polling:
            self._poll(line)

    def _fail_all(self, line: _Line, error: SllmError) -> None:
        """Every waiting call ends with ``error``: each with an exception of its own."""
        body = error.body()
        waiting = tuple(line.slots.waiting)
        for call in waiting:
            line.slots.remove(call)
        for call in waiting:
            self._fail(call, body.to_error())
        self._drop_if_idle(line)


def _bound(call: Call) -> str:
    return call.numerics if call.bound_to_numerics else ""


def _deleted(version: Version) -> FunctionNotFound:
    return FunctionNotFound(f"{version.function} v{version.number} was deleted while the call waited")


def _full(version: Version) -> QueueFull:
    return QueueFull(
        f"all instances of {version.function!r} are taken and {version.manifest.max_queue} calls wait already"
        " (max_queue); try again later",
        retry_after_s=1.0,
    )

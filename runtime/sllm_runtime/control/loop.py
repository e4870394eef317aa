"""The one place where the view changes. Whoever has news hands in a function view → view; what follows from it
(records, events, commands, woken waiters) happens here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from sllm_runtime.control import changes, events, instances
from sllm_runtime.control.decisions import Decisions
from sllm_runtime.control.history import History
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.placement import Policy
from sllm_runtime.control.plan import REPEAT_S, Action, Context, SendStart, SendStop, plan
from sllm_runtime.control.reports import departed, observe, pressing, still
from sllm_runtime.control.view import Instance, Key, Refusal, View
from sllm_runtime.platform import trace
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import limits, subjects
from sllm_runtime.protocol.errors import DeadlineExceeded, SllmError, StaleTerm, Unavailable
from sllm_runtime.protocol.events import Event
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.records import Route, VersionRecord

log = logging.getLogger(__name__)

R = TypeVar("R")

STORE_S: Final = limits.CONTROLLER_WAIT_S
"""How long a decision waits to be stored."""
TICK_S: Final = 0.25
"""Longest time between two plans: silence, back-off and keep-alive end without any message."""
LONG_S: Final = 0.02
"""After a plan that took longer, or that another one follows at once, it rests for as long as that took: half of the
time is for those that ask."""
STUCK_S: Final = 10.0
"""Between two reports of a bug that keeps plans from being made."""
REFUSED_S: Final = 1.0
UNSURE_S: Final = 1.75
"""Not sure for so long it may have heard nothing either: NATS stood still for SURE_S before that, and a silence that is
to count takes LOST_AFTER_S. For less the store alone was slow, by which no report comes."""
MOST_UNTOLD: Final = 10_000
"""Events that wait until it is sure that it leads."""


class Loop:
    """Owner of the view. ``run`` until cancelled; it raises ``StaleTerm`` when another controller leads."""

    def __init__(
        self,
        view: View,
        routes: Mapping[Key, Route],
        *,
        bus: Bus,
        ledger: Ledger,
        nodes: Nodes,
        policy: Policy,
        rng: random.Random,
        may_act: Callable[[], bool],
    ) -> None:
        """``view`` and ``routes`` are what is stored now. ``may_act``: whether it is sure that it leads."""
        self.view = view
        self._bus, self._ledger, self._nodes = bus, ledger, nodes
        self._policy, self._rng, self._may_act = policy, rng, may_act
        self._routes: dict[Key, Route] = dict(routes)
        self._alive: frozenset[str] = frozenset()
        self._unheard = frozenset(view.nodes)
        """Nodes of a controller before: whether they live has not been told."""
        self.traces: dict[Key, str] = {}
        """Of calls that wait for an instance, one of each version."""
        self.history = History()
        self._decisions = Decisions(bus, self.history, policy, time.time)
        self._untold: deque[Event] = deque(maxlen=MOST_UNTOLD)
        self._wake = asyncio.Event()
        self._told_stuck = -math.inf
        self._committing = asyncio.Lock()
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = Tasks("controller loop", self._end)
        self._commands = Tasks("controller commands")

    @property
    def may_act(self) -> bool:
        """Whether it is sure that it leads."""
        return self._may_act()

    @property
    def policy(self) -> Policy:
        """What it places by."""
        return self._policy

    # --- changing the view --------------------------------------------------------------------------
    def change(self, step: Callable[[View], View], *, urgent: bool = True) -> View:
        """Apply ``step`` and everything that follows from it but new commands, which the next plan sends: at once, or
        where that is not ``urgent`` within TICK_S."""
        old, new = self.view, step(self.view)
        if new is not old:
            self._commit(old, new)
            if urgent:
                self._wake.set()
        return new

    async def commit(self, step: Callable[[View], View]) -> View:
        """Change the view by what somebody has decided, once its records are stored: before that nothing of it is done,
        and where they are not taken nothing is, and what stood is stored again. Raises what ``step`` does,
        ``NotStorable``, ``Unavailable``."""
        async with self._turn():
            stored: list[changes.Write] = []
            tried: list[tuple[View, list[changes.Write]]] = []
            after = step(self.view)
            try:
                # Others change the view meanwhile: what was stored must be what is decided now.
                while (decided := changes.decided(self.view, after)) != stored:
                    tried.append((after, decided))
                    await self._ledger.stored(decided, STORE_S)
                    stored, after = decided, step(self.view)
                view = self.change(step)
            finally:
                self._put_right(tried)
        try:
            await self._ledger.settled(STORE_S)
        except Unavailable as error:
            log.warning("it is decided and stored, its routes are not: %s", error.message)
        return view

    def _put_right(self, tried: Sequence[tuple[View, Sequence[changes.Write]]]) -> None:
        """What was stored of views that were ``tried`` and are none, as the view has it."""
        for after, decided in tried:
            keys = {write.key for write in decided}
            self._ledger.take([write for write in changes.decided(after, self.view) if write.key in keys])

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One decision is stored after the other. Raises ``Unavailable``."""
        try:
            async with asyncio.timeout(STORE_S):
                await self._committing.acquire()
        except TimeoutError as error:
            raise Unavailable("the state cannot be stored now: other decisions wait for it; try again") from error
        try:
            yield
        finally:
            self._committing.release()

    def begin(self, repair: Callable[[View], View]) -> None:
        """First change: every route is made anew and compared with what is stored."""
        old, new = self.view, repair(self.view)
        self._commit(old, new, frozenset(new.functions) | {name for name, _ in self._routes})

    def _commit(self, old: View, new: View, more: frozenset[str] = frozenset()) -> None:
        self.view = new
        self._decisions.note(self.history.follow(old, new, time.monotonic()))
        functions = changes.touched(old, new) | more
        before = {key: route for key, route in self._routes.items() if key[0] in functions}
        after = changes.routes(new, functions)
        for key in before.keys() - after.keys():
            del self._routes[key]
        self._routes.update(after)
        self._ledger.take(changes.writes(old, new, before, after))
        self._notify(functions)
        for event in events.events(old, new, time.time()):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        fields = {"function": event.function, "instance": event.instance, "node": event.node, "call": event.call}
        log.info("%s %s", event.kind, event.message, extra={k: v for k, v in fields.items() if v})
        self._untold.append(event)
        self._tell_untold()

    def _tell_untold(self) -> None:
        """Once it is sure that it leads: what one that was deposed hears of is told by the next one."""
        while self._untold and self._may_act():
            event = self._untold.popleft()
            try:
                subject = subjects.event("controller", self._bus.identity, event.kind, event.function, event.call)
                self._bus.publish_now(subject, event)
            except SllmError as error:
                log.warning("event %s was dropped: %s", event.kind, error.message)

    def look_again(self, function: str) -> None:
        """Whoever waits for something about ``function`` looks, though nothing of it has changed."""
        self._notify(frozenset({function}))

    def _notify(self, functions: frozenset[str]) -> None:
        for function in functions:
            for waiter in self._waiters.get(function, ()):
                waiter.set()

    def heard(self, status: NodeStatus, subject: str = "") -> None:
        """A node's report. Rights bind a node to its own subject, so the subject says who speaks: no node reports for
        another one."""
        if subject.rpartition(".")[2] != status.node:
            log.error("a report for node %s came on %s: refused", status.node, subject)
            return
        now = time.monotonic()
        same = still(self.view, status, now)
        if same is not None:
            self.view = same
            return
        known = self.view.nodes.get(status.node)
        urgent = known is None or known.status is None or pressing(self.view, known.status, status)
        self.change(lambda view: observe(view, status, now, time.time()), urgent=urgent)

    def overdue(self) -> tuple[str, ...]:
        """Nodes that NATS is to be asked for. None by a leader that is not sure that it leads: it may be the one that
        is cut off."""
        return self.view.overdue(time.monotonic()) if self._may_act() else ()

    def left(self, node: str) -> None:
        """A node has left NATS: it is dead before its silence says so."""
        self.change(lambda view: departed(view, node))

    def listening_again(self) -> None:
        """Reports may have been missed until now: no node's silence counts from before."""
        self.change(lambda view: replace(view, listening_since=time.monotonic()))

    # --- waiting for it -----------------------------------------------------------------------------
    async def until(self, function: str, found: Callable[[View], R | None], timeout_s: float) -> R | None:
        """What ``found`` makes of the view as soon as it is not None, looked at after each change about ``function``;
        None after ``timeout_s``. What ``found`` raises is raised."""
        event = asyncio.Event()
        waiters = self._waiters.setdefault(function, set())
        waiters.add(event)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            while (result := found(self.view)) is None:
                try:
                    async with asyncio.timeout_at(deadline):
                        await event.wait()
                except TimeoutError:
                    return None
                event.clear()
            return result
        finally:
            waiters.discard(event)
            if not waiters and self._waiters.get(function) is waiters:
                del self._waiters[function]

    # --- the loop -----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Plan at every change and every tick. Raises ``StaleTerm``."""
        try:
            self._running.start(self._ledger.run(), "ledger")
            self._running.start(self._steps(), "steps")
            self._running.start(self._decisions.run(), "decisions")
            await self._ended
        finally:
            # Not a TaskGroup: on Python 3.11 a write that ends as it is cancelled swallows the cancellation.
            await self._running.close()
            if self._may_act():
                self._decisions.tell_all()
            await self._commands.close()

    def _end(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _steps(self) -> None:
        due, unsure = time.monotonic(), math.inf
        while True:
            now, used = time.monotonic(), time.thread_time()
            sure = self._may_act()
            if now - due > limits.STALL_S or (sure and now - unsure > UNSURE_S):  # NATS stood still, and so did reports
                self.listening_again()
            unsure = math.inf if sure else min(unsure, now)
            self._wake.clear()
            self._tell_untold()
            more = sure and self._step()
            self._notify(frozenset({changes.NODES}))
            took = time.thread_time() - used  # its own work, however long, is no standstill
            rest = took if more or took > LONG_S else 0.0
            due = now + took + rest
            if more or rest:
                await asyncio.sleep(rest)
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _step(self) -> bool:
        """One plan. Whether the next one is to follow at once."""
        context = Context(now=time.monotonic(), wall=time.time(), policy=self._policy, rng=self._rng)
        try:
            made = plan(self.view, context)
        except Exception:  # a bug that this view meets, and would of the next leader: what runs is served meanwhile
            self._stuck(context.now)
            return False
        view = made.view
        alive = frozenset(name for name in view.nodes if view.alive(name, context.now))
        lost = frozenset(name for name in self._unheard if view.silent(name, context.now))
        for event in events.node_events((self._alive | lost) & view.nodes.keys(), alive, context.wall):
            self._tell(event)  # before what follows from it
        self._alive, self._unheard = alive, self._unheard - alive - lost
        if view is not self.view:
            self._commit(self.view, view)
        if made.more:
            self._wake.set()
        for action in made.actions:
            with trace.within(self._trace_of(action)):
                self._commands.start(self._send(action), f"{type(action).__name__} {action.instance}")
        return made.more

    def _stuck(self, now: float) -> None:
        """No plan can be made: nothing is placed, moved or ended until something changes."""
        if now - self._told_stuck >= STUCK_S:
            self._told_stuck = now
            log.exception("a bug keeps plans from being made: nothing starts, moves or ends until the cluster changes")

    def _trace_of(self, action: Action) -> str:
        """Of the call that an instance is started for; empty: none, or one without a trace."""
        instance = self.view.instances.get(action.instance) if isinstance(action, SendStart) else None
        return self.traces.get(instance.key, "") if instance is not None else ""

    # --- commands -----------------------------------------------------------------------------------
    async def _send(self, action: Action) -> None:
        try:
            if isinstance(action, SendStop):
                await self._recorded(action.instance)
                await self._nodes.stop(
                    action.node, action.instance, action.reason, action.grace_s, resume=action.resume
                )
            else:
                await self._start(action)
        except StaleTerm as error:
            await self._check_term(error)
        except DeadlineExceeded as error:
            log.debug("%s: %s", action.instance, error.message)
        except SllmError as error:
            self.change(partial(refused, action=action, error=error, now=time.monotonic()))
        else:
            self.change(partial(accepted, action=action))

    async def _recorded(self, name: str) -> None:
        """Of an instance whose calls go on elsewhere it is stored where, before it is told to end: the controller after
        this one would not know. The plan repeats what was not sent. Raises ``Unavailable``."""
        instance = self.view.instances.get(name)
        if instance is not None and instance.record.moves_to:
            await self._ledger.settled(REPEAT_S, subjects.instance_key(name))

    async def _start(self, action: SendStart) -> None:
        found = self._wanted(action.instance)
        if found is None:
            return
        secrets = await self._nodes.secrets(found[1])
        found = self._wanted(action.instance)  # meanwhile it may have ended, or a sending before this one given it up
        if found is None:
            return
        instance, version = found
        key = instance.key
        model, adapters = self.view.model_of(key), self.view.adapters_of(key)
        await self._nodes.start(instance, version, model, adapters, secrets, self.view.learned.proofs.get(key, ()))

    def _wanted(self, name: str) -> tuple[Instance, VersionRecord] | None:
        """An instance that is to start, and its version."""
        instance = self.view.instances.get(name)
        version = self.view.versions.get(instance.key) if instance is not None else None
        if instance is None or version is None or instance.ended or instance.stop is not None:
            return None
        return instance, version

    async def _check_term(self, error: StaleTerm) -> None:
        """A node refuses our term. Only if another controller has really been elected do we step down."""
        log.error("%s", error.message)
        if await self._nodes.deposed():
            self._end(error)


def accepted(view: View, action: Action) -> View:
    """The node took the command. Ending what it never began ends it; of one of a controller before that is for the
    node's report to say."""
    instance = view.instances.get(action.instance)
    if instance is None or instance.ended:
        return view
    if isinstance(action, SendStop) and instance.seen is None and not instance.adopted:
        return instances.withdraw(view, instance)
    return view.put_instance(replace(instance, acked=True))


def refused(view: View, action: Action, error: SllmError, now: float) -> View:
    """The node did not take the command. Full, or not there: another place is looked for. Else the start has failed."""
    instance = view.instances.get(action.instance)
    if instance is None or instance.ended or isinstance(action, SendStop) or instance.seen is not None:
        return view
    if not isinstance(error, Unavailable):
        return instances.fail(view, instance, error.body(), now)
    place = (instance.key, instance.record.node)
    refusal, before = Refusal(now + REFUSED_S, error.message), view.refused.get(place)
    if before is not None and before.until > refusal.until:  # since a start failed there: others still come first
        refusal = replace(before, yields=refusal.until, since=error.message)
    return instances.withdraw(replace(view, refused={**view.refused, place: refusal}), instance)

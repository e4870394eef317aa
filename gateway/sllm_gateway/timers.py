"""Looks at every call when something of it may be due: its deadlines, and what its binding owes to the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

from sllm_gateway.binding import NEVER, Binding
from sllm_gateway.call import Call
from sllm_gateway.deadlines import Allowed, Seen, next_look, verdict
from sllm_gateway.dispatch import Dispatcher
from sllm_gateway.link import Link
from sllm_gateway.moves import Moves
from sllm_gateway.open_calls import OpenCalls
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.starts import PROGRESS_EVERY_S, Starts
from sllm_gateway.table import Version
from sllm_runtime.platform.hearing import Hearing
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import InstanceLost, SllmError
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.states import CallState

TICK_S = 0.025


class Life(Protocol):
    """What a deadline leads to."""

    def fail(self, call: Call, error: SllmError) -> None: ...

    def lost(self, call: Call, binding: Binding, why: str) -> None: ...

    def cut(self, call: Call, error: SllmError) -> None: ...

    def spared(self, call: Call, binding: Binding) -> None: ...


@dataclass
class _Awaited:
    """What the calls of a version wait for: the same for all of them."""

    told: Progress | None = None
    """How far its furthest start was when they were last woken for it."""
    told_at: float = -inf
    starting: bool = False
    news: bool = False
    """Whether they are woken now."""

    def look(self, progress: Progress | None, now: float) -> None:
        self.starting = progress is not None
        self.news = progress != self.told and now - self.told_at >= PROGRESS_EVERY_S
        if self.news:
            self.told, self.told_at = progress, now


class Timers:
    """One ticker for all calls: a comparison each, and work only for those that are due."""

    def __init__(
        self,
        calls: OpenCalls,
        link: Link,
        dispatcher: Dispatcher,
        moves: Moves,
        starts: Starts,
        settings: GatewaySettings,
        clock: Callable[[], float],
        life: Life,
    ) -> None:
        self._calls = calls
        self._link = link
        self._dispatcher = dispatcher
        self._moves = moves
        self._starts = starts
        self._settings = settings
        self._clock = clock
        self._life = life
        self._awaited: dict[Version, _Awaited] = {}
        """Of each version that calls wait for."""

    async def run(self) -> None:
        """Until it is cancelled; it sleeps while there is no call."""
        before = self._clock()
        hearing = Hearing(self._link.heard, before)
        while True:
            if not self._calls:
                await self._calls.some.wait()
                before = self._clock()
            await asyncio.sleep(TICK_S)
            now = self._clock()
            if hearing.deaf(self._link.heard, now) or now - before > limits.STALL_S:
                self._forgive(now)
            self.tick(now, now - before)
            before = now

    def _forgive(self, now: float) -> None:
        """Silence until now may have been ours, or NATS's."""
        for call in self._calls.values():
            call.marks.heard = now
            if call.binding is not None:
                call.binding.inbox.heard = now
            if call.move is not None:
                call.move.binding.inbox.heard = now

    def tick(self, now: float, passed: float) -> None:
        """Look at every call that is due. ``passed``: seconds since the tick before."""
        self._moves.tick(now)
        known, self._awaited = self._awaited, {}
        for call in list(self._calls.values()):
            if call.binding is None and not call.over:
                awaited = self._awaited.get(call.version)
                if awaited is None:
                    awaited = self._awaited[call.version] = known.get(call.version) or _Awaited()
                    awaited.look(self._starts.of(call.version.key, now), now)
                self._wait(call, awaited, passed)
            if now >= call.due:
                self._look(call, now)
            if now >= call.wake_at:
                call.wake()

    def _wait(self, call: Call, awaited: _Awaited, passed: float) -> None:
        state = CallState.STARTING if awaited.starting else CallState.QUEUED
        if call.state is not state:
            call.go(state)
        if not awaited.starting:
            call.marks.waited += passed
        if awaited.news:
            call.wake()

    def _look(self, call: Call, now: float) -> None:
        binding = call.binding
        call.due = NEVER
        if call.reading:
            self._look_at_deadlines(call, now)
        if binding is None or call.binding is not binding:
            return
        if call.over and not binding.asked:  # what comes before that may take long: JetStream may be away
            self._life.spared(call, binding)
            return
        if binding.cancelled and binding.silent(now) and self._link.connected:
            self._life.lost(call, binding, f"node {binding.node} is silent")
            return
        self._link.send_all(binding.node, binding.tend(now))
        call.due = min(call.due, binding.due)

    def _look_at_deadlines(self, call: Call, now: float) -> None:
        manifest, binding = call.version.manifest, call.binding
        allowed = Allowed(manifest.timeout, manifest.queue_timeout, manifest.idle_timeout, self._settings.slow_consumer)
        seen = self._seen(call)
        call.due = next_look(seen, allowed, now)
        instance = binding.instance if binding is not None else ""
        pending = partial(self._dispatcher.pending, call.version.key)
        error = verdict(seen, allowed, now, instance=instance, pending=pending)
        if isinstance(error, InstanceLost) and binding is not None:
            self._life.lost(call, binding, error.message.removesuffix("; call again"))
        elif error is not None and call.over:
            self._life.cut(call, error)
        elif error is not None:
            self._life.fail(call, error)

    def _seen(self, call: Call) -> Seen:
        binding, marks = call.binding, call.marks
        running = binding is not None and binding.accepted and not call.over and self._link.connected
        # Or being written to a journal, which may take its time. Of what is not streamed all waits for its end.
        unread = call.order.stream and (bool(call.frames) or call.buffered > 0)
        idle = running and not unread and call.writing is None
        return Seen(
            accepted=call.order.accepted,
            waited=marks.waited if binding is None and not call.over else None,
            frame=max(marks.last or 0.0, marks.sent, marks.resumed, marks.read, marks.heard) if idle else None,
            heard=binding.inbox.heard if binding is not None and running else None,
            writing=call.writing,
        )

"""Starts as they were decided, and what they took: recorded for whoever asks later, also of another controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from sllm_runtime.control import explain
from sllm_runtime.control.history import History, Past, over
from sllm_runtime.control.placement import Policy
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.ctl import Explained
from sllm_runtime.protocol.errors import SllmError

log = logging.getLogger(__name__)

MOST_WAITING: Final = 32
"""Starts that wait to be told of; the oldest of more are left out."""
MOST_GOING: Final = 256
"""Starts of which it is remembered what was told."""
PACE_S: Final = 0.1
"""After each of them: to look at the nodes takes a millisecond or two, which starts of now would wait for."""


class Decisions:
    """Tells the stream. ``run`` until cancelled. What it computes is for people, so it comes behind what is urgent: of
    what is over by then once."""

    def __init__(self, bus: Bus, history: History, policy: Policy, wall: Callable[[], float]) -> None:
        self._bus, self._history, self._policy, self._wall = bus, history, policy, wall
        self._going: dict[str, Explained] = {}
        """Of starts that are not over: what was known when they were decided."""
        self._waiting: dict[str, tuple[Past, float]] = {}
        """As they were decided, and when something was last heard of them."""
        self._some = asyncio.Event()

    def note(self, instances: Iterable[str]) -> None:
        """Their starts have been decided, or are over."""
        for name in instances:
            past, _ = self._waiting.get(name, (self._history.of(name), 0.0))
            if past is not None:
                self._waiting[name] = (past, self._wall())
        while len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
        if self._waiting:
            self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(PACE_S)
            self._tell_next()
            if not self._waiting:
                self._some.clear()

    def tell_all(self) -> None:
        """What waits, at once: this controller ends in order."""
        while self._waiting:
            self._tell_next()

    def _tell_next(self) -> None:
        name = next(iter(self._waiting))
        decided = self._waiting.pop(name)
        try:
            self._tell(name, *decided)
        except Exception:  # what is told to people is no reason for a controller to end
            log.exception("the decision on %s is not recorded", name)

    def _tell(self, name: str, decided: Past, at: float) -> None:
        now = self._history.of(name) or decided
        told = self._going.pop(name, None) or explain.started(decided, self._policy, short=True)
        if not over(now.instance):
            while len(self._going) >= MOST_GOING:
                del self._going[next(iter(self._going))]
            self._going[name] = told
        came = self._history.outcomes(now.instance.key, name) if over(now.instance) else ()
        told = explain.as_of(told, now, at, came)
        try:
            self._bus.publish_now(subjects.decision(told.function), told)
        except SllmError as error:
            log.warning("the decision on %s is not recorded: %s", name, error.message)

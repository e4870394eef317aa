"""Starts as they were decided, and what they took: recorded for whoever asks later, also of another controller."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from sllm_runtime.control import explain
from sllm_runtime.control.history import History
from sllm_runtime.control.placement import Policy
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.ctl import Explained
from sllm_runtime.protocol.errors import SllmError

log = logging.getLogger(__name__)

MOST_WAITING: Final = 256
"""Starts that wait to be told of; the oldest of more are left out."""


class Decisions:
    """Tells the stream. ``run`` until cancelled. What it computes is for people, so it comes after what is urgent."""

    def __init__(self, bus: Bus, history: History, policy: Policy, wall: Callable[[], float]) -> None:
        self._bus, self._history, self._policy, self._wall = bus, history, policy, wall
        self._going: dict[str, Explained] = {}
        """Of starts that are not over: what was known when they were decided."""
        self._waiting: deque[tuple[str, float]] = deque(maxlen=MOST_WAITING)
        self._some = asyncio.Event()

    def note(self, instances: Iterable[str]) -> None:
        """Their starts have been decided, or are over."""
        self._waiting.extend((name, self._wall()) for name in instances)
        if self._waiting:
            self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            name, at = self._waiting.popleft()
            if not self._waiting:
                self._some.clear()
            self._tell(name, at)
            await asyncio.sleep(0)  # others first: there may be many

    def _tell(self, name: str, at: float) -> None:
        past = self._history.of(name)
        if past is None:
            return
        told = self._going.pop(name, None)
        if told is None:
            told = explain.started(past, self._policy, short=True)
            while len(self._going) >= MOST_WAITING:
                del self._going[next(iter(self._going))]
            self._going[name] = told
        told = explain.as_of(told, past, at)
        try:
            self._bus.publish_now(subjects.decision(told.function), told)
        except SllmError as error:
            log.warning("the decision on %s is not recorded: %s", name, error.message)

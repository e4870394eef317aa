"""A daemon's own events: published and forgotten, few at a time, so that a storm of them is no load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.events import DROPPED, Event, Kind

log = logging.getLogger(__name__)

BURST: Final = 50
RATE: Final = 10.0
"""Events a second, after BURST at once; the next one that passes says how many were dropped."""
MESSAGE_MOST: Final = 2000


class Announcer:
    """Publishes events of one daemon. ``component`` and the bus's identity stand in the subject, by right."""

    def __init__(self, bus: Bus, component: str, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._bus = bus
        self._component = component
        self._clock, self._wall = clock, wall
        self._left = float(BURST)
        self._at = clock()
        self._dropped = 0

    def tell(
        self,
        kind: Kind,
        message: str = "",
        fields: dict[str, str] | None = None,
        *,
        at: float | None = None,
        **about: Any,
    ) -> bool:
        """Publish one event of now, or of ``at``; ``about``: function, version, instance, node, call. Whether it went
        out. Never waits; raises nothing while the bus is open."""
        now = self._clock()
        self._left = min(float(BURST), self._left + (now - self._at) * RATE)
        self._at = now
        if self._left < 1.0:
            self._dropped += 1
            return False
        self._left -= 1.0
        more = {**(fields or {}), **({DROPPED: str(self._dropped)} if self._dropped else {})}
        text = message[:MESSAGE_MOST]
        when = self._wall() if at is None else at
        event = Event(kind=kind, at=when, component=self._component, message=text, fields=more, **about)
        try:
            subject = subjects.event(self._component, self._bus.identity, kind, event.function, event.call)
            self._bus.publish_now(subject, event)
        except SllmError as error:
            log.debug("event %s was dropped: %s", kind, error.message)
            self._dropped += 1
            return False
        self._dropped = 0
        return True

"""The copy link of a fake device: a token bucket that says when bytes would have crossed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

SLACK_S: Final = 0.02
"""What a link may catch up, since a thread wakes late and a link of hardware does not; it never runs ahead."""


class Link:
    """``bandwidth`` in bytes per second. Thread-safe: threads that copy at once share it in the order they came."""

    def __init__(
        self,
        bandwidth: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.bandwidth = bandwidth
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, nbytes: int) -> float:
        """Claim the link for ``nbytes``; when they will have crossed, by the clock."""
        with self._lock:
            self._free_at = max(self._free_at, self._clock() - SLACK_S) + nbytes / self.bandwidth
            return self._free_at

    def wait(self, until: float) -> None:
        """Sleep to ``until``: that late at the least, and late by a wake-up at the most."""
        while (left := until - self._clock()) > 0:
            self._sleep(left)

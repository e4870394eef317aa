"""Whether the kernel has killed something for lack of memory just now: its count, looked at while it is quiet too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from sllm_runtime.platform import oom_kills

RECENT_S: Final = 15.0
"""The kernel counts before the process ends, which takes one with much memory a while."""
EVERY_S: Final = 1.0


class KernelKills:
    """``look`` is called regularly. What was killed long ago says nothing about who dies now."""

    def __init__(self, clock: Callable[[], float], count: Callable[[], int] = oom_kills.nearest) -> None:
        self._clock = clock
        self._count = count
        self._seen = deque([(clock(), count())])
        """(when, count), the oldest first; one of them is older than RECENT_S, if it was looked at by then."""

    def look(self) -> None:
        """Remember the count, at most once in EVERY_S."""
        now = self._clock()
        if now - self._seen[-1][0] < EVERY_S:
            return
        self._seen.append((now, self._count()))
        while len(self._seen) > 1 and now - self._seen[1][0] >= RECENT_S:
            self._seen.popleft()

    def recently(self) -> bool:
        """Whether the count has risen in the last RECENT_S, or since it was last looked at before."""
        return self._count() > self._seen[0][1]

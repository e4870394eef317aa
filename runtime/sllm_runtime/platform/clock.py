"""The clock of whoever has to know that it stood still."""

from __future__ import annotations

import time


def since_boot() -> float:
    """Seconds since this machine booted, sleep included. To ``time.monotonic`` a suspended machine goes on at once,
    while others have long taken over what it had."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)

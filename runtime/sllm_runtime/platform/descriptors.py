"""How many descriptors this process may have open, and the table that the kernel keeps of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from typing import Final

from sllm_runtime.protocol.limits import MAX_FDS

OF_DAEMON: Final = 2**20
"""A connection is one, and so is a chunk of a model."""
HANDED_ON: Final = 65_536
"""To what a daemon starts: there are programs that look at each that they may have."""
AT_ONCE: Final = 16_384
"""A daemon's table begins with so many: 130 KiB."""
OF_WORKER: Final = 2 * MAX_FDS
"""What one message may bring, beside what is open."""


def allow(count: int) -> None:
    """Let this process, and what it starts, open ``count`` descriptors, or as many as it may; no more either."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_within(count, hard), hard))


def keep_half() -> None:
    """Let this process, for good, and what it starts open half as many as it might: before any code that is not ours.

    The kernel counts descriptors on their way over unix sockets for each user, and lets a process send more only while
    there are fewer than that process may open. Whose code fills that up must still leave room for whoever it is that
    may open more, or nobody of this user hands on descriptors: a fork server would get no worker's.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = _within(HANDED_ON, soft) // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (half, half))


def make_room(count: int) -> None:
    """Let the table grow now to ``count`` descriptors, or as many as are allowed.

    Once threads share it, the kernel waits for an RCU grace period whenever the table doubles: 10 to 40 ms, in which
    the thread that opened something stands still. With one thread it grows at once; so call it after a fork, and
    before there are threads.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # none is free: nothing else will be opened either
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _within(count, soft) - 1))
        finally:
            os.close(null)


def _within(count: int, limit: int) -> int:
    return count if limit == resource.RLIM_INFINITY else min(count, limit)

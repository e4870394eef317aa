"""Which deadline of a call is over, and when to look again. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import (
    DeadlineExceeded,
    IdleTimeout,
    InstanceLost,
    QueueTimeout,
    SllmError,
    SlowConsumer,
)


@dataclass(frozen=True)
class Allowed:
    """A call's bounds in seconds."""

    timeout: float
    queue: float
    idle: float
    slow: float


@dataclass(frozen=True)
class Seen:
    """A call's times, all of one monotonic clock; None: does not apply now."""

    accepted: float
    waited: float | None
    """Seconds waited for capacity."""
    frame: float | None
    """Last frame or, later, last byte taken by the reader; None also while the reader has bytes to take."""
    heard: float | None
    """Last word from the node, while connected to it."""
    writing: float | None
    """Since when the reader's client takes nothing."""


def verdict(
    seen: Seen, allowed: Allowed, now: float, *, instance: str = "", pending: Callable[[], str] = str
) -> SllmError | None:
    """The error that the call ends with now, or None. ``pending``: why it waits, asked where that is told."""
    if now - seen.accepted >= allowed.timeout:
        return DeadlineExceeded(
            f"the call took longer than its timeout of {allowed.timeout:g} s; raise `timeout` of the function"
        )
    if seen.writing is not None and now - seen.writing >= allowed.slow:
        return SlowConsumer(f"the caller took nothing for {allowed.slow:g} s; read faster")
    if seen.waited is not None and seen.waited >= allowed.queue:
        why = pending()
        reason = f": {why}" if why else ""
        return QueueTimeout(
            f"no instance could take the call within {allowed.queue:g} s{reason}; "
            "call again, or raise `queue_timeout` of the function",
            retry_after_s=1.0,
        )
    if seen.heard is not None and now - seen.heard >= limits.LOST_AFTER_S:
        return InstanceLost(f"instance {instance} has been silent for {limits.LOST_AFTER_S:g} s; call again")
    if seen.frame is not None and now - seen.frame >= allowed.idle:
        return IdleTimeout(
            f"the function sent nothing for {allowed.idle:g} s; raise its `idle_timeout` if it is that slow"
        )
    return None


def next_look(seen: Seen, allowed: Allowed, now: float) -> float:
    """The earliest time at which ``verdict`` could be another."""
    times = [seen.accepted + allowed.timeout]
    if seen.writing is not None:
        times.append(seen.writing + allowed.slow)
    if seen.waited is not None:
        times.append(now + max(0.0, allowed.queue - seen.waited))
    if seen.heard is not None:
        times.append(seen.heard + limits.LOST_AFTER_S)
    if seen.frame is not None:
        times.append(seen.frame + allowed.idle)
    return min(times)

"""How long a version that failed is left alone: 1 s, doubling to 60 s. Kept per version; a deployment resets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sllm_runtime.control.view import Failure
from sllm_runtime.protocol.errors import BY_CODE, ErrorBody, InstanceLost, StartFailed

FIRST_S: Final = 1.0
LONGEST_S: Final = 60.0
STABLE_S: Final = 60.0
"""An instance that was ready for this long has proved itself: the count of its version's crashes begins anew."""
MOST_TAKEN: Final = 4
"""So many starts in a row that went with their node, or with a part of it, and it may be the start that ends that: it
counts as failed. Far fewer than the ends of a loaderd after which its node is given up (``platform.restarts``)."""


def delay(attempts: int, longest_s: float = LONGEST_S) -> float:
    """Seconds to wait after the ``attempts``-th failure in a row (1, 2, 4 … ``longest_s``)."""
    return min(longest_s, FIRST_S * 2.0 ** min(attempts - 1, 16))


def after(previous: Failure | None, error: ErrorBody, now: float, *, started: bool, began: float) -> Failure:
    """The record of one more failure, of what ``began`` then. A blocking one, of what had not ``started``, is never
    weakened by a crash. A start that its node took with it says nothing of the version, unless it happens to each. What
    fails together, since it began before the last failure was counted, failed once: eight starts for eight callers, the
    instances of a node that died."""
    taken = previous.taken if previous is not None else 0
    taken += not started and error.code == InstanceLost.code and (previous is None or began >= previous.at)
    blocking = not started and blames(error, taken)
    attempts = max(1, taken) if blocking else 1
    if previous is not None:
        if previous.blocking and not blocking and now < previous.until:
            return previous
        if previous.blocking == blocking:
            if began < previous.at:
                return previous
            attempts = previous.attempts + 1
    return Failure(error=error, attempts=attempts, at=now, until=now + delay(attempts), blocking=blocking, taken=taken)


def blames(error: ErrorBody, taken: int) -> bool:
    """Whether the end of a start, the ``taken``-th in a row of those that were, says something of its version."""
    return error.code != InstanceLost.code or taken >= MOST_TAKEN


def got_ready(previous: Failure | None) -> Failure | None:
    """What is left of it when an instance gets ready: crashes of those that ran before."""
    if previous is None or previous.blocking:
        return None
    if not previous.taken:
        return previous
    crashes = previous.attempts - previous.taken
    return replace(previous, attempts=crashes, taken=0) if crashes > 0 else None


def active(failure: Failure | None, now: float, *, asked: bool) -> bool:
    """Whether no start may be made now. ``asked``: a caller (or a deployment) waits for it, so that only a start
    that failed holds it back, not a crash of one that ran."""
    return failure is not None and now < failure.until and (failure.blocking or not asked)


def for_caller(failure: Failure, now: float) -> ErrorBody:
    """The error every waiting caller gets: always 503, with the rest of the back-off as ``retry_after_s``."""
    error = failure.error
    code = error.code if error.status == StartFailed.status and error.code in BY_CODE else StartFailed.code
    return ErrorBody(
        code=code,
        message=error.message,
        status=StartFailed.status,
        retryable=error.retryable,
        stage=error.stage,
        retry_after_s=round(max(failure.until - now, 0.001), 3),
        detail=error.detail,
    )

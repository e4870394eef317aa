"""When a request is sent again: a small policy, apart from any I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sllm_runtime.protocol.errors import NEVER_RAN, SllmError


@dataclass(frozen=True)
class Retry:
    """At most ``attempts`` tries; waits double from ``base_s`` up to ``cap_s``, with jitter; Retry-After is kept."""

    attempts: int = 3
    base_s: float = 0.1
    cap_s: float = 5.0
    rand: Callable[[], float] = random.random

    def wait(self, attempt: int, error: SllmError, *, repeatable: bool) -> float | None:
        """Seconds to wait before try ``attempt + 1`` (tries count from 1); ``None``: give up.

        A ``repeatable`` request (it only reads) is sent again after any error that says ``retryable``; any other only
        where the error is one of ``NEVER_RAN``. Where Retry-After is above ``cap_s`` the caller is to decide.
        """
        sure = error.retryable if repeatable else error.code in NEVER_RAN
        if attempt >= self.attempts or not sure or (error.retry_after_s or 0.0) > self.cap_s:
            return None
        backoff = min(self.cap_s, self.base_s * 2.0 ** (attempt - 1)) * (0.5 + self.rand() / 2)
        return max(backoff, error.retry_after_s or 0.0)


NEVER: Final = Retry(attempts=1)

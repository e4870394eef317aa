"""Which failures a new attempt may cure. One small policy, asked before the first byte only."""

from __future__ import annotations

from sllm_runtime.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotDeterministic,
    OutputTooLarge,
    SllmError,
)

NEVER = (InvalidRequest, Cancelled, DeadlineExceeded, NotDeterministic, OutputTooLarge)
"""The request's own fault, the caller's wish, time that has run out: the same again would bring the same."""


def worth_retrying(error: SllmError) -> bool:
    """Whether a function with ``retries`` left is called again after ``error``."""
    return not isinstance(error, NEVER)

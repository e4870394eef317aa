"""Which failures another instance may cure: by going on where this one stopped, or, before the first byte, from the
beginning. Two small policies."""

from __future__ import annotations

from sllm_runtime.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    GatewaySilent,
    InstanceLost,
    InvalidRequest,
    NotDeterministic,
    OutputTooLarge,
    SllmError,
)

NEVER = (InvalidRequest, Cancelled, DeadlineExceeded, NotDeterministic, OutputTooLarge)
"""The request's own fault, the caller's wish, time that has run out: the same again would bring the same."""


def worth_resuming(error: SllmError) -> bool:
    """Whether an engine-backed call goes on elsewhere after ``error``: its instance is gone, whatever the reason, or
    ends, or its node gave it up while this gateway stood still."""
    return isinstance(error, InstanceLost | Draining | GatewaySilent)


def worth_retrying(error: SllmError) -> bool:
    """Whether a function with ``retries`` left is called again after ``error``."""
    return not isinstance(error, NEVER)

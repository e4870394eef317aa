"""The trace of the call whose code runs here: set by the worker, read by user code through the SDK."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

TRACEPARENT: Final[ContextVar[str]] = ContextVar("sllm_traceparent", default="")
"""As ``CallHead.traceparent``; while an instance starts, as ``Assign.traceparent``."""
TRACESTATE: Final[ContextVar[str]] = ContextVar("sllm_tracestate", default="")
"""As ``CallHead.tracestate``; empty while an instance starts."""

"""``sllm.traceparent``: of which trace the call is that a function answers, where it runs."""

from __future__ import annotations

from sllm_runtime.protocol.own_trace import TRACEPARENT


def traceparent() -> str:
    """The ``traceparent`` (W3C Trace Context) of the request that this code answers, for what it asks elsewhere. Empty
    where the request had none or a broken one, outside a call, and in threads that the function starts without its
    context (``contextvars.copy_context``). When another instance goes on with a call it is the same."""
    return TRACEPARENT.get()

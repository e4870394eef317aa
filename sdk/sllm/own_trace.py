"""``sllm.traceparent``, ``sllm.tracestate``: of which trace the call is that a function answers, where it runs."""

from __future__ import annotations

from sllm_runtime.protocol.own_trace import TRACEPARENT, TRACESTATE


def traceparent() -> str:
    """The ``traceparent`` (W3C Trace Context) of the request that this code answers, for what it asks elsewhere; where
    that had none, or a broken one, one that the gateway has made. Empty outside a call, and in threads that the
    function starts without its context (``contextvars.copy_context``). When another instance goes on with a call it is
    the same."""
    return TRACEPARENT.get()


def tracestate() -> str:
    """The ``tracestate`` that came with it: what tracing systems add to a trace, to be passed on as it is in the header
    beside it. Empty where there was none, it is none, or its ``traceparent`` is none; and while an instance starts."""
    return TRACESTATE.get()

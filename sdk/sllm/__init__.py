"""sllm: package a model as a Python function, deploy it, call it over HTTP with streamed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sllm.client import AsyncClient, Client
    from sllm.function import ModelFunction, model_function
    from sllm.model import Model
    from sllm.own_secrets import secret
    from sllm.own_trace import traceparent, tracestate
    from sllm.remote import AsyncFunction, Function

__all__ = [
    "AsyncClient",
    "AsyncFunction",
    "Client",
    "Function",
    "Model",
    "ModelFunction",
    "model_function",
    "secret",
    "traceparent",
    "tracestate",
]
__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "sllm.async_client",
    "AsyncFunction": "sllm.remote",
    "Client": "sllm.client",
    "Function": "sllm.remote",
    "Model": "sllm.model",
    "ModelFunction": "sllm.function",
    "model_function": "sllm.function",
    "secret": "sllm.own_secrets",
    "traceparent": "sllm.own_trace",
    "tracestate": "sllm.own_trace",
}


def __getattr__(name: str) -> Any:
    """Loaded when first used: ``import sllm`` costs nothing it does not need."""
    if name not in _HOME:
        raise AttributeError(f"module 'sllm' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value

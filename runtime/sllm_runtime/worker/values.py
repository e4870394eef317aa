"""A function's values as JSON."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import msgspec
from pydantic import BaseModel

from sllm_runtime.protocol.errors import FunctionError


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    # Only modules that are loaded can have made the value.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.tolist()
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = type(value)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)


def encode(value: Any) -> bytes:
    """``value`` as JSON text. Raises ``FunctionError`` naming the type that JSON cannot carry."""
    try:
        return _encoder.encode(value)
    except TypeError as error:
        text = f"the function returned something that is not JSON: {error}; return JSON types, dataclasses, pydantic "
        text += "models, arrays or tensors"
        with contextlib.suppress(RecursionError):
            if (key := _no_key(value)) is not None:
                text = f"the function returned a dict that is not JSON: its key {key} is neither text nor a number"
        raise FunctionError(text, detail=text + "\n") from error
    except (RecursionError, ValueError, OverflowError) as error:
        text = f"the function's result cannot be written as JSON: {error}"
        raise FunctionError(text, detail=text + "\n") from error


def _no_key(value: Any) -> str | None:
    """The first key, if any, that alone keeps a dict of ``value`` from being JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            try:
                _encoder.encode({key: None})
            except (TypeError, ValueError, OverflowError):
                return f"{key!r:.80} ({type(key).__name__})"
            if (found := _no_key(inner)) is not None:
                return found
    elif isinstance(value, list | tuple):
        return next((found for each in value if (found := _no_key(each)) is not None), None)
    return None

"""A function's values as JSON."""

from __future__ import annotations

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
        raise FunctionError(
            f"the function returned something that is not JSON: {error}; return JSON types, dataclasses, pydantic "
            "models, arrays or tensors"
        ) from error
    except (RecursionError, ValueError, OverflowError) as error:
        raise FunctionError(f"the function's result cannot be written as JSON: {error}") from error

"""The user's function, ready to be called: what it is, where it runs, and which of its parameters is the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sllm_runtime.protocol.errors import InvalidBundle
from sllm_runtime.protocol.manifest import MODEL_PARAMETER
from sllm_runtime.worker.arguments import Arguments
from sllm_runtime.worker.own import users


@dataclass(frozen=True, slots=True)
class UserFunction:
    """``call`` takes keyword arguments that ``arguments`` made. ``on_loop``: it is async and runs on the event loop,
    else in a thread."""

    call: Callable[..., Any]
    arguments: Arguments
    on_loop: bool


def bind(function: Any, model: Any | None) -> UserFunction:
    """``function`` (a function, or the ``__call__`` of an instance) with ``model`` filled in where it asks for it.

    Raises ``InvalidBundle`` if it asks for a model and there is none, or its hints cannot be used.
    """
    wants = _wants_model(function, model)

    def call(**arguments: Any) -> Any:
        return function(**arguments, **({MODEL_PARAMETER: model} if wants else {}))

    try:
        arguments = Arguments(function)
    except Exception as error:  # hints are the user's code: resolving them may raise anything
        name = getattr(function, "__qualname__", function)
        raise InvalidBundle(f"the type hints of {name} cannot be used: {type(error).__name__}: {error}") from error
    on_loop = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return UserFunction(call, arguments, on_loop)


async def instantiate(cls: type, model: Any | None) -> Any:
    """An object of the user's class, its ``setup`` (plain or async) done. Raises what the user's code raises."""
    with users():
        instance = cls()
        setup = getattr(instance, "setup", None)
    if setup is not None:
        given = {MODEL_PARAMETER: model} if _wants_model(setup, model) else {}
        with users():
            result = setup(**given)
            if inspect.isawaitable(result):
                await result
    if not callable(instance):
        raise InvalidBundle(f"class {cls.__qualname__} has no __call__ method: add `def __call__(self, ...)`")
    return instance.__call__


def _wants_model(function: Any, model: Any | None) -> bool:
    wants = MODEL_PARAMETER in inspect.signature(function).parameters
    if wants and model is None:
        name = getattr(function, "__qualname__", function)
        raise InvalidBundle(f"{name} takes 'model', but its function has none; add model=... to @model_function")
    return wants

"""Functions that no file names: those of a notebook or of ``__main__`` travel by value."""

from __future__ import annotations

import dataclasses
import inspect
import io
import sys
from pathlib import Path
from typing import Any

from sllm import ignore
from sllm.function import ModelFunction
from sllm_runtime.protocol.errors import InvalidBundle, SllmError


def modules_below(root: Path) -> list[str]:
    """Source files below ``root`` that this process has imported (relative, posix, sorted): a pickled function names
    them, and the worker has to find them."""
    found = set()
    rules = ignore.spec(root)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        if path.is_relative_to(root) and path.is_file() and "site-packages" not in path.parts:
            relative = path.relative_to(root).as_posix()
            if not rules.match_file(relative):
                found.add(relative)
    return sorted(found)


def dump(function: ModelFunction[Any, Any, Any]) -> bytes:
    """The user's function or class, cloudpickled. Raises ``InvalidBundle`` naming what cannot be pickled."""
    try:
        return _bytes(function.target)
    except SllmError:
        raise
    except Exception as error:  # cloudpickle raises whatever a user's __reduce__ raises
        where = _where(function.target)
        raise InvalidBundle(f"{function.__name__}{where} cannot be pickled: {_culprit(function, error)}") from error


def _bytes(target: Any) -> bytes:
    """As ``cloudpickle.dumps``, but a dataclass that travels by value keeps the one ``MISSING`` there is: by it, and by
    no equal of it, dataclasses and pydantic know that a field has no default."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, thing: Any) -> Any:
            return "MISSING" if thing is dataclasses.MISSING else super().reducer_override(thing)

    buffer = io.BytesIO()
    Pickler(buffer).dump(target)
    return buffer.getvalue()


def _where(target: Any) -> str:
    code = getattr(target, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def _captured(target: Any) -> dict[str, Any]:
    """What a function (or the methods of a class) takes from outside, by name."""
    functions = [target] if inspect.isfunction(target) else list(vars(target).values())
    captured: dict[str, Any] = {}
    for function in functions:
        if inspect.isfunction(function):
            found = inspect.getclosurevars(function)
            captured |= {**found.globals, **found.nonlocals}
    return captured


def _culprit(function: ModelFunction[Any, Any, Any], error: Exception) -> str:
    """Which captured name cannot be pickled, and what to do."""
    import cloudpickle

    for name, value in _captured(function.target).items():
        if value is function or value is function.target:
            continue
        try:
            cloudpickle.dumps(value)
        except Exception as reason:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            return (
                f"it uses '{name}' ({kind}), which cannot leave this process ({reason}); create it inside the "
                "function, or in setup() of a class"
            )
    return f"{type(error).__name__}: {error}; create what it captures inside the function"

"""The functions that a file describes: ``file.py``, ``file.py::name``, a directory, or ``package.module::name``."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from sllm import bundle
from sllm.cli import ctrl_c
from sllm.function import ModelFunction
from sllm_runtime.protocol.errors import InvalidBundle, SllmError

FILE: Final = "function.py"
"""What a directory's function stands in."""


def load(target: str) -> list[ModelFunction[Any, Any, Any]]:
    """Import what ``target`` names. Raises ``InvalidBundle`` saying what is wrong and where."""
    where, _, name = target.partition("::")
    module = _module(where)
    found = {key: value for key, value in vars(module).items() if isinstance(value, ModelFunction)}
    own = {key: value for key, value in found.items() if value.__module__ == module.__name__}
    if name:
        if name in found:
            return [found[name]]
        raise InvalidBundle(_not_there(where, name, module, own))
    if not own:
        raise InvalidBundle(f"{where} describes no function; {_why_none(module)}")
    functions = list(dict.fromkeys(own.values()))
    names = [function.name for function in functions]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise InvalidBundle(f"{where} describes {twice!r} twice; give one another name=")
    return functions


def _why_none(module: ModuleType) -> str:
    """What to do where a module has no described function by a name of its own."""
    owner = next(
        (
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
            for each in vars(value).values()
            if isinstance(getattr(each, "__func__", each), ModelFunction)
        ),
        None,
    )
    if owner is not None:
        return f"@model_function stands on a method of class {owner}; put it above the class, or above a function"
    return "put @model_function above one (from sllm import model_function), outside of `if __name__ == ...`"


def one(target: str) -> ModelFunction[Any, Any, Any]:
    """Exactly one function. Raises ``InvalidBundle`` naming the choice if there are several."""
    found = load(target)
    if len(found) > 1:
        names = ", ".join(f"{target}::{function.__name__}" for function in found)
        raise InvalidBundle(f"{target} describes {len(found)} functions; name one: {names}")
    return found[0]


def _not_there(where: str, name: str, module: ModuleType, own: dict[str, Any]) -> str:
    there = f"; there: {', '.join(own)}" if own else ""
    if hasattr(module, name):
        return f"{name} in {where} is a {type(getattr(module, name)).__name__} without @model_function{there}"
    return f"{where} has no {name}{there}"


def _module(where: str) -> ModuleType:
    path = Path(where)
    if path.is_dir():
        path = path / FILE
        if not path.is_file():
            raise InvalidBundle(f"{path.parent} has no {FILE}; name the file that describes the function")
    if path.suffix != ".py" and not path.exists():
        return _by_name(where)
    if path.suffix != ".py" or not path.is_file():
        raise InvalidBundle(f"{path} is {'no Python file' if path.exists() else 'not there'}; name a .py file")
    path = path.resolve()
    root, name = bundle.locate(path)
    module = _imported(where, root, name)
    if Path(module.__file__ or "/").resolve() != path:
        other = module.__file__ or "built in"
        raise InvalidBundle(f"{path} is imported as {name!r}, but so is another module here ({other}); rename the file")
    return module


def _by_name(name: str) -> ModuleType:
    """A module as ``import`` finds it. One that is not there is not to be installed, as what it imports may be."""
    file, colon, function = name.partition(".py:")
    if colon:
        raise InvalidBundle(f"{name} is not there; a function of a file is named by two colons: {file}.py::{function}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidBundle(f"{name} is not there; name a .py file")
    try:
        return _imported(name, Path.cwd(), name)
    except InvalidBundle as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{name}.".startswith(f"{missing.name}."):
            raise InvalidBundle(f"there is no file or module {name}; name a .py file") from missing
        raise


def _imported(where: str, root: Path, name: str) -> ModuleType:
    """Import ``name`` with ``root`` in front of the path. What the module prints is no result of ours."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        with contextlib.redirect_stdout(sys.stderr), ctrl_c.answer.in_users_code():
            return importlib.import_module(name)
    except SllmError as error:
        error.message = f"{where}: {error.message}"
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything at import
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise InvalidBundle(f"{where} cannot be imported: {_place(error, root)}{what}{_remedy(error)}") from error


def _place(error: BaseException, root: Path) -> str:
    """``file:line: `` of the user's own code nearest to the failure."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).is_relative_to(root)]
    return f"{Path(inside[-1].filename).relative_to(root)}:{inside[-1].lineno}: " if inside else ""


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "; install it here, or import it inside the function where only the worker has it"
    return ""

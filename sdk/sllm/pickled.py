"""Functions that no file names: those of a notebook or of ``__main__`` travel by value, with the user's modules that
they import beside them."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import io
import sys
import sysconfig
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import typing_extensions
from pydantic import BaseModel
from pydantic_core import SchemaSerializer, SchemaValidator

from sllm import ignore, signature
from sllm.function import ModelFunction
from sllm_runtime.protocol.errors import InvalidBundle, SllmError

_ALIASES: Final = (typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType))
"""What ``type X = …`` makes."""
_OURS: Final = ("sllm", "sllm_runtime", "sllm_gateway", "sllm_invoker", "sllm_loaderd")
"""What workers have of us; in a checkout it lies where the user's own may lie."""
_INSTALLED: Final = ("site-packages", "dist-packages")
_DEPLOYS: Final = 6
"""How far above ``dump`` a program stands that calls ``.deploy()``: Python names its line beside a warning."""


def modules(root: Path) -> dict[str, Path]:
    """Modules below ``root`` that this process has imported, and the packages that they are in, with their files: a
    pickled function names them, and the worker has to find them."""
    rules, found = ignore.spec(root), dict[str, Path]()
    for name in list(sys.modules):
        file = _own_file(name)
        if file is None or not file.is_relative_to(root) or rules.match_file(file.relative_to(root).as_posix()):
            continue
        for each in (name, *_packages(name)):
            if (file := _own_file(each)) is not None:
                found[each] = file
    return found


def stored(name: str, file: Path) -> str:
    """Where the worker finds the module ``name``: it imports it by that name, wherever ``file`` lies here."""
    place = name.replace(".", "/")
    return f"{place}/__init__.py" if file.name == "__init__.py" else f"{place}.py"


def _own_file(name: str) -> Path | None:
    """The source of a module that the user brought: not Python's, not installed, not ours."""
    return _brought(name, getattr(sys.modules.get(name), "__file__", None))


def _brought(name: str, file: Any) -> Path | None:
    parts = name.split(".")
    can_be_stored = all(part and not set(part) & set("/\\") for part in parts)
    if not isinstance(file, str) or not file.endswith(".py") or not can_be_stored:
        return None
    path = Path(file).resolve()
    brought = parts[0] not in (*_OURS, "__main__", "__mp_main__") and not set(_INSTALLED) & set(path.parts)
    return path if brought and path.is_file() and not path.is_relative_to(_standard_library()) else None


def _add_later(codes: list[tuple[CodeType, str]], root: Path, found: dict[str, Path]) -> None:
    """Add to ``found`` the modules below ``root`` that nothing has imported yet: what ``codes`` (each with the package
    that it is in), and the modules in ``found``, import where they run (``import`` inside a function)."""
    rules = ignore.spec(root)
    left = [*codes, *(_source(name, file) for name, file in found.items())]
    while left:
        for imported in _imports(*left.pop()):
            for name, origin in _specs(imported):
                file = _brought(name, origin)
                if name in found or file is None or not file.is_relative_to(root):
                    continue
                if not rules.match_file(file.relative_to(root).as_posix()):
                    found[name] = file
                    left.append(_source(name, file))


def _source(name: str, file: Path) -> tuple[CodeType, str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    try:
        return compile(file.read_bytes(), str(file), "exec", dont_inherit=True), package
    except (SyntaxError, ValueError, OSError):  # whoever imports it is told
        return compile("", str(file), "exec"), package


def _imports(code: CodeType, package: str) -> Iterator[str]:
    """Names that ``code`` imports, wherever in it; of ``from a import b`` also ``a.b``, which may be a module."""
    constants: list[Any] = [0, None]
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_CONST":
            constants.append(each.argval)
        elif each.opname == "IMPORT_NAME":
            level, names = constants[-2:]
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - level + 1]) if level else ""
            name = ".".join(filter(None, (base, each.argval)))
            yield from (name, *(f"{name}.{other}" for other in names or ()))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _imports(inner, package)


def _specs(name: str) -> Iterator[tuple[str, str | None]]:
    """``name`` and the packages that it is in, as far as they are there, with their files. None is imported."""
    places: Any = None
    for each in (*reversed(list(_packages(name))), name):
        spec = PathFinder.find_spec(each.rpartition(".")[2], places)  # of a whole name it looks for its parent's module
        if spec is None:
            return
        yield each, spec.origin
        places = spec.submodule_search_locations or []


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"]).resolve()


def dump(function: ModelFunction[Any, Any, Any], root: Path, travels: dict[str, Path]) -> bytes:
    """The user's function or class, cloudpickled; the modules in ``travels`` go beside it, and those that it imports
    where it runs, which are added to them. Raises ``InvalidBundle`` naming what cannot be pickled; warns of a module
    that it uses and that nothing takes along."""
    try:
        with _hints_are_types(function.target):
            data, used, codes = _bytes(function.target)
    except SllmError:
        raise
    except Exception as error:  # cloudpickle raises whatever a user's __reduce__ raises
        where = _where(function.target)
        raise InvalidBundle(f"{function.__name__}{where} cannot be pickled: {_culprit(function, error)}") from error
    _add_later(codes, root, travels)
    if function.options.get("image"):  # what is installed in one, nobody knows here
        return data
    for name in sorted(used - set(travels)):
        file = _own_file(name)
        if file is not None and not file.is_relative_to(root) and _place(name, file) in _users_path():
            warnings.warn(
                f"{function.__name__}{_where(function.target)} uses {name!r} ({file}), which lies outside {root} and "
                "is not installed, so that nothing takes it along; unless the nodes have one, move it below that "
                "directory",
                stacklevel=_DEPLOYS,
            )
    return data


def _place(name: str, file: Path) -> Path:
    """The directory of ``sys.path`` by which the module was found."""
    return file.parents[name.count(".") + (file.name == "__init__.py")]


def _users_path() -> set[Path]:
    """What stands in front of Python's own in ``sys.path``: the program's directory, and what its user has put there.
    What is installed comes behind."""
    places, standard = [Path(place).resolve() for place in sys.path], _standard_library()
    return set(places[: places.index(standard)]) if standard in places else set()


def _bytes(target: Any) -> tuple[bytes, set[str], list[tuple[CodeType, str]]]:
    """As ``cloudpickle.dumps``, the names of modules that will be imported for it, and the code in it. A dataclass
    that travels by value keeps the one ``MISSING`` there is: by it, and by no equal of it, dataclasses and pydantic
    know that a field has no default."""
    import cloudpickle

    used: set[str] = set()
    codes: list[tuple[CodeType, str]] = []
    by_value = cloudpickle.list_registry_pickle_by_value()

    def travels(module: str) -> bool:
        return module == "__main__" or bool(by_value & {module, *_packages(module)})

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, thing: Any) -> Any:
            if thing is dataclasses.MISSING:
                return "MISSING"
            if isinstance(thing, SchemaValidator | SchemaSerializer):
                reduced: Any = thing.__reduce__()
                return reduced[0], tuple(map(_copied, reduced[1]))
            if isinstance(thing, typing.NewType) and travels(thing.__module__):
                return typing.NewType, (thing.__name__, thing.__supertype__)  # cloudpickle knows it by its name alone
            if isinstance(thing, _ALIASES) and travels(str(thing.__module__)):
                made: Any = type(thing)
                return partial(made, thing.__name__, thing.__value__, type_params=thing.__type_params__), ()
            found = super().reducer_override(thing)
            if found is not NotImplemented and isinstance(thing, FunctionType):  # by value
                codes.append((thing.__code__, str(thing.__globals__.get("__package__") or "")))
            if found is NotImplemented and isinstance(thing, ModuleType | FunctionType | type):  # by its name
                used.add(thing.__name__ if isinstance(thing, ModuleType) else str(thing.__module__))
            return found

    buffer = io.BytesIO()
    Pickler(buffer).dump(target)
    # Of a module as such the pickler does not say here whether it goes by value, as it does of what is in one.
    return buffer.getvalue(), {name for name in used if not by_value & {name, *_packages(name)}}, codes


def _copied(schema: Any) -> Any:
    """With containers of its own: a model's schema lies in those of other models too, and who unpickles one of these
    comes by the model's class to what is made from its schema, of which nothing is there by then."""
    if type(schema) is dict:  # a default may be a Counter, which is to stay one
        return {name: _copied(value) for name, value in schema.items()}
    return type(schema)(map(_copied, schema)) if type(schema) in (list, tuple) else schema


def _packages(name: str) -> Iterator[str]:
    """Those that the module ``name`` is in."""
    while name := name.rpartition(".")[0]:
        yield name


@contextmanager
def _hints_are_types(target: Any) -> Iterator[None]:
    """Meanwhile the hints of a call's arguments are types, also where ``from __future__ import annotations`` makes
    texts of them: what only a text names is no part of a pickle, and the worker could not look it up. It never looks
    into what a call returns."""
    function = signature.call_target(target)
    hints = typing.get_type_hints(function, include_extras=True)
    undo = [(function, "__annotations__", function.__annotations__)]
    function.__annotations__ = hints
    arguments = [hint for name, hint in hints.items() if name != "return"]
    for record, own in _records(arguments, function.__module__).items():
        undo.append((record, "__annotations__", record.__annotations__))
        record.__annotations__ = {name: own.get(name, hint) for name, hint in record.__annotations__.items()}
        for field in getattr(record, "__dataclass_fields__", {}).values():
            undo.append((field, "type", field.type))
            field.type = own.get(field.name, field.type)
    try:
        yield
    finally:
        for thing, attribute, before in reversed(undo):
            setattr(thing, attribute, before)


def _records(hints: list[Any], module: str) -> dict[Any, dict[str, Any]]:
    """Dataclasses, named tuples and typed dictionaries of ``module`` that ``hints`` name, and those that these name,
    with their own hints."""
    found: dict[Any, dict[str, Any]] = {}
    left, names = list(hints), list[Any]()
    while left:
        hint = left.pop()
        if isinstance(hint, (typing.NewType, *_ALIASES)) and hint not in names:  # an alias may name itself
            names.append(hint)
            left.append(hint.__supertype__ if isinstance(hint, typing.NewType) else hint.__value__)
        if (origin := typing.get_origin(hint)) is not None:
            left += (origin, *typing.get_args(hint))
        is_tuple = isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
        is_model = isinstance(hint, type) and issubclass(hint, BaseModel) and hint is not BaseModel
        if is_model and not hint.__pydantic_complete__:
            hint.model_rebuild(raise_errors=False)  # it names what was defined below it, which the worker could not
        # Of typing_extensions are those that pydantic takes before Python 3.12, and typing does not know them.
        is_record = dataclasses.is_dataclass(hint) or typing_extensions.is_typeddict(hint) or is_tuple
        if is_record and isinstance(hint, type) and hint.__module__ == module and hint not in found:
            found[hint] = _resolved(hint)
            left += found[hint].values()
    return found


def _resolved(record: Any) -> dict[str, Any]:
    """Its hints; none where one names what is not there while the program runs (``TYPE_CHECKING``): the schema had no
    need of it either."""
    try:
        return typing.get_type_hints(record, include_extras=True)
    except NameError:
        return {}


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

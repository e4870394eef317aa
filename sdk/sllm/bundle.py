"""A function's code as one deterministic zip: source files that the worker imports by name.

Only functions of a notebook or of ``__main__``, which no file names, are cloudpickled (beside the modules they import
and what ``include`` names); their manifest then states the Python minor version, since byte code runs on no other.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import sys
import zipfile
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from sllm import ignore, pickled
from sllm.doctor.software import EXTRAS
from sllm.function import ModelFunction
from sllm_runtime.protocol.errors import BodyTooLarge, InvalidBundle
from sllm_runtime.protocol.limits import MAX_BUNDLE, MAX_BUNDLE_FILES
from sllm_runtime.protocol.manifest import PICKLE_ENTRY, PICKLE_NAME, TARGET_ATTRIBUTE, Manifest
from sllm_runtime.protocol.quantities import show_bytes

MANY_FILES: Final = 200
MUCH: Final = 5 << 20
"""Bytes. A bundle above this, or of more than ``MANY_FILES``, may hold what nobody meant to send."""
OURS: Final = ("sllm", "sllm_runtime", "numpy")
"""What workers import beside their extra's modules."""
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Bundle:
    """``data`` is the zip, ``digest`` its ``sha256:…``, ``files`` its names.

    ``left_out``: links in the function's directory, ``root``, that are not followed: they lead out of it, or to a
    directory.
    """

    manifest: Manifest
    data: bytes
    digest: str
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    root: Path | None = None
    unpruned: Path | None = None
    """The directory that travels whole: there is no ``.sllmignore`` in it."""

    @property
    def warning(self) -> str:
        """What to say of a large bundle of which nobody said what to leave out; else empty."""
        if self.unpruned is None or (len(self.files) <= MANY_FILES and len(self.data) <= MUCH):
            return ""
        return (
            f"all of {self.unpruned} travels, {len(self.files)} files of {show_bytes(len(self.data))}; "
            f"list what a call does not need in {self.unpruned / ignore.IGNORE_FILE} (as in a .gitignore)"
        )


def build(function: ModelFunction[Any, Any, Any]) -> Bundle:
    """Bundle ``function``. Raises ``InvalidBundle`` saying what and where, ``BodyTooLarge`` naming large files."""
    source = function.source_file()
    if source is None or function.__module__ == "__main__":
        return _of_main(function, source)
    if function.is_stale():  # its code would be the new one, its settings and arguments those of before
        raise InvalidBundle(
            f"{source} has changed since {function.__name__} was imported; import it again "
            f"(`importlib.reload` its module, then `from … import {function.__name__}`) or begin a new process"
        )
    root, module = locate(source)
    manifest = function.manifest(f"{module}:{_attribute(function, source)}")
    left_out: list[str] = []
    models = _models(manifest)
    names = _names(root, source, models, function.include, left_out)
    contents = _read(manifest.name, {name: root / name for name in names})
    built = _finish(manifest, contents, _told(root, models, left_out))
    return replace(built, root=root, unpruned=None if (root / ignore.IGNORE_FILE).is_file() else root)


def locate(source: Path) -> tuple[Path, str]:
    """The directory to put on ``sys.path`` and the module's dotted name: packages are kept whole."""
    parts = [source.stem] if source.stem != "__init__" else []
    root = source.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    wrong = next((part for part in parts if not part.isidentifier()), None)
    if wrong is not None:
        raise InvalidBundle(f"{source}: {wrong!r} can be no module's name, so that it cannot be imported; rename it")
    _refuse_shadow(source, root, parts[0])
    return root, ".".join(parts)


def _refuse_shadow(source: Path, root: Path, name: str) -> None:
    """Raises ``InvalidBundle`` if a worker may know another module by the ``name`` of what stands in ``root``."""
    other = _other_module(root, name)
    if other:
        raise InvalidBundle(
            f"{source} is imported as {name!r}, but so is another module here ({other}); rename the file"
        )


def _other_module(root: Path, name: str) -> str:
    """Where another module of that name is; empty if there is none."""
    if name in sys.stdlib_module_names and name != "test":  # the interpreter's own tests, which nothing imports
        return "Python's own"
    sites = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    found = PathFinder.find_spec(name, sites)
    if found is None:
        return "of the workers" if name in (*OURS, *EXTRAS["worker"]) else ""
    places = [Path(place).resolve() for place in (found.origin, *(found.submodule_search_locations or ())) if place]
    if {root / f"{name}.py", root / name, root / name / "__init__.py"} & set(places):
        return ""  # it is installed from here
    return str(places[0]) if places else "installed"


def _attribute(function: ModelFunction[Any, Any, Any], source: Path) -> str:
    """The module-level name under which the worker will find it."""
    name = str(getattr(function.target, "__qualname__", function.__name__))
    line = function.target.__code__.co_firstlineno if inspect.isfunction(function.target) else 0
    where = f"{source.name}:{line}" if line else source.name
    if "<locals>" in name:
        raise InvalidBundle(
            f"{where}: {function.__name__} is defined inside another function, where the worker cannot "
            "import it; define it at the module's top level"
        )
    there = vars(sys.modules[function.__module__]) if function.__module__ in sys.modules else {name: function}
    same = [key for key, value in there.items() if getattr(value, TARGET_ATTRIBUTE, value) is function.target]
    if not same and "." not in name:
        raise InvalidBundle(f"{where}: {function.__name__} is not there any more once {source.name} is imported")
    return name if name in same or not same else same[0]


def _models(manifest: Manifest) -> tuple[Path, ...]:
    """Directories of the function's model and adapters, which travel by themselves."""
    places = (manifest.model or "", *manifest.adapters.values())
    return tuple(Path(place) for place in places if place and "://" not in place)


def _names(
    root: Path, source: Path, models: tuple[Path, ...], include: tuple[str, ...], outside: list[str]
) -> list[str]:
    if root in (_home(), Path(root.anchor)):
        raise InvalidBundle(
            f"{source} lies directly in {root}, all of which would be bundled; move it into a directory of its own"
        )
    names = _walked(root, models, include, outside)
    own = source.relative_to(root).as_posix()
    if own not in names:
        raise InvalidBundle(f"{own} itself is ignored by {root / ignore.IGNORE_FILE}; remove that pattern")
    _included(root, names, include)
    return names


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:  # who has none has nothing in it
        return None


def _walked(root: Path, models: tuple[Path, ...], include: tuple[str, ...], outside: list[str]) -> list[str]:
    """All below ``root`` that is not ignored, without the models there."""
    for pattern in include:
        ignore.spec_of(pattern)  # raises what is wrong with it, by its name
    inside = (model.relative_to(root) for model in models if model.is_relative_to(root) and model != root)
    also = tuple(f"/{name.as_posix()}/" for name in inside)
    names: list[str] = []
    for name in ignore.files(root, ignore.spec(root, also), outside, include):
        names.append(name)
        if len(names) > MAX_BUNDLE_FILES:
            raise InvalidBundle(
                f"more than {MAX_BUNDLE_FILES} files below {root}; list what is not needed in .sllmignore"
            )
    return names


def _included(root: Path, names: list[str], include: tuple[str, ...]) -> list[str]:
    """Those of ``names`` that ``include`` asks for. Raises ``InvalidBundle`` for a pattern that asks for none."""
    found: set[str] = set()
    for pattern in include:
        only = ignore.spec_of(pattern)
        asked = {name for name in names if only.match_file(name)}
        if not asked:
            raise InvalidBundle(f"include={pattern!r} matches no file below {root}; correct it or leave it out")
        found |= asked
    return sorted(found)


def _told(root: Path, models: tuple[Path, ...], left_out: list[str]) -> tuple[str, ...]:
    """Links that a person may miss: not that of a model, which travels by itself."""
    return tuple(name for name in left_out if Path(os.path.realpath(root / name)) not in models)


def _read(name: str, files: dict[str, Path]) -> dict[str, bytes]:
    """Their contents by the names that they have in the bundle. Raises ``BodyTooLarge`` before reading what is too
    much."""
    try:
        _check_size(name, {file: path.stat().st_size for file, path in files.items()})
        return {file: path.read_bytes() for file, path in files.items()}
    except OSError as error:
        raise InvalidBundle(
            f"{error.filename} cannot be read ({error.strerror}); list it in .sllmignore if a call does not need it"
        ) from error


def _check_size(name: str, sizes: dict[str, int]) -> None:
    total = sum(sizes.values())
    if total <= MAX_BUNDLE:
        return
    largest = sorted(sizes, key=lambda file: -sizes[file])[:3]
    named = ", ".join(f"{file} ({show_bytes(sizes[file])})" for file in largest)
    raise BodyTooLarge(
        f"bundle of {name} is {show_bytes(total)}, the limit is {show_bytes(MAX_BUNDLE)}; "
        f"largest: {named}. List what a call does not need in {ignore.IGNORE_FILE}; weights belong to model=…"
    )


def _finish(manifest: Manifest, contents: dict[str, bytes], left_out: tuple[str, ...] = ()) -> Bundle:
    data = pack(contents)
    _check_size(manifest.name, {"the zip": len(data)})
    return Bundle(manifest, data, f"sha256:{hashlib.sha256(data).hexdigest()}", tuple(sorted(contents)), left_out)


def pack(contents: dict[str, bytes]) -> bytes:
    """A zip that depends on nothing but names and contents: stored (zlib's output varies), sorted, without dates."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(contents):
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise InvalidBundle(f"the file name {name!r} is no UTF-8; rename it") from error
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            info.create_system = 3
            archive.writestr(info, contents[name])
    return buffer.getvalue()


def _of_main(function: ModelFunction[Any, Any, Any], source: Path | None) -> Bundle:
    manifest = function.manifest(PICKLE_ENTRY, python=f"{sys.version_info.major}.{sys.version_info.minor}")
    root = _root_of_main(source)
    modules = pickled.modules(root)
    pickle = pickled.dump(function, root, modules)
    files = {pickled.stored(name, file): file for name, file in modules.items()}
    if function.include:  # nothing else is looked for: a notebook may lie among anything
        names = _walked(root, _models(manifest), function.include, [])
        files |= {name: root / name for name in _included(root, names, function.include)}
    contents = _read(manifest.name, files) | {PICKLE_NAME: pickle}
    _check_size(manifest.name, {name: len(data) for name, data in contents.items()})
    return _finish(manifest, contents)


def _root_of_main(source: Path | None) -> Path:
    """Below which everything is the user's own: a module of a package (``python -m``) lies as deep as its name says."""
    if source is None:
        return Path.cwd()
    main = sys.modules["__main__"]
    is_whole = Path(getattr(main, "__file__", None) or "/").resolve() == source  # not run by a debugger or the like
    package = (main.__package__ or "") if is_whole else ""
    return source.parents[len(package.split(".")) if package else 0]

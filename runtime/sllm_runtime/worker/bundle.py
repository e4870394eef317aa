"""Unpacks a bundle and finds the user's object in it."""

from __future__ import annotations

import importlib
import os
import pickle
import stat
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import FunctionType, ModuleType
from typing import Any

from sllm_runtime.protocol.errors import InvalidBundle, PythonMismatch
from sllm_runtime.protocol.limits import MAX_BUNDLE, MAX_BUNDLE_FILES, MIB
from sllm_runtime.protocol.manifest import PICKLE_ENTRY, PICKLE_NAME, TARGET_ATTRIBUTE, Handler
from sllm_runtime.worker.own import users


def unpack(fd: int, target: Path) -> None:
    """Write the files of the zip behind ``fd`` below ``target``; closes ``fd``.

    Raises ``InvalidBundle`` before anything is written if a path leads outside, is no plain file, or all are too big.
    """
    with os.fdopen(fd, "rb") as file:
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise InvalidBundle(f"the bundle is no zip archive: {error}") from error
        with archive:
            entries = archive.infolist()
            _check(entries)
            for entry in entries:
                path = target / entry.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                if not entry.is_dir():
                    _write(archive, entry, path)


def _check(entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MAX_BUNDLE_FILES:
        raise InvalidBundle(f"the bundle has {len(entries)} files, the limit is {MAX_BUNDLE_FILES}")
    total = sum(entry.file_size for entry in entries)
    if total > MAX_BUNDLE:
        raise InvalidBundle(f"the bundle unpacks to {total} bytes, the limit is {MAX_BUNDLE}")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or "\0" in entry.filename:
            raise InvalidBundle(f"the bundle's file {entry.filename!r} leads out of its directory")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise InvalidBundle(f"the bundle's file {entry.filename!r} is a link or a special file")


def _write(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> None:
    left = entry.file_size
    try:
        with archive.open(entry) as source, path.open("xb") as target:
            while data := source.read(MIB):
                left -= len(data)
                if left < 0:
                    raise InvalidBundle(f"the bundle's file {entry.filename!r} is longer than it states")
                target.write(data)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise InvalidBundle(f"the bundle's file {entry.filename!r} cannot be unpacked: {error}") from error


def import_target(handler: Handler, directory: Path) -> tuple[Any, ModuleType | None]:
    """The user's own function or class, and its module (``None`` for a pickled one).

    Raises ``InvalidBundle`` or ``PythonMismatch`` naming what is not there, and whatever the user's import raises.
    """
    sys.path.insert(0, str(directory))
    sys.path_importer_cache.pop(str(directory), None)  # what was known of it; to forget of all there is takes 2 ms
    if handler.entry == PICKLE_ENTRY:
        return _unwrap(_unpickle(handler, directory / PICKLE_NAME)), None
    name, _, attribute = handler.entry.partition(":")
    with users():
        module = importlib.import_module(name)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise InvalidBundle(f"module {name} has no {attribute!r}; deploy again with the name it has now")
        target = getattr(target, part)
    target = _unwrap(target)
    if not callable(target):
        raise InvalidBundle(f"{handler.entry} is a {type(target).__name__}; deploy a function or a class")
    return target, module


def _unwrap(target: Any) -> Any:
    return getattr(target, TARGET_ATTRIBUTE, target)


def _unpickle(handler: Handler, path: Path) -> Any:
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    if handler.python not in (None, minor):
        raise PythonMismatch(
            f"the function was pickled under Python {handler.python} and this worker runs {minor}, whose byte code "
            "differs; put the function into a .py file, or deploy from the same Python"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidBundle(f"the bundle holds no {PICKLE_NAME}: {error.strerror}") from error
    with users():
        found = pickle.loads(data)
    _become_main(found)
    return found


def _become_main(target: Any) -> None:
    """What ``target`` uses of its ``__main__`` is found there, where pickle looks: it knows classes and functions by
    their names alone, and pools of processes hand them on by it."""
    main = ModuleType("__main__")
    for function in _functions(target):
        if function.__globals__.get("__name__") == "__main__":  # a decorator's are those of its own module
            for name, value in function.__globals__.items():
                if not name.startswith("__"):
                    setattr(main, name, value)
    if isinstance(target, type):
        setattr(main, target.__name__, target)
    sys.modules["__main__"] = main


def _functions(target: Any) -> Iterator[FunctionType]:
    """What ``target`` is made of, behind its decorators as well."""
    made = [each for kind in target.__mro__ for each in vars(kind).values()] if isinstance(target, type) else [target]
    seen: set[int] = set()  # of wrappers: one may wrap itself
    for each in made:
        while isinstance(each, FunctionType | staticmethod | classmethod) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, FunctionType):
                yield each
            each = getattr(each, "__wrapped__", None)

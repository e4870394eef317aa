"""Byte code for an image: its root is read-only, so that nothing could keep what an import has compiled."""

from __future__ import annotations

import importlib.util
import py_compile
from collections.abc import Mapping
from pathlib import Path


def compiled(files: Mapping[str, Path], scratch: Path) -> dict[str, Path]:
    """``files`` with byte code for each source among them, made in ``scratch`` (an empty directory). It is never
    compared with its source (PEP 552, unchecked): an image does not change. A file that is no valid Python goes
    without, as it would at its import."""
    found = {name: path for name, path in files.items() if not name.endswith(".pyc")}
    for number, (name, path) in enumerate(sorted(found.items())):
        if not name.endswith(".py"):
            continue
        target = scratch / f"{number}.pyc"
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        if py_compile.compile(str(path), str(target), dfile=f"/{name}", quiet=2, invalidation_mode=mode) is not None:
            found[importlib.util.cache_from_source(name)] = target
    return found

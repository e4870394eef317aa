"""The installed distributions that a worker needs: what ours asks for, and what those ask for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS: Final = "sllm"
EXTRAS: Final = ("worker", "cuda")
"""Those of ours that are for workers; what is not installed of them is left out."""
_LEFT_OUT: Final = ("torch/include/", "torch/test/", "torch/share/", "torch/bin/")
"""For who compiles against it: a third of its size."""
_NEEDED: Final = "torch/bin/torch_shm_manager"
"""``import torch`` looks for it."""


def inside() -> tuple[metadata.Distribution, ...]:
    """What a base has: ours, and its ``closure``."""
    return (*closure(), metadata.distribution(OURS))


def closure() -> tuple[metadata.Distribution, ...]:
    """What is installed of all that a worker may import, by name. Ours is not among them."""
    found: dict[str, metadata.Distribution] = {}
    asked: set[tuple[str, str]] = set()
    waiting = [(OURS, extra) for extra in ("", *EXTRAS)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in asked:
            continue
        asked.add((name, extra))
        try:
            distribution = found.setdefault(name, metadata.distribution(name))
        except metadata.PackageNotFoundError:
            continue
        waiting += _requires(distribution, extra)
    return tuple(found[name] for name in sorted(found) if name != OURS)


def _requires(distribution: metadata.Distribution, extra: str) -> Iterator[tuple[str, str]]:
    for line in distribution.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            for each in ("", *sorted(wanted.extras)):
                yield canonicalize_name(wanted.name), each


def files_of(distribution: metadata.Distribution, target: str) -> Iterator[tuple[str, Path]]:
    """Its files with their paths below ``target``; scripts, and what only compilers read, are left out."""
    for file in distribution.files or ():
        name = file.as_posix()
        if name.startswith("../") or (name.startswith(_LEFT_OUT) and name != _NEEDED):
            continue
        path = Path(str(distribution.locate_file(file)))
        if path.is_file():
            yield f"{target}/{name}", path


def identity(distribution: metadata.Distribution) -> str:
    """Name, version, and a digest of its RECORD, which has one of each of its files."""
    record = hashlib.sha256((distribution.read_text("RECORD") or "").encode()).hexdigest()
    return f"{canonicalize_name(distribution.name)}=={distribution.version} {record}"


def pins() -> tuple[str, ...]:
    """What a base has, as constraints: ``name==version`` without a local label, which no index knows."""
    return tuple(f"{canonicalize_name(d.name)}=={d.version.partition('+')[0]}" for d in inside())

"""Whether files that are replaced while daemons run (certificates, tokens) are others than before."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, int, int] | None
"""Number, time and size of a file; None of none."""


def stamps(*paths: Path | None) -> tuple[Stamp, ...]:
    """Of each, to be compared with those of another time."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path | None) -> Stamp:
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)

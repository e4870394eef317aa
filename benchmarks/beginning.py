"""Runs that all begin alike: each on a copy of a stopped platform's home."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

from benchmarks import page_cache

WEIGHTS: Final = ".bin"
"""How files of weights end, which nobody changes."""


def copy(home: Path, target: Path) -> None:
    """Files of weights are the same ones, with the access times (which say what goes first from an SSD) of the
    beginning."""
    shutil.copytree(home, target, ignore=_sockets, copy_function=_copied)


def drop_copies(home: Path) -> None:
    """No page of the copies on the SSDs of a home stays cached; to look for them is no use of them. Raises
    ``ProgramFailed``."""
    for file in home.rglob(f"ssd/*{WEIGHTS}"):
        before = file.stat()
        page_cache.drop(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _sockets(directory: str, names: list[str]) -> set[str]:
    return {name for name in names if stat.S_ISSOCK(os.lstat(Path(directory, name)).st_mode)}


def _copied(source: str, target: str) -> None:
    if not source.endswith(WEIGHTS):
        shutil.copy2(source, target)
        return
    os.link(source, target)
    written = os.stat(target).st_mtime_ns
    os.utime(target, ns=(written, written))

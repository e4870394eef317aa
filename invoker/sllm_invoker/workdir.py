"""A directory for each sandbox alone, removed with it; what a killed life left is removed at the next start.

What a function leaves in its directory must not keep a node from its next start: modes that forbid their owner to
remove, and trees deeper than this program's stack. No symbolic link is followed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE: Final = 0o700


class Workdirs:
    """The work directories of one node, below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def reset(self) -> None:
        """Remove all; called before the first instance. What cannot be removed is logged, and stays."""
        remove(self._root)
        self._root.mkdir(parents=True, mode=_MODE, exist_ok=True)

    def make(self, instance: str) -> Path:
        """A new, empty directory of mode 0700."""
        path = self._root / instance
        path.mkdir(mode=_MODE)
        return path

    async def remove(self, path: Path) -> None:
        """Remove ``path`` and all in it; what cannot be removed is logged."""
        await asyncio.to_thread(remove, path)


def remove(path: Path) -> None:
    """Remove the directory ``path``, if it is there, and all in it; what cannot be removed is logged."""
    try:
        with _opened(str(path)) as top:
            waiting = _emptied(top, top, path)
            while waiting:
                name = waiting.pop()
                try:
                    with _opened(name, top) as inner:
                        waiting += _emptied(inner, top, path)
                    os.rmdir(name, dir_fd=top)
                except OSError as error:
                    _stays(path / name, error)
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _stays(path, error)


def _emptied(directory: int, top: int, path: Path) -> list[str]:
    """Remove the files of ``directory``. Its directories are moved up to ``top`` (which is ``path``), so that their
    depth costs neither stack nor descriptors; their names there."""
    found = []
    with os.scandir(directory) as listing:
        entries = list(listing)
    for entry in entries:
        try:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=directory)
            elif directory == top:
                found.append(entry.name)
            else:
                found.append(_moved_up(entry.name, directory, top))
        except OSError as error:
            _stays(path / entry.name, error)
    return found


def _moved_up(name: str, directory: int, top: int) -> str:
    unique = uuid.uuid4().hex
    with _opened(name, directory):  # only one that may be written to can be moved
        os.rename(name, unique, src_dir_fd=directory, dst_dir_fd=top)
    return unique


@contextmanager
def _opened(name: str, parent: int | None = None) -> Iterator[int]:
    """A directory's descriptor, once its owner may list and change it. Raises ``OSError`` for what is none."""
    handle = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)  # needs no right to what it leads to
    try:
        os.chmod(f"/proc/self/fd/{handle}", _MODE)
        fd = os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield fd
    finally:
        os.close(fd)


def _stays(path: Path, error: OSError) -> None:
    log.warning("%s cannot be removed: %s", path, error.strerror)

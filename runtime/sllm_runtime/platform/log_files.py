"""Files that daemons write their stdout and stderr to: two of each at most, whoever writes and for however long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import IO, Final

from sllm_runtime.protocol.limits import LEAST_FREE

log = logging.getLogger(__name__)

ROTATE_AT: Final = 16 * 2**20
"""Bytes above which a log is put aside as ``<name>.1``, in place of the one before."""
EVERY_S: Final = 5.0
"""How often the size of the logs of running processes is looked at."""
_PIECE: Final = 2**20


def open_log(path: Path) -> IO[bytes]:
    """For a process that is about to start. Appends, so that what ``rotate`` empties is written from its beginning."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > ROTATE_AT:
            path.replace(_aside(path))
    return open(path, "ab", buffering=0)


async def keep_short(paths: Collection[Path]) -> None:
    """Rotate the logs of processes that run for long, until cancelled."""
    told = set[Path]()
    while True:
        await asyncio.sleep(EVERY_S)
        for path in paths:
            try:
                await asyncio.to_thread(rotate, path)
                told.discard(path)
            except OSError as error:  # a full disk, say, of which others complain louder
                if path not in told:
                    log.warning("the log %s cannot be rotated, and grows: %s", path, error)
                told.add(path)


def rotate(path: Path) -> bool:
    """Put a log aside that a running process writes to, if it is larger than ROTATE_AT; whether it was.

    The process keeps its descriptor, so the file is copied and then emptied: a line that is written in the moment
    between the two is lost. Where the disk has no room for both its end alone is kept, in its place: what is left is
    the state's, and so is what it would take as it grows. Raises ``OSError``.
    """
    if not path.exists() or (size := path.stat().st_size) <= ROTATE_AT:
        return False
    new = path.with_name(path.name + ".new")
    if _lacks(path, size):
        for stale in (_aside(path), new):  # they go anyway
            stale.unlink(missing_ok=True)
        if _lacks(path, size):
            _shorten(path)
            return True
    with open(path, "r+b", buffering=0) as file:
        with open(new, "wb", buffering=0) as copy:
            while data := file.read(_PIECE):  # to the end it has by then, not the one it had
                copy.write(data)
        file.truncate(0)
        new.replace(_aside(path))
    return True


def _shorten(path: Path) -> None:
    """Takes no room of the disk."""
    with open(path, "a+b", buffering=0) as file:
        file.seek(-min(_PIECE, file.seek(0, os.SEEK_END)), os.SEEK_END)
        end = file.read(_PIECE)
        file.truncate(0)
        file.write(end)
    log.warning("all but the end of the log %s is lost: its disk has no room for more", path)


def _lacks(path: Path, size: int) -> bool:
    return shutil.disk_usage(path.parent).free < size + LEAST_FREE


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".1")

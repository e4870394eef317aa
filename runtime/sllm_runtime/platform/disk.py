"""Room on the disk that the state lies on: what is too little, in words, and a server that has given up for want of it.

nats-server never writes again to a stream that one write failed on (ENOSPC), however much space there is afterwards;
started again, it has all that was acknowledged, and writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import LEAST_FILES, LEAST_FREE, MIB
from sllm_runtime.protocol.quantities import show_bytes

log = logging.getLogger(__name__)

_FULL: Final = MIB
"""Below it a write of the server may have failed: its log, on the same disk, need not have room to say so."""
LOOK_S: Final = 1.0
"""A disk that is full for less than this may go unnoticed, unless the server says that a write failed."""
_FAILED: Final = (b"no space left on device", b"critical write error")
_LONGEST_LOG: Final = MIB


def free(directory: Path) -> int:
    """Bytes that may be written below ``directory``, which need not be there yet. Raises ``OSError``."""
    found = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(found).free


def files_left(directory: Path) -> int | None:
    """New files that may be made below ``directory``; None where its file system sets no limit. Raises ``OSError``."""
    found = os.statvfs(next(path for path in (directory, *directory.parents) if path.exists()))
    return found.f_favail if found.f_files else None


def shortage(directory: Path | None) -> str:
    """Why nothing new can be stored in ``directory`` now, and what to do; empty: it can, or it lies elsewhere."""
    if directory is None:
        return ""
    try:
        left, files = free(directory), files_left(directory)
    except OSError as error:
        return f"the disk of {directory} cannot be read: {error}"
    if left >= LEAST_FREE and files is not None and files < LEAST_FILES:
        return (
            f"the disk of {directory} has room for {files} more files (inodes), the state needs {LEAST_FILES};"
            " remove some files, the platform then goes on by itself"
        )
    if left >= LEAST_FREE:
        return ""
    return (
        f"the disk of {directory} is full: {show_bytes(left)} free, the state needs {show_bytes(LEAST_FREE)};"
        " free some space, the platform then goes on by itself"
    )


def require_room(directory: Path | None) -> None:
    """Raises ``Unavailable`` that names the disk and what is free on it."""
    if problem := shortage(directory):
        raise Unavailable(problem)


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """The least time between two restarts: ``first_s``, doubling up to ``longest_s``, anew after ``calm_s`` without."""

    first_s: float = 2.0
    longest_s: float = 60.0
    calm_s: float = 300.0

    def next(self, pause: float, since: float) -> float:
        """Seconds to keep after a restart that came ``since`` seconds after the one before, which kept ``pause``."""
        return self.first_s if not pause or since > self.calm_s else min(self.longest_s, 2 * pause)


class DiskWatch:
    """Restarts the embedded server when there is space again after one of its writes failed. ``await run()``."""

    def __init__(
        self,
        directory: Path,
        log_file: Path,
        restart: Callable[[], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
        space: Callable[[Path], int] = free,
        files: Callable[[Path], int | None] = files_left,
    ) -> None:
        self._directory, self._log_file, self._restart = directory, log_file, restart
        self._pauses = Pauses()
        self._clock, self._space, self._files = clock, space, files
        self._read_to = _size(log_file)
        self._suspect = False
        self._pause, self._last = 0.0, float("-inf")

    async def run(self) -> None:
        """Look every second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except OSError as error:
                log.warning("the disk of %s cannot be looked at: %s", self._directory, error)

    async def look(self) -> bool:
        """One look; whether the server was restarted. Raises ``OSError``."""
        left, failed = self._space(self._directory), self._log_says_failed()
        if (failed or left < _FULL) and not self._suspect:
            self._suspect = True
            log.error("NATS cannot write to the disk of %s (%s free)", self._directory, show_bytes(left))
        now = self._clock()
        files = self._files(self._directory)
        if files is not None and files < LEAST_FILES:  # it could make none of those that it needs, and end
            return False
        if not self._suspect or left < LEAST_FREE or now - self._last < self._pause:
            return False
        self._pause, self._last = self._pauses.next(self._pause, now - self._last), now
        log.warning("the disk of %s has %s free again: NATS is restarted", self._directory, show_bytes(left))
        await self._restart()
        self._read_to = _size(self._log_file)
        self._suspect = False
        return True

    def _log_says_failed(self) -> bool:
        """Whether the server wrote of a failed write since the last look."""
        size = _size(self._log_file)
        begin, self._read_to = (self._read_to if size >= self._read_to else 0), size  # smaller: it was put aside
        if size == begin:
            return False
        with self._log_file.open("rb") as file:
            file.seek(max(begin, size - _LONGEST_LOG))
            text = file.read(_LONGEST_LOG)
        return any(word in text for word in _FAILED)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

"""How fast the disk is, found before the first load: some of what lies there is read as loads read it, and behind them.
Nothing of it is kept, neither in the pool nor in the page cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sllm_loaderd.paths import Paths
from sllm_loaderd.task import Task
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import DISK, PRIORITIES

MOST: Final = 64 * MIB
"""Bytes that are read: 60 ms of a disk of 1 GB/s."""
LEAST: Final = 4 * MIB
"""A file that is smaller says little."""
_PIECE: Final = 4 * MIB


class ProbeRead(Task):
    """``nbytes`` of ``file`` into memory that nobody looks at."""

    def __init__(self, number: int, file: Path, nbytes: int, memory: mmap.mmap) -> None:
        super().__init__(number, nbytes, (DISK,), _ended)
        self._file, self._memory = file, memory

    def run(self, path: str) -> None:
        """Raises ``Unavailable`` where the file cannot be read direct; then the disk counts as never measured."""
        try:
            fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            raise Unavailable(f"{self._file} cannot be read direct: {error.strerror}") from error
        try:
            with memoryview(self._memory)[: self.nbytes] as view:
                if os.preadv(fd, [view], self.number * _PIECE) != self.nbytes:
                    raise Unavailable(f"{self._file} is shorter than it was")
        except OSError as error:
            raise Unavailable(f"{self._file} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)


def probe(files: Iterable[Path], paths: Paths) -> int:
    """Have the largest of ``files`` read, if the disk was not measured yet; how many bytes will be. Blocking."""
    if any(status.path == DISK and status.bandwidth for status in paths.status()):
        return 0
    nbytes, file = max(_sizes(files), default=(0, Path()))
    if nbytes < LEAST:
        return 0
    pieces = min(nbytes, MOST) // _PIECE
    memory = mmap.mmap(-1, _PIECE)
    memory.write(bytes(_PIECE))  # its pages are there before the clock runs; all reads may share them
    paths.put([ProbeRead(number, file, _PIECE, memory) for number in range(pieces)], len(PRIORITIES) - 1)
    return pieces * _PIECE


def _sizes(files: Iterable[Path]) -> Iterable[tuple[int, Path]]:
    for file in files:
        try:
            yield file.stat().st_size, file
        except OSError:  # it has just gone
            continue


def _ended(task: Task, error: SllmError | None) -> None:
    """The queue has measured what came; a read that failed counts for nothing."""

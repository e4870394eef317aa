"""How fast the disk and the stores of models are, found before the first load: some of what lies there is read as loads
read it, and behind them. Nothing of it is kept, neither in the pool nor in the page cache."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Final

from sllm_loaderd.chunk import close_chunk, create_chunk, fault
from sllm_loaderd.paths import Paths
from sllm_loaderd.reader import ByteSource
from sllm_loaderd.task import Task
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import DISK, PRIORITIES

READS: Final = 8
"""Times that a disk is read from, since it may be slow or fast for some tenths of a second; each time another part of
the file, which nothing on its way has kept."""
MOST: Final = 32 * MIB
"""Bytes that are read each time: 30 ms of a disk of 1 GB/s."""
LEAST: Final = 4 * MIB
"""A file that is smaller says little."""
_PIECE: Final = 4 * MIB
STORE_S: Final = 0.25
"""No more is read of a store after this: one that is slow, or that many nodes ask at once, is measured by less."""
MOST_OF_STORE: Final = 16 * MIB
_STORE_PIECE: Final = MIB
MOST_STORES: Final = 8
"""Stores that are measured at a time; of further ones the first load finds it out."""


class Piece:
    """Memory for a piece of a file, made as the pool's chunks are (``huge``: as there), with its pages: into small ones
    a disk may give half of what it gives into huge ones. It goes with the last read that has it. Raises ``OSError``."""

    def __init__(self, *, huge: bool) -> None:
        chunk = create_chunk(_PIECE, huge=huge, lasting=False)
        weakref.finalize(self, close_chunk, chunk)
        fault(chunk, huge=huge)
        self.view = chunk.view


class ProbeRead(Task):
    """``nbytes`` of ``file`` into memory that nobody looks at."""

    def __init__(
        self,
        number: int,
        file: Path,
        nbytes: int,
        memory: Piece,
        turn: int,
        done: Callable[[Task, SllmError | None], None],
    ) -> None:
        super().__init__(number, nbytes, (DISK,), done)
        self._file, self._memory, self.probe = file, memory, turn

    def run(self, path: str) -> None:
        """Raises ``Unavailable`` where the file cannot be read direct; then the disk counts as never measured."""
        try:
            fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            raise Unavailable(f"{self._file} cannot be read direct: {error.strerror}") from error
        try:
            with self._memory.view[: self.nbytes] as view:
                if os.preadv(fd, [view], self.number * _PIECE) != self.nbytes:
                    raise Unavailable(f"{self._file} is shorter than it was")
        except OSError as error:
            raise Unavailable(f"{self._file} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)


def unmeasured(files: Iterable[Path], paths: Paths) -> tuple[int, Path] | None:
    """The largest of ``files`` and its bytes, if it says something of the disk, and no load has. Blocking."""
    known = any(status.path == DISK and status.bandwidth for status in paths.status())
    return None if known else _largest(files)


def probe(
    files: Iterable[Path], paths: Paths, on_end: Callable[[], None], turn: int = 0, *, huge: bool = False
) -> list[ProbeRead]:
    """Have what is ``unmeasured`` of ``files`` read: the reads, for ``Paths.cancel``. Blocking. ``turn``: which of
    READS it is, from 0; in those after the first it is measured. ``huge``: see ``Piece``. Raises ``OSError`` where
    there is no memory.

    ``on_end`` is called when the last of them was done, in the thread of the path; never where ``paths`` closes before.
    """
    found = _largest(files) if turn else unmeasured(files, paths)
    if found is None:
        return []
    nbytes, file = found
    there, pieces = nbytes // _PIECE, min(nbytes, MOST) // _PIECE
    # Of each read its own, as loads have it: what is overwritten again and again never leaves the processor's cache,
    # and a disk whose bytes a processor copies (a virtual one) seems a fifth faster than it is.
    memory = [Piece(huge=huge) for _ in range(pieces)]
    left = count(pieces - 1, -1)

    def ended(task: Task, error: SllmError | None) -> None:
        """The queue has measured what came (of a read that failed nothing)."""
        if next(left) == 0:
            on_end()

    numbers = ((turn * pieces + number) % there for number in range(pieces))
    reads = [ProbeRead(number, file, _PIECE, piece, turn, ended) for number, piece in zip(numbers, memory, strict=True)]
    paths.put(reads, len(PRIORITIES) - 1)
    return reads


class StoreRead(Task):
    """A piece of ``source`` into memory that nobody looks at, unless the first one of ``pieces`` began long ago."""

    def __init__(
        self, number: int, source: ByteSource, memory: mmap.mmap, began: list[float], clock: Callable[[], float]
    ) -> None:
        super().__init__(number, _STORE_PIECE, (source.path,), lambda task, error: None)  # the queue has measured it
        self._source, self._memory, self._began, self._clock = source, memory, began, clock

    def run(self, path: str) -> None:
        """Raises ``Unavailable`` when it is measured, and what the source raises; neither counts."""
        self._began.append(self._clock())
        if self._began[-1] - self._began[0] > STORE_S:
            raise Unavailable(f"{path} is measured")
        with memoryview(self._memory)[: self.nbytes] as view:
            self._source.read(view, self.number * _STORE_PIECE)


def probe_stores(sources: Iterable[ByteSource], paths: Paths, clock: Callable[[], float] = time.monotonic) -> list[str]:
    """Have a large object of each store read whose path was neither measured yet nor is being used; the paths that will
    be. The first read of each makes its connections."""
    known = {status.path for status in paths.status() if status.bandwidth or any(status.queued.values())}
    found: dict[str, ByteSource] = {}
    for source in sorted(sources, key=lambda source: -source.nbytes):
        if source.path not in known and source.nbytes >= LEAST and len(found) < MOST_STORES:
            found.setdefault(source.path, source)
    for source in found.values():
        paths.put(_pieces(source, clock), len(PRIORITIES) - 1)
    return list(found)


def _pieces(source: ByteSource, clock: Callable[[], float]) -> Sequence[StoreRead]:
    memory, began = mmap.mmap(-1, _STORE_PIECE), list[float]()
    memory.write(bytes(_STORE_PIECE))
    pieces = min(source.nbytes, MOST_OF_STORE) // _STORE_PIECE
    return [StoreRead(number, source, memory, began, clock) for number in range(pieces)]


def _largest(files: Iterable[Path]) -> tuple[int, Path] | None:
    largest = max(_sizes(files), default=(0, Path()))
    return largest if largest[0] >= LEAST else None


def _sizes(files: Iterable[Path]) -> Iterable[tuple[int, Path]]:
    for file in files:
        try:
            yield file.stat().st_size, file
        except OSError:  # it has just gone
            continue

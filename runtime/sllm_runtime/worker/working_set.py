"""The pages that starts touch, so that a warm worker has them before its own start begins.

A forked worker shares its memory with the fork server, page by page. The first touch of each is a fault, and of most a
copy, since Python counts references in its objects: 4,000 faults in a start from memory, half of its processor time.
Which pages these are hardly differs from one function to the next. So they are recorded of the first starts, and a
worker that waits in the pool takes them while nobody waits for it (REAP: Ustiugov et al., ASPLOS 2021, section 5, of
snapshots of virtual machines). Linux only; where its ``pagemap`` or ``MADV_POPULATE_*`` (5.14) is not there, nothing
is taken.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

LOOKS: Final = 6
"""Starts that are recorded in any case, the two rehearsed ones among them; from then on the 8th, 16th and so on, since
the first may all be of one function, and a look takes the fork server some 10 ms."""
MOST: Final = 32 * 2**20
"""Bytes that a worker copies at most, whatever functions did."""
_PAGE: Final = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_PRESENT, _FILE, _ALONE = 63, 61, 56
_LARGEST: Final = 2**32
"""Bytes of a mapping that is looked at: larger ones are address space that something has set aside."""
_NEAR: Final = 16
"""Pages of a file that lie no further apart are mapped in one go: the kernel maps so many around each by itself."""
_ROUND: Final = 32
"""Ranges between two looks at whether somebody waits: about 0.3 ms."""
_MAPPED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r(.).p \S+ \S+ \d+ *(\[v)?", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Pages:
    """Bytes from ``address`` on, whole pages; ``copied`` or only mapped."""

    address: int
    nbytes: int
    copied: bool


class WorkingSet:
    """What children of this process had of its memory for themselves soon after they had started."""

    def __init__(self) -> None:
        self._copied: Any = np.empty(0, np.int64)
        self._mapped: Any = np.empty(0, np.int64)
        self._starts = 0
        self.pages: tuple[Pages, ...] = ()
        """For ``take``."""

    def look(self, pid: int) -> None:
        """Record what the child ``pid`` has, which has started, and may have run its first call; not of each. Nothing
        if it has gone, or if this kernel does not say."""
        self._starts += 1
        if self._starts > LOOKS and self._starts & (self._starts - 1):
            return
        try:
            copied, mapped = _touched(pid)
        except OSError:
            self._starts -= 1  # the next one instead
            return
        copied = np.union1d(self._copied, copied)
        if copied.size * _PAGE > MOST:  # a function that goes through all memory says nothing of others
            return
        self._copied, self._mapped = copied, np.union1d(self._mapped, mapped)
        self.pages = (*_ranges(self._copied, 1, copied=True), *_ranges(self._mapped, _NEAR, copied=False))


def take(pages: Sequence[Pages], wanted: Callable[[], bool]) -> None:
    """Copy or map ``pages`` into this process, in which they say what they said. Ends early once ``wanted()``."""
    for at in range(0, len(pages), _ROUND):
        if wanted():
            return
        for each in pages[at : at + _ROUND]:
            advice = _POPULATE_WRITE if each.copied else _POPULATE_READ
            # What is not mapped any more, and a kernel that does not know this, are refused: nothing is lost by it.
            _libc.madvise(ctypes.c_void_p(each.address), ctypes.c_size_t(each.nbytes), advice)


def _touched(pid: int) -> tuple[Any, Any]:
    """Numbers of the pages of this process's private mappings that the child has copied, and that it has of files.
    Raises ``OSError``."""
    copied, mapped = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start, stop, writable in _mappings():
            first, count = start // _PAGE, (stop - start) // _PAGE
            entries = np.frombuffer(os.pread(fd, count * 8, first * 8), np.uint64)
            there, file, alone = ((entries >> np.uint64(bit)) & np.uint64(1) == 1 for bit in (_PRESENT, _FILE, _ALONE))
            mapped.append(first + np.flatnonzero(there & file))
            if writable:
                copied.append(first + np.flatnonzero(there & ~file & alone))
    finally:
        os.close(fd)
    return np.concatenate(copied), np.concatenate(mapped)


def _mappings() -> Iterator[tuple[int, int, bool]]:
    """Start, end and whether it can be written to, of each private mapping of this process that can be read."""
    with open("/proc/self/maps", "rb") as file:
        for start, stop, writable, kernels in _MAPPED.findall(file.read()):
            first, last = int(start, 16), int(stop, 16)
            if not kernels and last - first <= _LARGEST:
                yield first, last, writable == b"w"


def _ranges(numbers: Any, near: int, *, copied: bool) -> Iterator[Pages]:
    """Sorted page ``numbers`` as ranges; those closer than ``near`` are one."""
    if not numbers.size:
        return
    ends = np.flatnonzero(np.diff(numbers) > near)
    for first, last in zip(numbers[np.r_[0, ends + 1]], numbers[np.r_[ends, -1]], strict=True):
        yield Pages(int(first) * _PAGE, int(last - first + 1) * _PAGE, copied)

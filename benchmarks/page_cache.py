"""The page cache as a benchmark needs it: dropped, proven empty, gone round by direct reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.programs import ProgramFailed

_PROT_READ, _MAP_SHARED = 1, 1
_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
SETTLE_S: Final = 10.0
_LOOK_S: Final = 0.01
_HUGE_PAGE: Final = 2 * 2**20
BELOW: Final = (4, 2**22)
"""Threads and bytes of a read that is not counted."""


def cached_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache now (mincore of a mapping that touches nothing)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        address = _libc.mmap(None, size, _PROT_READ, _MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"mmap of {path}")
    try:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if _libc.mincore(address, size, pages):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        return sum(byte & 1 for byte in pages.raw[: -(-size // mmap.PAGESIZE)]) * mmap.PAGESIZE
    finally:
        _libc.munmap(address, size)


def drop(path: Path, settle_s: float = SETTLE_S) -> None:
    """Take the file out of the page cache. Raises ``ProgramFailed`` if any of it is still there after ``settle_s``.

    It may take some tries: a program that has said its result may not have ended yet and has the file mapped until
    then, and what the kernel reads ahead can be taken out when it is there.
    """
    until = time.monotonic() + settle_s
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while left := cached_bytes(path):
            if time.monotonic() >= until:
                raise ProgramFailed(f"{left} bytes of {path} are still in the page cache: somebody has it mapped")
            time.sleep(_LOOK_S)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def empty(file: Path, *, primed: bool = True) -> None:
    """Nothing of it in the page cache. ``primed``: it is read past that once before: what lies below this machine's
    disk (a host, a controller) may keep what was read, and then has it for whoever is next, not only for who follows a
    neighbour."""
    drop(file)
    if primed:
        direct_read(file, *BELOW)
        drop(file)


@dataclass(frozen=True)
class DiskRead:
    """One read of a whole file past the page cache. ``mib``: of buffers, if they are known."""

    seconds: float
    cpu_s: float
    mib: float | None = None


def direct_read(path: Path, threads: int, block: int) -> DiskRead:
    """A bare direct read, ``block`` bytes at a time by so many threads, into memory that is there already.

    Its pages have 2 MiB where the kernel gives such ones: of 4 KiB pages a disk request takes few, which halves what
    some disks give. Raises ``OSError`` where the filesystem has no direct I/O.
    """
    size = path.stat().st_size
    offsets, lock = iter(range(0, size, block)), threading.Lock()
    buffers = [_huge_buffer(block) for _ in range(threads)]
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work(buffer: memoryview) -> int:
        return sum(os.preadv(fd, [buffer], offset) for offset in _shared(offsets, lock))

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: None, range(threads)))
            began, used = time.perf_counter(), time.process_time()
            got = sum(pool.map(work, buffers))
            took, used = time.perf_counter() - began, time.process_time() - used
    finally:
        os.close(fd)
    if got != size:
        raise ProgramFailed(f"direct reads of {path} brought {got} of {size} bytes")
    return DiskRead(took, used, threads * block / 2**20)


def _huge_buffer(size: int) -> memoryview:
    """``size`` bytes at a border of 2 MiB, in huge pages where the kernel gives them, all in place."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(len(memory)))
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    return memoryview(memory)[first : first + size]


def _shared(offsets: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            offset = next(offsets, None)
        if offset is None:
            return
        yield offset

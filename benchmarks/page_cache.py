"""The page cache as a benchmark needs it: dropped, proven empty, gone round by direct reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def direct_read_s(path: Path, threads: int, block: int) -> float:
    """Seconds to read the file by direct I/O into memory that is there already. Raises ``OSError`` where the
    filesystem has no direct I/O."""
    size = path.stat().st_size
    offsets = iter(range(0, size, block))
    lock = threading.Lock()
    buffers = [mmap.mmap(-1, block) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(bytes(block))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work(buffer: mmap.mmap) -> int:
        done = 0
        for offset in _shared(offsets, lock):
            done += os.preadv(fd, [buffer], offset)
        return done

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: None, range(threads)))
            began = time.perf_counter()
            got = sum(pool.map(work, buffers))
            took = time.perf_counter() - began
    finally:
        os.close(fd)
        for buffer in buffers:
            buffer.close()
    if got != size:
        raise ProgramFailed(f"direct reads of {path} brought {got} of {size} bytes")
    return took


def _shared(offsets: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            offset = next(offsets, None)
        if offset is None:
            return
        yield offset

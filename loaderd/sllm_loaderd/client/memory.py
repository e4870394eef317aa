"""Memory mappings that Python's mmap module cannot make: fixed places, populate, no duplicate descriptor.

Linux only. The calls go through ctypes, which gives up the GIL for their duration.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Final

PROT_NONE: Final = 0
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
MADV_HUGEPAGE: Final = 14
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
MADV_COLLAPSE: Final = 25
HUGE_PAGE: Final = 2 * 2**20
"""Chunks are mapped at these borders, so that the kernel can use huge pages for them."""

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    )  # fmt: skip
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED: Final = ctypes.c_void_p(-1).value


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    result: int | None = _libc.mmap(address, size, protection, flags, fd, 0)
    if result is None or result == _FAILED:
        raise _error("mmap")
    return result


def map_shared(fd: int, size: int) -> int:
    """Map ``fd`` shared and writable; the address. Raises ``OSError``."""
    return _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)


def map_shared_huge(fd: int, size: int) -> int:
    """As ``map_shared``, at a 2 MiB border, for pages of 2 MiB where the kernel has them (``shmem_enabled``)."""
    address = reserve(size)
    _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)
    advise(address, size, MADV_HUGEPAGE)
    return address


def map_readable(fd: int, size: int) -> int:
    """Map ``fd`` shared and read-only; the address. Raises ``OSError``."""
    return _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd)


def reserve(size: int) -> int:
    """Set aside ``size`` bytes of address space that nothing may touch yet, from a 2 MiB border on."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    start = _mmap(None, size + HUGE_PAGE, PROT_NONE, flags, -1)
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    if first > start:
        unmap(start, first - start)
    if (rest := start + HUGE_PAGE - first) > 0:
        unmap(first + size, rest)
    return first


def map_private(address: int, fd: int, size: int) -> None:
    """Map ``fd`` at exactly ``address``, writable but private: a page that is written becomes the writer's own."""
    _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED, fd)


def unmap(address: int, size: int) -> None:
    """Give back a mapping. Raises ``OSError``."""
    if _libc.munmap(address, size):
        raise _error("munmap")


def advise(address: int, size: int, advice: int) -> bool:
    """``madvise``; False where this kernel does not know the advice."""
    if not _libc.madvise(address, size, advice):
        return True
    if ctypes.get_errno() in (22, 38):  # EINVAL, ENOSYS: an old kernel; pages then come one by one
        return False
    raise _error("madvise")


def view(address: int, size: int) -> memoryview:
    """The bytes at ``address``; valid only as long as the mapping is."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    """Where the bytes of ``view`` are; it has to be of a writable kind, whatever the pages behind it allow."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))

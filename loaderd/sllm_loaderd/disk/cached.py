"""What of a file the page cache already has: asked with ``cachestat`` (Linux 6.5), which reads and maps nothing."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

_CACHESTAT: Final = 451
"""The same number on every architecture."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def cached_bytes(fd: int, offset: int, nbytes: int) -> int:
    """Bytes of ``[offset, offset + nbytes)`` in the page cache, by whole pages; 0 where the kernel cannot say."""
    if _libc is None or not nbytes:
        return 0
    span, found = _Range(offset, nbytes), _Stat()
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(found), 0):
        return 0
    return min(int(found.cache) * _PAGE, nbytes)

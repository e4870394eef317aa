"""One partition on its way to the SSD tier: chunks in any order, by several threads, direct where that is possible."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from sllm_loaderd.disk.local import address_of
from sllm_runtime.protocol.checkpoint import BLOCK_ALIGN, chunk_count
from sllm_runtime.protocol.errors import InternalError


class CopyWrite:
    """Writes ``partial``, which has its ``nbytes`` allocated. Ends once, by ``finish`` or ``abandon``.

    ``ended(whole)`` is called then, after the bytes are durable.
    """

    def __init__(self, partial: Path, nbytes: int, chunk_bytes: int, ended: Callable[[bool], None]) -> None:
        self._nbytes = nbytes
        self._chunk_bytes = chunk_bytes
        self._ended = ended
        self._missing = set(range(chunk_count(nbytes, chunk_bytes)))
        self._lock = threading.Lock()
        self._over = False
        self._partial = partial
        self._fd = os.open(partial, os.O_WRONLY | os.O_CLOEXEC)
        self._direct = _open_direct(partial)

    def write(self, number: int, view: memoryview) -> None:
        """Write chunk ``number`` whole. Raises ``OSError``: the copy can only be abandoned then."""
        start = number * self._chunk_bytes
        if len(view) != min(self._chunk_bytes, self._nbytes - start):
            raise InternalError(f"chunk {number} of {self._partial.name} was given {len(view)} bytes")
        aligned = not (start | len(view) | address_of(view)) % BLOCK_ALIGN
        fd = self._fd if self._direct is None or not aligned else self._direct
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], start + done)
        with self._lock:
            self._missing.discard(number)

    def finish(self) -> None:
        """All chunks are written: make the copy durable and visible. What fails leaves no copy."""
        with self._lock:
            missing = len(self._missing)
        if missing:
            self.abandon()
            raise InternalError(f"{missing} chunks of {self._partial.name} were not written")
        try:
            os.fsync(self._fd)
        except OSError:
            self.abandon()
            raise
        self._end(whole=True)

    def abandon(self) -> None:
        """Leave nothing of it; repeatable."""
        self._end(whole=False)

    def _end(self, *, whole: bool) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)
        self._ended(whole)


def _open_direct(path: Path) -> int | None:
    """For writes that leave the page cache to those who need it; None where the file system has no direct I/O."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None

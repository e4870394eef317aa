"""A local file, read by direct I/O into memory that has its pages already (ServerlessLLM, section 4.2)."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from sllm_loaderd.disk.cached import cached_bytes
from sllm_loaderd.files import open_file, read_exactly, require_enough
from sllm_loaderd.reader import BUFFERED, CACHED, DIRECT
from sllm_runtime.protocol.checkpoint import BLOCK_ALIGN, partition_name
from sllm_runtime.protocol.errors import CorruptCheckpoint, InvalidCheckpoint, ModelNotFound
from sllm_runtime.protocol.loader import DISK

_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""What open says where the file system has no direct I/O (tmpfs, some overlays)."""


class LocalFile:
    """``ByteSource`` over one file. Bytes that the page cache has are copied from there, the others read direct.

    They are ``BUFFERED`` where the file system refuses O_DIRECT or ``direct`` is False. Raises ``ModelNotFound`` or
    ``CorruptCheckpoint`` if it cannot be opened.
    """

    path = DISK

    def __init__(self, file: Path, *, direct: bool = True) -> None:
        self._file = file
        try:
            self._fd = open_file(file)
        except OSError as error:
            require_enough(error, file)
            kind = ModelNotFound if error.errno == errno.ENOENT else CorruptCheckpoint
            text = f"{file} cannot be opened: {error.strerror}; restore it or convert the model again"
            raise kind(text, field=str(file)) from error
        try:
            self._direct = _open_direct(self._fd, file) if direct else None
        except BaseException:
            os.close(self._fd)
            raise
        self._opened_as = _identity(self._fd)
        self.nbytes = self._opened_as[0]

    @property
    def name(self) -> str:
        return str(self._file)

    def fileno(self) -> int:
        """Its descriptor for buffered reads, good until ``close``."""
        return self._fd

    @property
    def modified_ns(self) -> int:
        """Time of its last change when it was opened, in nanoseconds since the epoch."""
        return self._opened_as[1]

    def read(self, view: memoryview, offset: int) -> str:
        """As ``ChunkSource.read``. Raises ``CorruptCheckpoint`` if the file is short, broken, or has changed since."""
        cached = cached_bytes(self._fd, offset, len(view)) == len(view)  # copying is faster than any disk
        body = 0 if cached else self._direct_part(view, offset)
        if body and self._direct is not None:
            read_exactly(self._direct, view[:body], offset, self._file)
        if body < len(view):  # a tail below one sector, a file system without direct I/O, or bytes in the cache
            read_exactly(self._fd, view[body:], offset + body, self._file)
        if _identity(self._fd) != self._opened_as:
            raise CorruptCheckpoint(
                f"{self._file} was changed while bytes {offset} to {offset + len(view)} were read; load again when"
                " whoever writes it is done",
                field=str(self._file),
            )
        if cached:
            return CACHED
        return BUFFERED if self._direct is None else DIRECT

    def close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    def _direct_part(self, view: memoryview, offset: int) -> int:
        """Bytes from the start of ``view`` that direct I/O can read."""
        if self._direct is None or offset % BLOCK_ALIGN or address_of(view) % BLOCK_ALIGN:
            return 0
        return len(view) // BLOCK_ALIGN * BLOCK_ALIGN


class LocalPartition(LocalFile):
    """A partition file of a checkpoint directory; its size must be what the index says."""

    def __init__(self, directory: Path, rank: int, nbytes: int, *, direct: bool = True) -> None:
        try:
            super().__init__(directory / partition_name(rank), direct=direct)
        except ModelNotFound as error:  # the model is there, a file of it is not
            raise CorruptCheckpoint(error.message, field=error.field) from error
        if self.nbytes != nbytes:
            self.close()
            raise CorruptCheckpoint(
                f"{self.name} has {self.nbytes} bytes where its index says {nbytes}; convert the model again",
                field=self.name,
            )


def _open_direct(fd: int, file: Path) -> int | None:
    """A second descriptor of the file that is open, whatever has its name by now."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        require_enough(error, file)
        raise InvalidCheckpoint(f"{file} cannot be opened: {error.strerror}", field=str(file)) from error


def _identity(fd: int) -> tuple[int, int]:
    """Size and time of the last change: another one, and the bytes may be another file's."""
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns


def address_of(view: memoryview) -> int:
    """Where ``view`` lies in memory; 1, which is nothing direct I/O could use, for what cannot be written to."""
    if view.readonly:
        return 1
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if len(view) else 0

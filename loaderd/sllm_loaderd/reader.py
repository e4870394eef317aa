"""Where a partition's bytes come from: ``ChunkSource``, and its first kind, the local file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from sllm_loaderd.files import read_exactly
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import CorruptCheckpoint


class ChunkSource(Protocol):
    """Bytes of one partition by offset. Used by several I/O threads at once."""

    @property
    def path(self) -> str:
        """The path (queue, bandwidth) that these bytes come by, such as ``disk``."""

    @property
    def name(self) -> str:
        """What an error message calls it."""

    def read(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset`` on. Blocks. Raises ``CorruptCheckpoint`` or ``Unavailable``."""

    def close(self) -> None:
        """Give back descriptors; called once, when no read is under way."""


class LocalPartition:
    """A partition file in the node's store, read through the page cache."""

    path = "disk"

    def __init__(self, directory: Path, rank: int, nbytes: int) -> None:
        self._file = directory / partition_name(rank)
        try:
            self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptCheckpoint(
                f"{self._file} cannot be opened: {error.strerror}; convert the model again", field=str(self._file)
            ) from error
        size = os.fstat(self._fd).st_size
        if size != nbytes:
            os.close(self._fd)
            raise CorruptCheckpoint(
                f"{self._file} has {size} bytes where its index says {nbytes}; convert the model again",
                field=str(self._file),
            )

    @property
    def name(self) -> str:
        return str(self._file)

    def read(self, view: memoryview, offset: int) -> None:
        read_exactly(self._fd, view, offset, self._file)

    def close(self) -> None:
        os.close(self._fd)

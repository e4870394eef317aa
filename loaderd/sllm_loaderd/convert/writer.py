"""Writes one partition: chunk by chunk through one buffer, each chunk digested as it passes."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from sllm_loaderd.files import chunk_digest
from sllm_runtime.protocol.checkpoint import PartitionRecord


class PartitionWriter:
    """Sequential writer. ``space`` is where the next bytes go, ``advance`` says how many were put there."""

    def __init__(self, path: Path, rank: int, chunk_bytes: int) -> None:
        self._rank = rank
        self._buffer = bytearray(chunk_bytes)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._digests: list[str] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.offset = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.release()
        os.close(self._fd)

    @property
    def space(self) -> memoryview:
        """The rest of the current chunk; never empty."""
        return self._view[self._filled :]

    def advance(self, count: int) -> None:
        """``count`` bytes of ``space`` are filled."""
        self._filled += count
        self.offset += count
        if self._filled == len(self._buffer):
            self._flush()

    def put(self, data: memoryview) -> None:
        """The bytes of ``data`` come next."""
        while len(data):
            with self.space as space:
                count = min(len(space), len(data))
                space[:count] = data[:count]
            self.advance(count)
            data = data[count:]

    def pad_to(self, offset: int) -> None:
        """Zeros up to ``offset``."""
        while self.offset < offset:
            space = self.space
            count = min(len(space), offset - self.offset)
            space[:count] = bytes(count)
            self.advance(count)

    def finish(self, nbytes: int) -> PartitionRecord:
        """Pad to ``nbytes``, make everything durable, and give the record."""
        self.pad_to(nbytes)
        if self._filled:
            self._flush()
        os.fsync(self._fd)
        return PartitionRecord(self._rank, nbytes, tuple(self._digests))

    def _flush(self) -> None:
        chunk = self._view[: self._filled]
        self._digests.append(chunk_digest(chunk))
        done = 0
        while done < len(chunk):
            done += os.write(self._fd, chunk[done:])
        self._filled = 0

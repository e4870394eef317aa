"""Digests of the chunks of models that came without: noted at the first load, checked by every later one."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sllm_runtime.protocol.checkpoint import CheckpointIndex, chunk_count
from sllm_runtime.protocol.errors import CorruptCheckpoint

log = logging.getLogger(__name__)


class LearntDigests:
    """The digests of one model's chunks, kept in ``path``; "" where a chunk has not been loaded yet. Used in one
    thread at a time.

    A file that is lost or broken costs nothing but that the next load notes them again.
    """

    def __init__(self, path: Path, index: CheckpointIndex) -> None:
        self._path = path
        self._counts = [chunk_count(part.nbytes, index.chunk_bytes) for part in index.partitions]
        self._digests = self._read() or [[""] * count for count in self._counts]

    def of(self, rank: int) -> Sequence[str]:
        """Digest by chunk of a partition."""
        return tuple(self._digests[rank])

    def learn(self, rank: int, number: int, found: str) -> CorruptCheckpoint | None:
        """A chunk was read and has the digest ``found``; an error if it had another one before."""
        known = self._digests[rank][number]
        if known and known != found:
            return CorruptCheckpoint(
                f"partition {rank}: chunk {number} has digest {found}, at its first load it had {known}; its file has"
                " changed; convert the model to have it as it is now",
                field="model",
            )
        self._digests[rank][number] = found
        if not known and all(self._digests[rank]):
            self.save()
        return None

    def save(self) -> None:
        """Keep what is known. Small and not synced: see the class."""
        temporary = self._path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(self._digests))
            os.rename(temporary, self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _read(self) -> list[list[str]] | None:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=list[list[str]])
        except (OSError, msgspec.MsgspecError):
            return None
        return found if [len(digests) for digests in found] == self._counts else None

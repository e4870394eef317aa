"""What a peer may read: index and small files of a stored model, its partitions from DRAM, store or SSD tier."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.residency import Residency
from sllm_loaderd.store import ModelStore
from sllm_loaderd.verify import Checkpoint, open_checkpoint
from sllm_runtime.protocol.checkpoint import INDEX_NAME, chunks_of, partition_name
from sllm_runtime.protocol.errors import ModelNotFound

T = TypeVar("T")
_ANSWER_S: Final = 10.0
_MOST_CHECKPOINTS: Final = 16
"""Indexes that are kept decoded: each request would decode them again."""
_names = itertools.count()


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` bytes at ``offset`` of a descriptor, for ``sendfile``."""

    fd: int
    offset: int
    nbytes: int


class Exports:
    """Thread-safe. ``post`` leads to the event loop in which ``residency`` lives."""

    def __init__(self, store: ModelStore, residency: Residency, post: Callable[[Callable[[], None]], object]) -> None:
        self._store = store
        self._residency = residency
        self._post = post
        self._lock = threading.Lock()
        self._checkpoints: dict[str, Checkpoint] = {}

    def size(self, digest: str, name: str) -> int:
        """Bytes of a file of a model. Raises ``ModelNotFound`` for all that is not to be served."""
        checkpoint = self._checkpoint(digest)
        if name == INDEX_NAME:
            return len(checkpoint.encoded)
        for file in checkpoint.index.files:
            if file.name == name:
                return file.nbytes
        rank = self._rank(checkpoint, name)
        if not self._on_disk(checkpoint, rank) and not self._whole_in_memory(checkpoint, rank):
            raise ModelNotFound(f"{name} of {digest} is not on this node", field="model")
        return checkpoint.index.partition(rank).nbytes

    @contextlib.contextmanager
    def pieces(self, digest: str, name: str, offset: int, nbytes: int) -> Iterator[Sequence[Piece]]:
        """Descriptors with bytes ``[offset, offset + nbytes)`` of a file, good inside the block.

        Raises ``ModelNotFound`` if they are gone by now.
        """
        checkpoint = self._checkpoint(digest)
        if name == INDEX_NAME or any(file.name == name for file in checkpoint.index.files):
            with (checkpoint.directory / name).open("rb") as file:
                yield [Piece(file.fileno(), offset, nbytes)]
            return
        rank = self._rank(checkpoint, name)
        holder = f"peer-{next(_names)}"
        try:
            chunks = self._ask(lambda: self._lend(checkpoint, rank, offset, nbytes, holder))
        except TimeoutError:
            self._forget(holder)  # the question comes to its turn all the same, and this behind it
            raise
        if chunks:
            try:
                yield list(_cut(chunks, checkpoint.index.chunk_bytes, offset, nbytes))
            finally:
                self._forget(holder)
            return
        with self._opened(checkpoint, rank) as fd:
            yield [Piece(fd, offset, nbytes)]

    def _checkpoint(self, digest: str) -> Checkpoint:
        directory = self._store.directory(digest)
        with self._lock:
            known = self._checkpoints.pop(digest, None) or open_checkpoint(directory, digest)
            self._checkpoints[digest] = known
            if len(self._checkpoints) > _MOST_CHECKPOINTS:
                del self._checkpoints[next(iter(self._checkpoints))]
            return known

    def _rank(self, checkpoint: Checkpoint, name: str) -> int:
        for partition in checkpoint.index.partitions:
            if partition_name(partition.rank) == name:
                return partition.rank
        raise ModelNotFound(f"{checkpoint.digest} has no file {name!r}", field="model")

    def _on_disk(self, checkpoint: Checkpoint, rank: int) -> bool:
        stored = (checkpoint.directory / partition_name(rank)).exists()
        return stored or self._store.ssd.holds(checkpoint.digest, rank)

    @contextlib.contextmanager
    def _opened(self, checkpoint: Checkpoint, rank: int) -> Iterator[int]:
        path = checkpoint.directory / partition_name(rank)
        if path.exists():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield fd
            finally:
                os.close(fd)
            return
        copy = self._store.ssd.open(checkpoint.digest, rank, checkpoint.index.partition(rank).nbytes)
        if copy is None:
            raise ModelNotFound(f"partition {rank} of {checkpoint.digest} is not on this node", field="model")
        with contextlib.closing(copy):
            yield copy.fileno()

    # --- chunks in memory: asked in the event loop ------------------------------------------------------
    def _ask(self, question: Callable[[], T]) -> T:
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def ask() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # it belongs to the thread that asks
                    answer.set_exception(error)

        self._post(ask)
        return answer.result(_ANSWER_S)

    def _forget(self, holder: str) -> None:
        self._post(lambda: self._residency.forget(holder))

    def _lend(
        self, checkpoint: Checkpoint, rank: int, offset: int, nbytes: int, holder: str
    ) -> dict[int, Chunk] | None:
        """The chunks of a range, held by ``holder`` until it is forgotten; None if one is not in memory."""
        wanted = chunks_of(offset, nbytes, checkpoint.index.chunk_bytes)
        resident = self._residency.find(checkpoint.digest, rank)
        if resident is None or resident.model.checkpoint.encoded != checkpoint.encoded:
            return None  # nothing there, or its later conversion
        if not all(resident.there(number) for number in wanted):
            return None
        found = {number: resident.chunks[number] for number in wanted}
        self._residency.hold(list(found.values()), holder)
        return found

    def _whole_in_memory(self, checkpoint: Checkpoint, rank: int) -> bool:
        nbytes = checkpoint.index.partition(rank).nbytes
        numbers = chunks_of(0, nbytes, checkpoint.index.chunk_bytes)

        def there() -> bool:
            resident = self._residency.find(checkpoint.digest, rank)
            return resident is not None and all(resident.there(number) for number in numbers)

        return self._ask(there)


def _cut(chunks: dict[int, Chunk], chunk_bytes: int, offset: int, nbytes: int) -> Iterator[Piece]:
    """The parts of ``chunks`` that make up ``[offset, offset + nbytes)``."""
    end = offset + nbytes
    for number, chunk in chunks.items():
        start = number * chunk_bytes
        first, last = max(offset, start), min(end, start + chunk_bytes)
        yield Piece(chunk.fd, first - start, last - first)

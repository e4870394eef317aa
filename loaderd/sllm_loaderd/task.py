"""One step of one chunk on one path: read it, copy it to a device, write it to the SSD tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.files import chunk_digest
from sllm_loaderd.reader import ChunkSource
from sllm_runtime.protocol.errors import CorruptCheckpoint, SllmError
from sllm_runtime.protocol.loader import DISK
from sllm_runtime.protocol.states import check


class TaskState(StrEnum):
    """Where a task is; the table is ``TASK``."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


S = TaskState
TASK: Final[dict[TaskState, frozenset[TaskState]]] = {
    S.NEW: frozenset({S.QUEUED}),
    S.QUEUED: frozenset({S.RUNNING, S.CANCELLED}),
    S.RUNNING: frozenset({S.DONE}),
    S.DONE: frozenset({S.QUEUED}),  # its path failed, another one may serve it
    S.CANCELLED: frozenset(),
}


Order: TypeAlias = tuple[int, int]
"""The turn that a task was given with others, and its place among them."""


class Task(ABC):
    """``nbytes`` of chunk ``number`` over one of ``paths`` (preferred first).

    ``done(task, error)`` is called once a run, in the thread of the path. ``path``, ``priority`` and ``order`` are set
    by the queues. ``mode`` is how a read was done. ``probe``: of which turn of a path's probe it is, if of one.
    """

    def __init__(
        self, number: int, nbytes: int, paths: Sequence[str], done: Callable[[Task, SllmError | None], None]
    ) -> None:
        self.number = number
        self.nbytes = nbytes
        self.paths = tuple(paths)
        self.done = done
        self.path = ""
        self.mode = ""
        self.probe: int | None = None
        self.priority = 0
        self.order: Order = (0, 0)
        self.state = TaskState.NEW

    @abstractmethod
    def run(self, path: str) -> None:
        """Do it over ``path``. Blocks. Raises typed errors."""

    def check(self) -> None:  # noqa: B027
        """Look at what was done; the path is free for the next task meanwhile. Raises typed errors."""

    @property
    def remote(self) -> bool:
        """Whether it brings from another machine what somebody wants: that it fails says something of its path."""
        return False

    def move(self, state: TaskState) -> None:
        """Go to ``state``, if the table allows it."""
        self.state = check(TASK, self.state, state)


class ReadChunk(Task):
    """Fill a chunk from the first of ``sources`` that is on the path, then check its digest.

    An empty ``digest`` is one that is not known yet: ``found`` has what was read. None: nothing is compared.
    """

    def __init__(
        self,
        number: int,
        offset: int,
        nbytes: int,
        digest: str | None,
        chunk: Chunk,
        sources: Sequence[ChunkSource],
        done: Callable[[Task, SllmError | None], None],
    ) -> None:
        super().__init__(number, nbytes, tuple(dict.fromkeys(source.path for source in sources)), done)
        self.offset = offset
        self.chunk = chunk
        self.found = ""
        self._digest = digest
        self._sources = list(sources)

    def run(self, path: str) -> None:
        """Read. Raises what the source raises."""
        source = self._source(path)
        with self.chunk.view[: self.nbytes] as view:
            self.chunk.zero_tail(self.nbytes)
            self.mode = source.read(view, self.offset)

    def check(self) -> None:
        """Compare the digest. Raises ``CorruptCheckpoint`` naming source, chunk and bytes."""
        if self._digest is None:
            return
        with self.chunk.view[: self.nbytes] as view:
            self.found = chunk_digest(view)
        if self._digest and self.found != self._digest:
            name = self._source(self.path).name
            raise CorruptCheckpoint(
                f"{name}: chunk {self.number} (bytes {self.offset} to {self.offset + self.nbytes}) has"
                f" digest {self.found}, its index says {self._digest}; restore the file or convert the model again",
                field=name,
            )

    @property
    def remote(self) -> bool:
        """Whether the bytes come from another machine, and a copy on this one's disk would spare that."""
        return self.path != DISK

    def next_source(self) -> bool:
        """The source that was tried last is of no use for this chunk: whether another one is left to be tried."""
        self._sources.remove(self._source(self.path))
        self.paths = tuple(dict.fromkeys(source.path for source in self._sources))
        return bool(self._sources)

    def _source(self, path: str) -> ChunkSource:
        return next(source for source in self._sources if source.path == path)

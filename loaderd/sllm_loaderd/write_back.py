"""The SSD copy of a remote partition: written from the chunks in DRAM, beside the load and never before it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.paths import Paths
from sllm_loaderd.store import StoredModel
from sllm_loaderd.task import Task, TaskState
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.loader import DISK, PRIORITIES, WRITE_BACK

log = logging.getLogger(__name__)
_CLASS: Final = PRIORITIES.index(WRITE_BACK)


class SsdWrite(Protocol):
    """One partition on its way to the SSD tier. Blocking calls; ``write`` by several threads at once."""

    def write(self, number: int, view: memoryview) -> None:
        """Chunk ``number``. Raises ``OSError`` or a typed error."""

    def finish(self) -> None:
        """All chunks are written: make the copy durable and visible."""

    def abandon(self) -> None:
        """Leave nothing of it."""


class SsdTier(Protocol):
    """The node's SSD cache of remote models."""

    def begin(self, model: StoredModel, rank: int) -> SsdWrite | None:
        """Begin a copy, evicting others; None: there is one, there is no room, or the tier is off. Blocks."""


class WriteBack:
    """The copy of one partition. Everything but the I/O itself happens in the event loop, to which ``post`` leads.

    Whatever fails here ends the copy and nothing else: the load goes on from DRAM.
    """

    def __init__(
        self,
        tier: SsdTier,
        model: StoredModel,
        rank: int,
        paths: Paths,
        post: Callable[[Callable[[], None]], object],
        written: Callable[[], None] = lambda: None,
    ) -> None:
        partition = model.index.partitions[rank]
        self._copy = _Copy(tier, model, rank, -(-partition.nbytes // model.index.chunk_bytes))
        self._paths = paths
        self._post = post
        self._tell = written
        self._queued: dict[int, _WriteChunk] = {}
        self._seen: set[int] = set()

    def add(self, number: int, chunk: Chunk, nbytes: int) -> None:
        """Write a chunk whose digest was right when the disk has nothing better to do. Each chunk once."""
        if number in self._seen or self._copy.ended:
            return
        self._seen.add(number)
        task = _WriteChunk(number, nbytes, chunk, self._copy, self._written)
        self._queued[number] = task
        self._paths.put([task], _CLASS)

    @property
    def running(self) -> bool:
        """Whether a chunk is being written just now."""
        return any(task.begun for task in self._queued.values())

    @property
    def busy(self) -> bool:
        """Whether chunks wait to be written."""
        return bool(self._queued)

    @property
    def waiting(self) -> bool:
        """Whether it has begun, and goes on only when somebody brings more chunks."""
        return not (self._queued or self._copy.ended)

    def let_go(self, number: int) -> bool:
        """Whether a chunk's memory may be used for others: not while it is written. A copy without it stays undone."""
        task = self._queued.get(number)
        if task is not None and self._paths.cancel(task):
            del self._queued[number]
            self._seen.discard(number)
        return number not in self._queued

    def stop(self) -> None:
        """Write no more chunks; a copy that is not complete is abandoned as soon as nothing is written any more."""
        for number, task in list(self._queued.items()):
            if self._paths.cancel(task):
                del self._queued[number]
        self._copy.stop(now=not self._queued)

    def _written(self, task: Task, error: SllmError | None) -> None:
        if error is not None:
            log.warning("the copy on the SSD tier is given up: %s", error)
        self._post(lambda: self._after(task.number))

    def _after(self, number: int) -> None:
        self._queued.pop(number, None)
        if not self._queued:
            self._copy.settle()
        self._tell()


class _Copy:
    """What the disk's threads share: begun once, ended once."""

    def __init__(self, tier: SsdTier, model: StoredModel, rank: int, chunks: int) -> None:
        self._begin: Callable[[], SsdWrite | None] = lambda: tier.begin(model, rank)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        """Who writes waits while the copy begins, which removes others; who stops it does not."""
        self._missing = chunks
        self._write: SsdWrite | None = None
        self._begun = False
        self._stopped = False
        self.ended = False

    def write(self, number: int, view: memoryview) -> None:
        """Write one chunk; the last one makes the copy visible. A failure abandons it."""
        try:
            self._write_one(number, view)
        except OSError as error:
            self.stop(now=False)
            raise Unavailable(f"chunk {number} cannot be written: {error.strerror or error}") from error
        except BaseException:
            self.stop(now=False)
            raise

    def _write_one(self, number: int, view: memoryview) -> None:
        if (write := self._opened()) is None:
            return
        write.write(number, view)
        with self._lock:
            self._missing -= 1
            last = not self._missing
        if last:
            self._end(lambda whole: whole.finish())

    def stop(self, *, now: bool) -> None:
        """No chunk will be written any more; ``now``: nor is one being written."""
        with self._lock:
            self._stopped = True
        if now:
            self.settle()

    def settle(self) -> None:
        """Nothing is being written just now: a copy that was stopped ends here."""
        if self._stopped:
            self._end(lambda part: part.abandon())

    def _opened(self) -> SsdWrite | None:
        with self._opening:
            with self._lock:
                begins = not (self._begun or self._stopped)
                self._begun |= begins
            if begins:
                write = self._begin()
                with self._lock:
                    self._write, self.ended = write, write is None
        with self._lock:
            return None if self._stopped or self.ended else self._write

    def _end(self, how: Callable[[SsdWrite], None]) -> None:
        with self._lock:
            write, self._write = self._write, None
            self.ended = True
        if write is not None:
            how(write)


class _WriteChunk(Task):
    def __init__(
        self,
        number: int,
        nbytes: int,
        chunk: Chunk,
        copy: _Copy,
        done: Callable[[Task, SllmError | None], None],
    ) -> None:
        super().__init__(number, nbytes, (DISK,), done)
        self._chunk = chunk
        self._copy = copy

    @property
    def begun(self) -> bool:
        """Whether the chunk is or may be in use."""
        return self.state is not TaskState.QUEUED

    def run(self, path: str) -> None:
        with self._chunk.view[: self.nbytes] as view:
            self._copy.write(self.number, view)

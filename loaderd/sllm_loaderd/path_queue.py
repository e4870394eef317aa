"""The queue of one path (a disk, later a network): chunks in order within their class, a few threads that read."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from sllm_loaderd.files import chunk_digest
from sllm_loaderd.pool import Chunk
from sllm_loaderd.reader import ChunkSource
from sllm_runtime.protocol.errors import CorruptCheckpoint, InternalError, SllmError
from sllm_runtime.protocol.loader import PRIORITIES, PathStatus


class TaskState(StrEnum):
    """A task goes forward only: queued, running, done; or from queued to cancelled."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class ChunkTask:
    """Fill one chunk and check it. ``done(task, error)`` is called in the I/O thread."""

    number: int
    offset: int
    nbytes: int
    digest: str
    chunk: Chunk
    source: ChunkSource
    done: Callable[[ChunkTask, SllmError | None], None]
    priority: int = 0
    state: TaskState = field(default=TaskState.QUEUED)

    def run(self) -> None:
        """Read and check. Raises ``CorruptCheckpoint`` naming file and offset."""
        with self.chunk.view[: self.nbytes] as view:
            self.chunk.zero_tail(self.nbytes)
            self.source.read(view, self.offset)
            found = chunk_digest(view)
        if found != self.digest:
            raise CorruptCheckpoint(
                f"{self.source.name}: chunk {self.number} (bytes {self.offset} to {self.offset + self.nbytes}) has"
                f" digest {found}, its index says {self.digest}; restore the file or convert the model again",
                field=self.source.name,
            )


class PathQueue:
    """Threads that serve tasks by (class, order of arrival). Owns its threads: ``close`` joins them.

    The queue is as long as there are chunks allocated for it, so the pool bounds it.
    """

    def __init__(self, path: str, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._heap: list[tuple[int, int, ChunkTask]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._running = 0
        self._bandwidth = 0.0
        self._threads = [
            threading.Thread(target=self._serve, name=f"sllm-{path}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, tasks: list[ChunkTask], priority: int) -> None:
        """Queue ``tasks`` in this order, in the class ``PRIORITIES[priority]``."""
        with self._changed:
            for task in tasks:
                task.priority = priority
                heapq.heappush(self._heap, (priority, next(self._order), task))
            self._changed.notify(len(tasks))

    def promote(self, task: ChunkTask, priority: int) -> None:
        """Somebody of a higher class waits for ``task`` now."""
        with self._changed:
            if task.state is TaskState.QUEUED and priority < task.priority:
                task.priority = priority
                heapq.heappush(self._heap, (priority, next(self._order), task))

    def cancel(self, task: ChunkTask) -> bool:
        """Whether ``task`` will never run; False if it has begun (its ``done`` is called then)."""
        with self._changed:
            if task.state is TaskState.QUEUED:
                task.state = TaskState.CANCELLED
            return task.state is TaskState.CANCELLED

    def status(self) -> PathStatus:
        """Moving bandwidth in bytes/s, and the bytes that wait, by class."""
        with self._changed:
            waiting = {task for _, _, task in self._heap if task.state is TaskState.QUEUED}
            queued = {
                name: sum(task.nbytes for task in waiting if task.priority == number)
                for number, name in enumerate(PRIORITIES)
            }
            return PathStatus(path=self.path, bandwidth=self._bandwidth, queued=queued)

    def close(self) -> None:
        """Let running tasks end, drop the others, join the threads."""
        with self._changed:
            self._closing = True
            self._heap.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            begun = self._clock()
            error: SllmError | None = None
            try:
                task.run()
            except SllmError as failure:
                error = failure
            except Exception as failure:  # a bug must end the load, not this thread
                error = InternalError(f"reading {task.source.name} failed: {failure!r}")
            self._finish(task, self._clock() - begun, error)
            task.done(task, error)

    def _next(self) -> ChunkTask | None:
        with self._changed:
            while not self._closing:
                while self._heap:
                    priority, _, task = heapq.heappop(self._heap)
                    if task.state is TaskState.QUEUED and task.priority == priority:
                        task.state = TaskState.RUNNING
                        self._running += 1
                        return task
                self._changed.wait(timeout=60)
            return None

    def _finish(self, task: ChunkTask, seconds: float, error: SllmError | None) -> None:
        with self._changed:
            task.state = TaskState.DONE
            if error is None and seconds > 0:
                now = task.nbytes / seconds * self._running
                self._bandwidth = now if not self._bandwidth else 0.8 * self._bandwidth + 0.2 * now
            self._running -= 1

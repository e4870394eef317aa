"""All paths of a node: one queue each, and chunks that change paths because another one would bring them sooner."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from sllm_loaderd.path_queue import PathQueue, bytes_before
from sllm_loaderd.task import Task, TaskState
from sllm_runtime.protocol.loader import PathStatus

_MOST_PATHS: Final = 256
"""Paths that are remembered; above it, idle ones are forgotten with their bandwidth."""


class Paths:
    """The queues by path, made when first used. Thread-safe.

    ``threads(path)`` says how many serve a path, ``spare(path)`` how many more there are for checks behind them.
    """

    def __init__(
        self,
        threads: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        spare: Callable[[str], int] = lambda path: 0,
    ) -> None:
        self._threads = threads
        self._spare = spare
        self._clock = clock
        self._lock = threading.RLock()
        self._queues: dict[str, PathQueue] = {}
        self._turns = itertools.count()
        self._closing = False

    def turn(self) -> int:
        """A turn for tasks that are put later: they go before all that take theirs after this."""
        return next(self._turns)

    def put(self, tasks: Sequence[Task], priority: int, turn: int | None = None) -> None:
        """Queue ``tasks`` in this order, in the class ``PRIORITIES[priority]``, each on the first of its paths. Without
        a ``turn`` they take the next one."""
        with self._lock:
            if self._closing:
                return
            turn = self.turn() if turn is None else turn
            for place, task in enumerate(tasks):
                task.priority, task.order = priority, (turn, place)
            self._put(tasks)

    def again(self, task: Task) -> None:
        """Queue a task that failed on another one of its paths, at the place that it had."""
        with self._lock:
            if not self._closing:
                self._put([task])

    def doubted(self, path: str) -> bool:
        """Whether it has just failed, and is only asked for what nobody else has."""
        with self._lock:
            queue = self._queues.get(path)
            return queue is not None and queue.doubted

    def promote(self, task: Task, priority: int) -> None:
        """Somebody of a higher class waits for ``task`` now."""
        with self._lock:
            if task.state is TaskState.QUEUED and priority < task.priority:
                self._queues[task.path].move(task, priority, (self.turn(), 0))

    def reorder(self, tasks: Sequence[Task]) -> None:
        """Serve ``tasks`` in this order. They take each other's places, so nobody else waits longer for it."""
        with self._lock:
            groups: defaultdict[tuple[str, int], list[Task]] = defaultdict(list)
            for task in tasks:
                if task.state is TaskState.QUEUED:
                    groups[task.path, task.priority].append(task)
            for (path, priority), group in groups.items():
                for task, order in zip(group, sorted(task.order for task in group), strict=True):
                    self._queues[path].move(task, priority, order)

    def cancel(self, task: Task) -> bool:
        """Whether ``task`` will never run; False if it has begun (its ``done`` is called then)."""
        with self._lock:
            if task.state is TaskState.QUEUED:
                task.move(TaskState.CANCELLED)
            return task.state is TaskState.CANCELLED

    def status(self) -> tuple[PathStatus, ...]:
        """Every path used so far."""
        with self._lock:
            return tuple(queue.status() for queue in self._queues.values())

    def close(self) -> None:
        """Let running tasks end, drop the others, join all threads."""
        with self._lock:
            self._closing = True
            queues = list(self._queues.values())
        for queue in queues:
            queue.close()

    def _put(self, tasks: Sequence[Task]) -> None:
        first: defaultdict[str, list[Task]] = defaultdict(list)
        others: set[str] = set()
        doubted = {path for path, queue in self._queues.items() if queue.doubted}
        for task in tasks:
            able = [path for path in task.paths if path not in doubted] or task.paths
            first[able[0]].append(task)
            others.update(able[1:])
        for path, group in first.items():
            self._queue(path).put(group)
        for path in others - set(first):
            self._queue(path).wake()  # it may serve some of them sooner

    def _queue(self, path: str) -> PathQueue:
        queue = self._queues.get(path)
        if queue is None:
            if len(self._queues) >= _MOST_PATHS:
                self._queues = {name: queue for name, queue in self._queues.items() if not queue.idle}
            queue = PathQueue(
                path,
                self._threads(path),
                self._clock,
                spare=self._spare(path),
                lock=self._lock,
                steal=self._steal,
                failed=self._failed,
            )
            self._queues[path] = queue
        return queue

    def _steal(self, thief: PathQueue) -> Task | None:
        """A task that waits elsewhere and that ``thief``, which is idle, would finish sooner; the last of its class. Of
        one that has failed a single one is tried at a time: each may take all of a reader's patience."""
        if thief.tried:
            return None
        for queue in self._queues.values():
            if thief.doubted and not queue.doubted:
                continue
            candidates = queue.shared_with(thief.path) if queue is not thief else []
            urgent = [task for task in candidates if task.priority == candidates[0].priority]
            if urgent and sooner(urgent[-1], bytes_before(urgent[-1], queue.waiting()), queue, thief):
                return urgent[-1]
        return None

    def _failed(self, queue: PathQueue) -> None:
        """What waits there and another path could bring goes to that one."""
        if not self._closing:
            self._put([task for task in queue.waiting() if len(task.paths) > 1])


def sooner(task: Task, ahead: int, owner: PathQueue, thief: PathQueue) -> bool:
    """Whether ``thief`` would finish ``task`` before ``owner``, which has ``ahead`` bytes to serve before it.

    A path that was never measured takes one chunk at a time, to be measured, and only from a queue in which it would
    wait for at least two others.
    """
    busy = sum(other.nbytes for other in thief.running) + task.nbytes
    ahead += sum(other.nbytes for other in owner.running) + task.nbytes
    if not thief.bandwidth.value or not owner.bandwidth.value:
        return not thief.running and ahead > 2 * task.nbytes
    return busy / thief.bandwidth.value < ahead / owner.bandwidth.value

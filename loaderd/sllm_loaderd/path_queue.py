"""The queue of one path (a disk, a bucket, a link to a device): tasks in order within their class, a few threads."""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sllm_loaderd.doubt import Doubt
from sllm_loaderd.reader import CACHED, SourceClosed
from sllm_loaderd.task import Order, Task, TaskState
from sllm_runtime.protocol.errors import Forbidden, InternalError, SllmError, Unavailable
from sllm_runtime.protocol.loader import PRIORITIES, PathStatus, is_link, unused_bandwidth

log = logging.getLogger(__name__)

_IDLE_S: Final = 30.0
"""A thread with nothing to do for this long ends; the next task starts one again."""
_SHORT: Final = 128
_serial = itertools.count()


class Bandwidth:
    """Bytes per second while the path is busy, over about the last ``horizon`` busy seconds.

    Of these there have to be many times what a read takes: those of a load come in groups, a few at a time, and where
    its last ones are fewer the path seems slower. With 0.5 s a disk of 600 MB/s had 561 after each load.
    """

    def __init__(self, horizon: float = 3.0) -> None:
        self._horizon = horizon
        self._bytes = 0.0
        self._seconds = 0.0
        self._probes: dict[int, tuple[int, float]] | None = {}
        """What each of the reads that come before the first load gave; None once there was a load."""

    def add(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` of a load came while the path was busy for ``seconds``."""
        self._probes = None
        self._bytes, self._seconds = self._with(nbytes, seconds)

    def probed(self, turn: int, nbytes: int, seconds: float) -> None:
        """As much of the read that is the ``turn``-th of a probe. Each of them counts with the median of all: one that
        a machine held up for a second, while its node began, says nothing of the others."""
        if self._probes is None:
            self.add(nbytes, seconds)
            return
        before = self._probes.get(turn, (0, 0.0))
        self._probes[turn] = (before[0] + nbytes, before[1] + seconds)
        self._bytes = float(sum(came for came, _ in self._probes.values()))
        self._seconds = self._bytes / statistics.median(came / took for came, took in self._probes.values())

    @property
    def value(self) -> float:
        """Bytes per second; 0 if nothing came yet."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def at_most(self, nbytes: int, seconds: float) -> float:
        """What ``value`` would be had ``nbytes`` just come in ``seconds``."""
        sums = self._with(nbytes, seconds)
        return sums[0] / sums[1]

    def _with(self, nbytes: int, seconds: float) -> tuple[float, float]:
        kept = math.exp(-seconds / self._horizon)
        return self._bytes * kept + nbytes, self._seconds * kept + seconds


class PathQueue:
    """Threads that serve tasks by (class, order). Owns its threads: ``close`` joins them.

    At most ``threads`` tasks run at a time. A task that is checked behind its run (``Task.check``) has left its place
    to the next one by then; ``spare`` threads more see to that, so that a disk goes on while digests are compared.

    All queues of a node share ``lock``, so that a task can go from one to another. The queue is as long as there are
    chunks allocated for it, so the pool bounds it. ``steal`` (called with the lock held) finds work when it is empty;
    ``failed`` (likewise) hears that the path seems to be down from now on.
    """

    def __init__(
        self,
        path: str,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        spare: int = 0,
        lock: threading.RLock | None = None,
        steal: Callable[[PathQueue], Task | None] = lambda queue: None,
        failed: Callable[[PathQueue], None] = lambda queue: None,
    ) -> None:
        self.path = path
        self.bandwidth = Bandwidth()
        self.running: list[Task] = []
        """What is under way, until its end was told."""
        self._reading: set[Task] = set()
        """Those of them whose bytes are not there yet: each has a place."""
        self._shared: set[Task] = set()
        """Those that wait here and that another path could serve."""
        self._places = threads
        """For tasks that run at a time."""
        self._most_threads = threads + spare
        self._clock = clock
        self._steal, self._failed = steal, failed
        self._doubt = Doubt()
        self._changed = threading.Condition(lock or threading.RLock())
        self._heap: list[tuple[int, Order, int, Task]] = []
        self._longest = _SHORT
        """With so many entries it is time to leave out those that are no longer of use."""
        self._threads: list[threading.Thread] = []
        self._mode = ""
        self._measured_at = 0.0
        self._closing = False

    def put(self, tasks: Iterable[Task]) -> None:
        """Queue tasks whose ``priority`` and ``order`` are set."""
        with self._changed:
            for task in tasks:
                if task.state is not TaskState.QUEUED:
                    task.move(TaskState.QUEUED)
                task.path = self.path
                if len(task.paths) > 1:
                    self._shared.add(task)
                self._push(task)
            self.wake()

    def wake(self) -> None:
        """There may be something to do, here or elsewhere."""
        with self._changed:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while not self._closing and len(self._threads) < self._most_threads:
                name = f"sllm-{self.path}-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                try:
                    thread.start()  # its first step waits for this lock
                except RuntimeError as error:  # none can be had: those that there are do what there is
                    log.warning("path %s goes on with %d threads: %s", self.path, len(self._threads), error)
                    if not self._threads:
                        self._refuse(Unavailable(f"nothing can be read from {self.path}: {error}; ask again"))
                    break
                self._threads.append(thread)
            self._changed.notify_all()

    def _refuse(self, error: SllmError) -> None:
        """Nobody serves what waits here."""
        for task in self.waiting():
            task.move(TaskState.RUNNING)
            task.move(TaskState.DONE)
            task.done(task, error)

    def move(self, task: Task, priority: int, order: Order) -> None:
        """Another place for a task that waits here."""
        with self._changed:
            task.priority, task.order = priority, order
            self._push(task)

    def waiting(self) -> list[Task]:
        """Tasks that wait, in the order in which they will be served."""
        with self._changed:
            found = {task for _, _, _, task in self._heap if self._is_here(task)}
            return sorted(found, key=lambda task: (task.priority, task.order))

    def shared_with(self, path: str) -> list[Task]:
        """Tasks that wait here and that ``path`` could serve as well, in order."""
        with self._changed:
            self._shared = {task for task in self._shared if self._is_here(task)}
            found = [task for task in self._shared if path in task.paths]
            return sorted(found, key=lambda task: (task.priority, task.order))

    def status(self) -> PathStatus:
        """Moving bandwidth in bytes/s, and the bytes that wait or are under way, by class."""
        with self._changed:
            ahead = [*self.waiting(), *self.running]
            queued = {
                name: sum(task.nbytes for task in ahead if task.priority == number)
                for number, name in enumerate(PRIORITIES)
            }
            return PathStatus(path=self.path, bandwidth=self._bandwidth(), queued=queued, mode=self._mode)

    def _bandwidth(self) -> float:
        """As measured; less where what is under way takes longer than that, and before anything has come less than what
        an unused path is taken to have: a large chunk from a slow store may take as long as many decisions."""
        known, since = self.bandwidth.value, self._clock() - self._measured_at
        if not self._reading or since <= 0 or is_link(self.path):
            return known
        most = self.bandwidth.at_most(sum(task.nbytes for task in self._reading), since)
        return min(known, most) if known else most if most < unused_bandwidth(self.path) else 0.0

    @property
    def doubted(self) -> bool:
        """Whether what another path could bring as well is not asked of this one now."""
        return self._doubt.holds(self._clock())

    @property
    def tried(self) -> bool:
        """Whether it has failed, and what runs there tells whether it still does."""
        return self._doubt.tried and bool(self.running)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing runs and no thread lives."""
        with self._changed:
            return not self.running and not self.waiting() and not any(t.is_alive() for t in self._threads)

    def close(self) -> None:
        """Let running tasks end, drop the others, join the threads."""
        with self._changed:
            self._closing = True
            self._heap.clear()
            self._changed.notify_all()
        for thread in list(self._threads):
            thread.join()

    def _push(self, task: Task) -> None:
        if len(self._heap) >= self._longest:  # mostly what was moved, cancelled or taken elsewhere since
            self._heap = list({entry[-1]: entry for entry in self._heap if self._is_current(entry)}.values())
            heapq.heapify(self._heap)
            self._longest = max(2 * len(self._heap), _SHORT)
        heapq.heappush(self._heap, (task.priority, task.order, next(_serial), task))

    def _is_current(self, entry: tuple[int, Order, int, Task]) -> bool:
        priority, order, _, task = entry
        return self._is_here(task) and (task.priority, task.order) == (priority, order)

    def _is_here(self, task: Task) -> bool:
        return task.state is TaskState.QUEUED and task.path == self.path

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            error = self._attempt(task, functools.partial(task.run, self.path))
            with self._changed:
                self._measure(task, error)
                self._judge(task, error)
                self._changed.notify()
            if error is None:
                error = self._attempt(task, task.check)
            with self._changed:
                task.move(TaskState.DONE)
            task.done(task, error)
            with self._changed:
                self.running.remove(task)

    def _attempt(self, task: Task, step: Callable[[], None]) -> SllmError | None:
        try:
            step()
        except SllmError as failure:
            return failure
        except Exception as failure:  # a bug must end the load, not this thread
            return InternalError(f"chunk {task.number} on {self.path} failed: {failure!r}")
        return None

    def _next(self) -> Task | None:
        """The task to serve, now running in a place of its own; None when it is time for this thread to end."""
        with self._changed:
            while not self._closing:
                if len(self._reading) < self._places and (task := self._pop() or self._steal(self)) is not None:
                    if not self._reading:
                        self._measured_at = self._clock()
                    task.path = self.path
                    task.move(TaskState.RUNNING)
                    self.running.append(task)
                    self._reading.add(task)
                    return task
                # Who has waited for the end of a doubt looks once more: there may be something to take from others.
                rest = self._doubt.left(self._clock())
                if not self._changed.wait(timeout=rest or _IDLE_S) and not self._heap and not rest:
                    self._threads.remove(threading.current_thread())
                    break
            return None

    def _pop(self) -> Task | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                return entry[-1]
        return None

    def _measure(self, task: Task, error: SllmError | None) -> None:
        """It has run. What is checked behind it takes none of the path's time: a small load would else seem to have had
        a slower one than a large load has."""
        now = self._clock()
        self._reading.discard(task)
        if task.mode == CACHED:  # what else runs takes its time as it would without
            self._measured_at = self._measured_at if self._reading else now
            return
        seconds = now - self._measured_at
        if error is None and seconds > 0:
            if task.probe is None:
                self.bandwidth.add(task.nbytes, seconds)
            else:
                self.bandwidth.probed(task.probe, task.nbytes, seconds)
        self._measured_at = now
        self._mode = task.mode or self._mode

    def _judge(self, task: Task, error: SllmError | None) -> None:
        """A peer that is down, cut off from this node or behind a link that loses large packets takes all of a reader's
        patience for each chunk that is asked of it: the others are not."""
        if not task.remote:
            return
        if error is None:
            self._doubt.served()
        elif isinstance(error, SourceClosed):  # by this node, which says nothing of the path
            return
        elif isinstance(error, Unavailable | Forbidden) and self._doubt.failed(self._clock()):
            log.warning("%s is asked for %g s only what nobody else has: %s", self.path, self._doubt.pause_s, error)
            self._failed(self)


def bytes_before(task: Task, waiting: Sequence[Task]) -> int:
    """Bytes of a queue that are served before ``task``."""
    return sum(other.nbytes for other in waiting if (other.priority, other.order) < (task.priority, task.order))

"""The queues of the paths: order, classes, promotion, re-ordering, cancelling, stealing; errors name the chunk."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd import doubt
from sllm_loaderd import paths as sllm_paths
from sllm_loaderd.doubt import FIRST_S, LONGEST_S, Doubt
from sllm_loaderd.files import chunk_digest
from sllm_loaderd.path_queue import Bandwidth, PathQueue
from sllm_loaderd.paths import Paths, sooner
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.reader import CACHED, ChunkSource, SourceClosed
from sllm_loaderd.task import ReadChunk, Task, TaskState
from sllm_runtime.protocol.errors import CorruptCheckpoint, InternalError, SllmError, Unavailable
from tests.fixtures.waiting import GIVE_UP_S

SIZE = 4096
WAIT = GIVE_UP_S


class GatedSource:
    """Bytes that say their own offset; reads wait until the gate is open."""

    name = "gated"

    def __init__(self, path: str = "disk") -> None:
        self.path = path
        self.mode = ""
        self.content = content
        self.gate = threading.Event()
        self.began: queue.Queue[int] = queue.Queue()

    def read(self, view: memoryview, offset: int) -> str:
        self.began.put(offset // SIZE)
        assert self.gate.wait(WAIT)
        if offset >= 900 * SIZE:
            raise RuntimeError("a bug")
        view[:] = self.content(offset // SIZE)[: len(view)]
        return self.mode

    def close(self) -> None:
        pass


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


class Bench:
    """Paths with one thread each, two sources and a pool."""

    def __init__(self) -> None:
        self.source = GatedSource()
        self.other = GatedSource("s3 b")
        self.pool = ChunkPool(SIZE, 64 * SIZE, 0)
        self.paths = Paths(lambda path: 1)
        self.ended: queue.Queue[tuple[int, SllmError | None]] = queue.Queue()

    def task(self, number: int, digest: str | None = None, sources: tuple[ChunkSource, ...] = ()) -> ReadChunk:
        return ReadChunk(
            number,
            number * SIZE,
            SIZE,
            chunk_digest(content(number)) if digest is None else digest,
            self.pool.allocate(1)[0],
            sources or (self.source,),
            lambda task, error: self.ended.put((task.number, error)),
        )

    def tasks(self, *numbers: int) -> list[ReadChunk]:
        return [self.task(number) for number in numbers]

    def begin(self, priority: int = 0) -> ReadChunk:
        """Chunk 0 is being read, and waits at the gate."""
        (task,) = self.tasks(0)
        self.paths.put([task], priority)
        assert self.source.began.get(timeout=WAIT) == 0
        return task

    def finish(self, count: int) -> list[int]:
        """Open the gate; the numbers in the order in which they ended."""
        self.source.gate.set()
        return [self.ended.get(timeout=WAIT)[0] for _ in range(count)]

    def close(self) -> None:
        self.source.gate.set()
        self.other.gate.set()
        self.paths.close()
        self.pool.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with contextlib.closing(Bench()) as made:
        yield made


def test_classes_go_before_arrival_and_arrival_orders_a_class(bench: Bench) -> None:
    bench.begin(1)
    bench.paths.put(bench.tasks(1, 2), 2)
    bench.paths.put(bench.tasks(3), 1)
    bench.paths.put(bench.tasks(4, 5), 0)
    (status,) = bench.paths.status()
    assert status.queued == {"start": 2 * SIZE, "prewarm": 2 * SIZE, "write-back": 2 * SIZE}  # what runs counts
    assert bench.finish(6) == [0, 4, 5, 3, 1, 2]
    bench.paths.close()  # the threads are done with it too
    (status,) = bench.paths.status()
    assert status.bandwidth > 0
    assert set(status.queued.values()) == {0}


def test_who_came_first_is_served_first_whoever_was_ready_first(bench: Bench) -> None:
    first, second = bench.paths.turn(), bench.paths.turn()
    bench.begin()
    bench.paths.put(bench.tasks(3, 4), 0, second)
    bench.paths.put(bench.tasks(5), 0)
    bench.paths.put(bench.tasks(1, 2), 0, first)
    assert bench.finish(6) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cancels", [False, True])
def test_a_queue_is_no_longer_than_what_waits_in_it(bench: Bench, cancels: bool) -> None:
    """A sandbox may say another order, or cancel and load again, as often as it likes while a read takes its time."""
    bench.begin()
    for _ in range(500):
        if cancels:
            tasks = bench.tasks(*range(1, 33))
            bench.paths.put(tasks, 0)
            assert all(bench.paths.cancel(task) for task in tasks)
            bench.pool.free([task.chunk for task in tasks])
        else:
            tasks = tasks if _ else bench.tasks(*range(1, 33))
            if not _:
                bench.paths.put(tasks, 0)
            tasks.reverse()
            bench.paths.reorder(tasks)
    assert len(bench.paths._queue("disk")._heap) < 200


def test_what_somebody_begins_to_wait_for_is_promoted_and_runs_once(bench: Bench) -> None:
    bench.begin()
    later = bench.tasks(1, 2)
    bench.paths.put(later, 1)
    bench.paths.promote(later[1], 0)
    bench.paths.promote(later[1], 2)
    assert bench.finish(3) == [0, 2, 1]
    assert bench.ended.empty()


def test_an_order_that_changes_keeps_others_where_they_are(bench: Bench) -> None:
    bench.begin()
    mine, theirs = bench.tasks(1, 2, 3), bench.tasks(7)
    bench.paths.put(mine[:2], 0)
    bench.paths.put(theirs, 0)
    bench.paths.put(mine[2:], 0)
    bench.paths.reorder([mine[2], mine[0], mine[1]])
    assert bench.finish(5) == [0, 3, 1, 7, 2]


def test_a_cancelled_task_never_runs_and_one_that_has_begun_ends(bench: Bench) -> None:
    running = bench.begin()
    waiting, last = bench.tasks(1, 2)
    bench.paths.put([waiting, last], 0)
    assert bench.paths.cancel(waiting)
    assert not bench.paths.cancel(running)
    assert bench.finish(2) == [0, 2]
    assert waiting.state is TaskState.CANCELLED


def test_bytes_that_do_not_match_are_named_and_the_thread_goes_on(bench: Bench) -> None:
    bench.source.gate.set()
    bench.paths.put([bench.task(7, digest="0" * 32), bench.task(900), bench.task(8), bench.task(9, digest="")], 0)
    failed = [bench.ended.get(timeout=WAIT)[1] for _ in range(4)]
    assert isinstance(failed[0], CorruptCheckpoint)
    assert "gated: chunk 7 (bytes 28672 to 32768)" in failed[0].message
    assert isinstance(failed[1], InternalError)
    assert failed[2:] == [None, None]


def test_a_chunk_used_before_shows_nothing_of_its_last_content(bench: Bench) -> None:
    bench.source.gate.set()
    task = bench.task(3)
    bench.paths.put([task], 0)
    assert bench.finish(1) == [3]
    assert bytes(task.chunk.view) == content(3)
    bench.pool.free([task.chunk])
    short = bench.task(0, digest=chunk_digest(bytes(100)))
    assert short.chunk is task.chunk
    short.nbytes = 100
    bench.source.content = lambda number: bytes(SIZE)
    bench.paths.put([short], 0)
    assert bench.ended.get(timeout=WAIT) == (0, None)
    assert bytes(task.chunk.view) == bytes(SIZE)


def test_an_idle_path_takes_the_last_chunks_of_another_one(bench: Bench) -> None:
    bench.other.gate.set()
    both = (bench.source, bench.other)
    tasks = [bench.task(number, sources=both) for number in range(6)]
    bench.paths.put(tasks, 0)  # the disk is stuck at its gate; the other path is measured by the last chunk
    assert bench.ended.get(timeout=WAIT) == (5, None)
    assert tasks[5].path == "s3 b"
    assert tasks[5].remote
    assert bench.source.began.get(timeout=WAIT) == 0
    rest = {bench.ended.get(timeout=WAIT)[0] for _ in range(3)}  # one chunk at a time: the disk has no measure yet
    assert rest == {2, 3, 4}
    assert bench.finish(2) == [0, 1]
    assert (tasks[0].path, tasks[0].remote) == ("disk", False)


def test_an_idle_path_takes_of_the_first_class_alone(bench: Bench) -> None:
    bench.begin()
    both = (bench.source, bench.other)
    bench.paths.put([bench.task(number, sources=both) for number in (4, 5, 6)], 1)
    bench.paths.put([bench.task(number, sources=both) for number in (1, 2, 3)], 0)
    assert bench.other.began.get(timeout=WAIT) in (3, 6)  # the first three may have been looked at before the others
    bench.other.gate.set()
    taken = [bench.ended.get(timeout=WAIT)[0] for _ in range(2)]
    assert taken[-1] == (3 if taken[0] == 6 else 2)


def test_a_path_that_fails_has_no_bandwidth_by_it(bench: Bench) -> None:
    now = [0.0]
    ended: queue.Queue[SllmError | None] = queue.Queue()

    class Fails(Nothing):
        def run(self, path: str) -> None:
            now[0] += 1.0
            raise Unavailable("it is down")

    path = PathQueue("a", 1, lambda: now[0])
    try:
        path.put([Fails(0, SIZE, ("a",), lambda task, error: ended.put(error))])
        assert isinstance(ended.get(timeout=WAIT), Unavailable)
        assert path.bandwidth.value == 0
    finally:
        path.close()


class Down(GatedSource):
    """Nothing comes from there."""

    def read(self, view: memoryview, offset: int) -> str:
        super().read(view, offset)
        raise Unavailable("it is down")


def test_what_waits_for_a_path_that_fails_goes_to_another_one_and_it_is_left_alone(bench: Bench) -> None:
    """Each chunk that is asked of a peer that is cut off takes all of a reader's patience, at each load anew."""
    now = [0.0]
    down, other = Down("peer a"), bench.other
    with contextlib.closing(Paths(lambda path: 1, lambda: now[0])) as paths:

        def put(*numbers: int, sources: tuple[ChunkSource, ...] = (down, other)) -> None:
            paths.put([bench.task(number, sources=sources) for number in numbers], 0)

        put(0, 1, 2, 3, 4, 5)
        assert down.began.get(timeout=WAIT) == 0
        down.gate.set()
        number, error = bench.ended.get(timeout=WAIT)
        assert (number, type(error)) == (0, Unavailable)
        other.gate.set()
        assert dict(bench.ended.get(timeout=WAIT) for _ in range(5)) == dict.fromkeys(range(1, 6))
        put(6, 7)
        assert dict(bench.ended.get(timeout=WAIT) for _ in range(2)) == {6: None, 7: None}
        assert down.began.empty()
        put(8, sources=(down,))
        assert isinstance(bench.ended.get(timeout=WAIT)[1], Unavailable), "nobody else has it"
        assert down.began.get(timeout=WAIT) == 8
        assert paths.doubted("peer a")
        now[0] += FIRST_S
        assert not paths.doubted("peer a")
        put(9)
        assert isinstance(bench.ended.get(timeout=WAIT)[1], Unavailable)
        assert down.began.get(timeout=WAIT) == 9
        now[0] += FIRST_S
        assert paths.doubted("peer a"), "for twice as long"


class DownAtFirst(GatedSource):
    """So many reads fail."""

    def __init__(self, path: str, times: int) -> None:
        super().__init__(path)
        self.times = times

    def read(self, view: memoryview, offset: int) -> str:
        mode = super().read(view, offset)
        self.times -= 1
        if self.times >= 0:
            raise Unavailable("it is down")
        return mode


def test_a_path_that_has_failed_is_tried_again_within_a_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one chunk at a time, when its doubt is over, also where nothing new is asked for."""
    monkeypatch.setattr(doubt, "FIRST_S", 0.05)
    peer, other = DownAtFirst("peer a", 2), bench.other
    with contextlib.closing(Paths(lambda path: 1 if path == other.path else 3)) as paths:
        paths.put([bench.task(number, sources=(peer, other)) for number in range(40)], 0)
        assert other.began.get(timeout=WAIT) is not None, "it waits at its gate, and others wait for it"
        peer.gate.set()
        failed = [bench.ended.get(timeout=WAIT) for _ in range(2)]
        assert [type(error) for _, error in failed] == [Unavailable, Unavailable]
        assert bench.ended.get(timeout=WAIT)[1] is None, "it brings what waits elsewhere"
        assert not paths.doubted("peer a")
        other.gate.set()
        assert all(bench.ended.get(timeout=WAIT)[1] is None for _ in range(37))


def test_a_source_that_is_closed_here_says_nothing_of_its_path() -> None:
    ended: queue.Queue[SllmError | None] = queue.Queue()

    class Closed(Nothing):
        @property
        def remote(self) -> bool:
            return True

        def run(self, path: str) -> None:
            raise SourceClosed("it was closed while it was read")

    path = PathQueue("s3 b", 1)
    try:
        path.put([Closed(0, SIZE, ("s3 b",), lambda task, error: ended.put(error))])
        error = ended.get(timeout=WAIT)
        assert isinstance(error, Unavailable)
        assert (error.code, type(error.body().to_error()), path.doubted) == ("unavailable", Unavailable, False)
    finally:
        path.close()


def test_a_path_that_is_down_for_long_is_asked_seldom_and_one_that_serves_is_in_no_doubt() -> None:
    doubt, now = Doubt(), 0.0
    pauses = []
    for _ in range(8):
        assert doubt.failed(now)
        assert not doubt.failed(now), "with the first that fails others do"
        pauses.append(doubt.pause_s)
        now += doubt.pause_s
        assert not doubt.holds(now)
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert max(pauses) == pauses[-1] == LONGEST_S
    assert doubt.failed(now)
    doubt.served()
    assert not doubt.holds(now)
    assert doubt.failed(now)
    assert doubt.pause_s == FIRST_S


def test_of_too_many_paths_those_in_use_stay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sllm_paths, "_MOST_PATHS", 1)
    bench.begin()
    (waiting,) = bench.tasks(1)
    bench.paths.put([waiting], 1)
    bench.other.gate.set()
    bench.paths.put([bench.task(2, sources=(bench.other,))], 0)
    assert bench.ended.get(timeout=WAIT) == (2, None)
    assert {status.path for status in bench.paths.status()} == {"disk", "s3 b"}
    bench.paths.promote(waiting, 0)
    assert bench.finish(2) == [0, 1]


def test_what_the_page_cache_had_says_nothing_of_its_path(bench: Bench) -> None:
    bench.source.gate.set()
    bench.source.mode = CACHED
    bench.paths.put([bench.task(number) for number in range(3)], 0)
    assert bench.finish(3) == [0, 1, 2]
    (disk,) = bench.paths.status()
    assert (disk.bandwidth, disk.mode) == (0.0, "")
    bench.source.mode = "direct"
    bench.paths.put([bench.task(3)], 0)
    assert bench.finish(1) == [3]
    (disk,) = bench.paths.status()
    assert disk.bandwidth > 0
    assert disk.mode == "direct"


def test_a_task_that_failed_runs_again_on_its_next_source(bench: Bench) -> None:
    bench.other.gate.set()
    task = bench.task(2, sources=(bench.source, bench.other))
    bench.source.gate.set()
    bench.source.content = lambda number: bytes(SIZE)
    bench.paths.put([task], 0)
    _, error = bench.ended.get(timeout=WAIT)
    assert isinstance(error, CorruptCheckpoint)
    assert task.next_source()
    bench.paths.again(task)
    assert bench.ended.get(timeout=WAIT) == (2, None)
    assert task.path == "s3 b"
    assert not task.next_source()


def test_nothing_is_taken_after_close(bench: Bench) -> None:
    bench.source.gate.set()
    bench.paths.put(bench.tasks(1), 0)
    assert bench.finish(1) == [1]
    bench.paths.close()
    late = bench.task(2)
    bench.paths.put([late], 0)
    assert late.state is TaskState.NEW


class Checked(Task):
    """A task that runs at once, and whose check waits at a gate."""

    def __init__(self, number: int, ran: queue.Queue[int], gate: threading.Event, ended: queue.Queue[int]) -> None:
        super().__init__(number, SIZE, ("a",), lambda task, error: ended.put(task.number))
        self._ran, self._gate = ran, gate

    def run(self, path: str) -> None:
        self._ran.put(self.number)

    def check(self) -> None:
        assert self._gate.wait(WAIT)


def test_a_path_goes_on_while_what_it_brought_is_checked() -> None:
    ran: queue.Queue[int] = queue.Queue()
    ended: queue.Queue[int] = queue.Queue()
    gate = threading.Event()
    paths = Paths(lambda path: 1, spare=lambda path: 1)
    try:
        paths.put([Checked(number, ran, gate, ended) for number in range(4)], 0)
        assert [ran.get(timeout=WAIT) for _ in range(2)] == [0, 1]  # as many as there are threads, and no more
        assert ran.empty()
        gate.set()
        assert [ran.get(timeout=WAIT) for _ in range(2)] == [2, 3]
        assert sorted(ended.get(timeout=WAIT) for _ in range(4)) == [0, 1, 2, 3]
    finally:
        gate.set()
        paths.close()


def test_a_check_takes_none_of_the_paths_time() -> None:
    """Else a small load, most of which is its last check, seems to have had a slower path than a large one."""
    now = 0.0
    ended: queue.Queue[int] = queue.Queue()

    class Slow(Nothing):
        def run(self, path: str) -> None:
            nonlocal now
            now += 1.0

        def check(self) -> None:
            nonlocal now
            now += 7.0

    path = PathQueue("a", 1, lambda: now)
    try:
        for number in range(2):
            path.put([Slow(number, SIZE, ("a",), lambda task, error: ended.put(task.number))])
            assert ended.get(timeout=WAIT) == number
        assert path.bandwidth.value == pytest.approx(SIZE)
    finally:
        path.close()


def test_spare_threads_run_no_more_tasks_at_a_time(bench: Bench) -> None:
    paths = Paths(lambda path: 1, spare=lambda path: 3)
    try:
        paths.put(bench.tasks(0, 1, 2), 0)
        assert bench.source.began.get(timeout=WAIT) == 0
        assert bench.source.began.empty()  # the one place is taken
        assert sorted(bench.finish(3)) == [0, 1, 2]  # their checks, behind the reads, end in any order
        assert [bench.source.began.get(timeout=WAIT) for _ in range(2)] == [1, 2]
    finally:
        bench.source.gate.set()
        paths.close()


def test_bandwidth_is_bytes_over_busy_seconds_and_forgets() -> None:
    measured = Bandwidth(horizon=2.0)
    assert measured.value == 0
    measured.add(100, 0.1)
    assert measured.value == pytest.approx(1000)
    for _ in range(200):
        measured.add(50, 0.1)
    assert measured.value == pytest.approx(500, rel=0.01)


def test_a_probe_is_worth_the_median_of_its_reads_until_there_is_a_load() -> None:
    measured = Bandwidth(horizon=100.0)
    for turn, seconds in enumerate((0.1, 2.5, 0.1, 0.11, 0.09)):  # the second one waited for something else
        for _ in range(4):
            measured.probed(turn, 25, seconds / 4)
    assert measured.value == pytest.approx(1000)
    measured.add(500, 1.0)
    assert measured.value == pytest.approx(1000 / 1.5, rel=0.02), "its bytes count as well, at that speed"
    measured.probed(5, 500, 1.0)
    assert measured.value == pytest.approx(1500 / 2.5, rel=0.02), "now all that comes is of this moment"


def test_one_read_of_a_probe_that_was_held_up_makes_no_path_slow() -> None:
    now, ended = 0.0, queue.Queue[int]()

    class Read(Task):
        def run(self, path: str) -> None:
            nonlocal now
            now += 9.0 if self.probe == 1 else 1.0

    path = PathQueue("a", 1, lambda: now)
    try:
        for turn in range(3):
            task = Read(turn, SIZE, ("a",), lambda task, error: ended.put(task.number))
            task.probe = turn
            path.put([task])
            assert ended.get(timeout=WAIT) == turn
        assert path.bandwidth.value == pytest.approx(SIZE)
    finally:
        path.close()


class Nothing(Task):
    """A task that is only weighed."""

    @classmethod
    def of(cls, nbytes: int) -> Nothing:
        return cls(0, nbytes, ("a", "b"), lambda task, error: None)

    def run(self, path: str) -> None:
        raise NotImplementedError


@given(
    speeds=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    ahead=st.integers(0, 50),
    busy=st.integers(0, 3),
)
def test_a_chunk_changes_paths_only_if_it_is_there_sooner(speeds: tuple[int, int], ahead: int, busy: int) -> None:
    owner, thief = PathQueue("a", 1), PathQueue("b", 1)
    owner.bandwidth.add(speeds[0] * SIZE, 1.0)
    thief.bandwidth.add(speeds[1] * SIZE, 1.0)
    thief.running = [Nothing.of(SIZE) for _ in range(busy)]
    stays, goes = (ahead + 1) / speeds[0], (busy + 1) / speeds[1]
    if stays != pytest.approx(goes):
        assert sooner(Nothing.of(SIZE), ahead * SIZE, owner, thief) is (goes < stays)


@pytest.mark.parametrize("known", ["neither", "owner", "thief"])
def test_a_path_that_was_never_measured_takes_one_chunk_at_a_time(known: str) -> None:
    """Only where that would wait for two others: nobody knows how long it takes there."""
    owner, thief = PathQueue("a", 1), PathQueue("b", 1)
    if known != "neither":
        (owner if known == "owner" else thief).bandwidth.add(SIZE, 1.0)
    task = Nothing.of(SIZE)
    assert [sooner(task, ahead * SIZE, owner, thief) for ahead in range(4)] == [False, False, True, True]
    thief.running.append(Nothing.of(SIZE))
    assert not sooner(task, 9 * SIZE, owner, thief)


def test_a_path_that_gives_nothing_for_long_says_so_before_its_first_chunk_is_there() -> None:
    """Many starts may be decided on while the first large chunk of a slow store is on its way."""
    now = [100.0]
    paths, source = Paths(lambda path: 1, lambda: now[0]), GatedSource("s3 a")
    ended: queue.Queue[object] = queue.Queue()
    with contextlib.closing(paths), contextlib.closing(ChunkPool(SIZE, 2 * SIZE, 0)) as pool:

        def read(number: int) -> None:
            chunk = pool.allocate(1)[0]
            task = ReadChunk(number, number * SIZE, SIZE, None, chunk, [source], lambda task, error: ended.put(error))
            paths.put([task], 0)
            assert source.began.get(timeout=WAIT) == number

        def bandwidth() -> float:
            (status,) = paths.status()
            return status.bandwidth

        read(0)
        assert bandwidth() == 0
        now[0] += SIZE / 1e9
        assert bandwidth() == 0, "it may be as fast as an unused path is taken to be"
        now[0] = 100.0 + 2.0
        assert bandwidth() == pytest.approx(SIZE / 2.0)
        now[0] = 100.0 + 4.0
        assert bandwidth() == pytest.approx(SIZE / 4.0)
        source.gate.set()
        assert ended.get(timeout=WAIT) is None
        source.gate.clear()
        assert bandwidth() == pytest.approx(SIZE / 4.0)
        now[0] += 60.0
        assert bandwidth() == pytest.approx(SIZE / 4.0), "nothing is asked of it"
        read(1)
        assert bandwidth() == pytest.approx(SIZE / 4.0)
        now[0] += 400.0
        assert bandwidth() == pytest.approx(SIZE / 400.0, rel=0.01)
        source.gate.set()
        assert ended.get(timeout=WAIT) is None

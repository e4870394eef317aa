"""The queue of a path: order, classes, promotion, cancelling, and errors that name the chunk."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest

from sllm_loaderd.files import chunk_digest
from sllm_loaderd.path_queue import ChunkTask, PathQueue, TaskState
from sllm_loaderd.pool import ChunkPool
from sllm_runtime.protocol.errors import CorruptCheckpoint, InternalError, SllmError

SIZE = 4096
WAIT = 10.0


class GatedSource:
    """Bytes that say their own offset; reads wait until the gate is open."""

    path = "test"
    name = "gated"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began: queue.Queue[int] = queue.Queue()

    def read(self, view: memoryview, offset: int) -> None:
        self.began.put(offset)
        assert self.gate.wait(WAIT)
        if offset >= 900 * SIZE:
            raise RuntimeError("a bug")
        view[:] = content(offset // SIZE)

    def close(self) -> None:
        pass


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


class Bench:
    """One queue with one thread, a source and a pool."""

    def __init__(self) -> None:
        self.source = GatedSource()
        self.pool = ChunkPool(SIZE, 64 * SIZE, 0)
        self.queue = PathQueue("test", 1)
        self.ended: queue.Queue[tuple[int, SllmError | None]] = queue.Queue()

    def task(self, number: int, digest: str | None = None) -> ChunkTask:
        return ChunkTask(
            number,
            number * SIZE,
            SIZE,
            digest or chunk_digest(content(number)),
            self.pool.allocate(1)[0],
            self.source,
            lambda task, error: self.ended.put((task.number, error)),
        )

    def close(self) -> None:
        self.source.gate.set()
        self.queue.close()
        self.pool.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with contextlib.closing(Bench()) as made:
        yield made


def numbers(bench: Bench, count: int) -> list[int]:
    return [bench.ended.get(timeout=WAIT)[0] for _ in range(count)]


def test_classes_go_before_arrival_and_arrival_orders_a_class(bench: Bench) -> None:
    bench.queue.put([bench.task(0)], 1)
    assert bench.source.began.get(timeout=WAIT) == 0
    bench.queue.put([bench.task(1), bench.task(2)], 2)
    bench.queue.put([bench.task(3)], 1)
    bench.queue.put([bench.task(4), bench.task(5)], 0)
    assert bench.queue.status().queued == {"start": 2 * SIZE, "prewarm": SIZE, "write-back": 2 * SIZE}
    bench.source.gate.set()
    assert numbers(bench, 6) == [0, 4, 5, 3, 1, 2]
    assert bench.queue.status().bandwidth > 0


def test_what_somebody_begins_to_wait_for_is_promoted_and_runs_once(bench: Bench) -> None:
    bench.queue.put([bench.task(0)], 0)
    assert bench.source.began.get(timeout=WAIT) == 0
    later = [bench.task(1), bench.task(2)]
    bench.queue.put(later, 1)
    bench.queue.promote(later[1], 0)
    bench.queue.promote(later[1], 2)
    bench.source.gate.set()
    assert numbers(bench, 3) == [0, 2, 1]
    assert bench.ended.empty()


def test_a_cancelled_task_never_runs_and_one_that_has_begun_ends(bench: Bench) -> None:
    running, waiting, last = bench.task(0), bench.task(1), bench.task(2)
    bench.queue.put([running, waiting, last], 0)
    assert bench.source.began.get(timeout=WAIT) == 0
    assert bench.queue.cancel(waiting)
    assert not bench.queue.cancel(running)
    bench.source.gate.set()
    assert numbers(bench, 2) == [0, 2]
    assert waiting.state is TaskState.CANCELLED


def test_bytes_that_do_not_match_are_named_and_the_thread_goes_on(bench: Bench) -> None:
    bench.source.gate.set()
    bench.queue.put([bench.task(7, digest="0" * 32), bench.task(900), bench.task(8)], 0)
    failed = [bench.ended.get(timeout=WAIT)[1] for _ in range(3)]
    assert isinstance(failed[0], CorruptCheckpoint)
    assert "gated: chunk 7 (bytes 28672 to 32768)" in failed[0].message
    assert isinstance(failed[1], InternalError)
    assert failed[2] is None


def test_a_chunk_used_before_shows_nothing_of_its_last_content(bench: Bench) -> None:
    bench.source.gate.set()
    task = bench.task(3)
    bench.queue.put([task], 0)
    assert numbers(bench, 1) == [3]
    assert bytes(task.chunk.view) == content(3)
    bench.pool.free([task.chunk])
    short = bench.task(0, digest=chunk_digest(bytes(100)))
    assert short.chunk is task.chunk
    short.nbytes = 100
    bench.source.read = lambda view, offset: view.__setitem__(slice(None), bytes(len(view)))  # type: ignore[method-assign]
    bench.queue.put([short], 0)
    assert bench.ended.get(timeout=WAIT) == (0, None)
    assert bytes(task.chunk.view) == bytes(SIZE)

"""The disk and the stores are measured before the first load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from benchmarks import cold_gigabyte
from benchmarks.synthetic import write
from sllm_invoker.loader import Loader
from sllm_loaderd import huge_pages
from sllm_loaderd import probe as sllm_probe
from sllm_loaderd.chunk import Chunk, close_chunk, create_chunk
from sllm_loaderd.client import memory
from sllm_loaderd.convert.directory import convert_directory
from sllm_loaderd.daemon import measuring
from sllm_loaderd.paths import Paths
from sllm_loaderd.probe import LEAST, MOST, MOST_OF_STORE, MOST_STORES, READS, STORE_S, probe, probe_stores
from sllm_loaderd.store import ModelStore
from sllm_loaderd.task import Task
from sllm_loaderd.turns import turn
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import DISK, PRIORITIES, PathStatus, path_of
from tests.fixtures.loaderd import loaderd
from tests.fixtures.range_server import range_server
from tests.fixtures.waiting import GIVE_UP_S, until


def file(directory: Path, name: str, nbytes: int) -> Path:
    made = directory / name
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_bytes(bytes(nbytes))
    return made


def reads_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def size_of(reads: Sequence[Task]) -> int:
    return sum(read.nbytes for read in reads)


def fail() -> None:
    raise AssertionError("nothing is read, or it is not told of")


HOLDER = """
import asyncio, sys
from sllm_loaderd.turns import turn
async def main():
    async with turn(sys.argv[1]):
        print("mine", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def idle(status: tuple[PathStatus, ...]) -> bool:
    return bool(status) and not any(status[0].queued.values())


async def test_the_largest_file_is_read_behind_all_loads(tmp_path: Path) -> None:
    small, large = file(tmp_path, "a", LEAST), file(tmp_path, "b", 2 * LEAST + 5)
    gone = tmp_path / "c"
    with contextlib.closing(Paths(lambda path: 2)) as paths:
        ended = threading.Event()
        assert size_of(probe([small, large, gone], paths, ended.set)) == 2 * LEAST
        await until(lambda: idle(paths.status()), what="it was read")
        assert ended.is_set(), "whoever waits for its end is told"
        (disk,) = paths.status()
        assert disk.path == DISK
        assert (disk.bandwidth > 0) == reads_direct(large)
        if disk.bandwidth:
            assert probe([large], paths, fail) == [], "it is measured"


async def test_a_disk_is_read_from_several_times_each_time_elsewhere(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "QUIET_WITHIN_S", 0.0)
    monkeypatch.setattr(measuring, "BETWEEN_S", 0.0)
    monkeypatch.setattr("sllm_loaderd.probe.MOST", LEAST)
    file(tmp_path / "models" / ("ef" * 32), "partition_0.bin", READS * LEAST)
    with contextlib.closing(Paths(lambda path: 2)) as paths:
        read, put = list[int](), paths.put

        def seen(tasks: Sequence[Task], priority: int) -> None:
            read.extend(task.number for task in tasks)
            put(tasks, priority)

        monkeypatch.setattr(paths, "put", seen)
        measures = measuring.Measuring(store, paths, lambda: (0.0, 1.0))
        measures.look()
        assert measures._disk is not None
        await measures._disk
        assert read == list(range(READS))
        await until(lambda: idle(paths.status()), what="its last read's end was told")
        await measures.close()


@pytest.mark.parametrize("huge", [False, True])
async def test_a_disk_is_read_into_memory_as_loads_read_it(
    store: ModelStore, tmp_path: Path, huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into pages as large as theirs, and each piece into its own; the memory is gone when nothing is read any more."""
    monkeypatch.setattr(measuring, "QUIET_WITHIN_S", 0.0)
    monkeypatch.setattr(measuring, "BETWEEN_S", 0.0)
    file(tmp_path / "models" / ("ef" * 32), "partition_0.bin", 2 * LEAST)
    asked, made, gone = list[int](), list[int](), list[int]()
    advise = memory.advise

    def advised(address: int, size: int, advice: int) -> bool:
        asked.append(advice)
        return advise(address, size, advice)

    def created(size: int, *, huge: bool, lasting: bool) -> Chunk:
        chunk = create_chunk(size, huge=huge, lasting=lasting)
        made.append(chunk.id)
        return chunk

    def closed(chunk: Chunk) -> None:
        close_chunk(chunk)
        gone.append(chunk.id)

    monkeypatch.setattr(memory, "advise", advised)
    monkeypatch.setattr(huge_pages, "taken", lambda: 0)
    monkeypatch.setattr(sllm_probe, "create_chunk", created)
    monkeypatch.setattr(sllm_probe, "close_chunk", closed)
    with contextlib.closing(Paths(lambda path: 2)) as paths:
        measures = measuring.Measuring(store, paths, lambda: (0.0, 1.0), huge=huge)
        measures.look()
        assert measures._disk is not None
        await measures._disk
        await measures.close()
    assert len(made) == len(set(made)) == 2 * READS
    of_each = [memory.MADV_HUGEPAGE, *[memory.MADV_POPULATE_WRITE] * 2, memory.MADV_COLLAPSE]
    assert asked == 2 * READS * (of_each if huge else of_each[1:3])
    assert sorted(gone) == sorted(made)


def test_no_more_is_read_than_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Paths(lambda path: 1)) as paths:
        put: list[tuple[int, int]] = []
        monkeypatch.setattr(paths, "put", lambda tasks, priority: put.append((len(tasks), priority)))
        assert probe([], paths, fail) == []
        assert probe([file(tmp_path, "a", LEAST - 1)], paths, fail) == []
        large = tmp_path / "b"
        with large.open("wb") as sparse:
            sparse.truncate(MOST + 7 * MIB)
        assert size_of(probe([large], paths, fail)) == MOST
        assert [priority for _, priority in put] == [len(PRIORITIES) - 1]


async def test_a_node_with_models_says_how_fast_its_disk_is_before_it_loads_one(tmp_path: Path) -> None:
    """Each loaderd that its invoker meets, once that has begun."""
    there = file(tmp_path / "data" / "models" / ("ab" * 32), "partition_0.bin", 2 * LEAST)
    invoker, tasks = Loader(tmp_path / "loaderd.sock"), Tasks("test")
    tasks.start(invoker.run(), "loader")

    def measured() -> bool:
        paths = invoker.status.paths if invoker.status is not None else ()
        return idle(paths) and (paths[0].bandwidth > 0) == reads_direct(there)

    try:
        for _ in range(2):
            async with loaderd(tmp_path):
                await until(lambda: invoker.status is not None, what="they know each other")
                invoker.begun()
                await until(measured, what="the disk is measured")
            await until(lambda: invoker.status is None, what="the invoker knows that it is gone")
    finally:
        await tasks.close()
        await invoker.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModelStore]:
    """With a model, on a disk that no other process's loaderd has."""
    file(tmp_path / "models" / ("ab" * 32), "partition_0.bin", 2 * LEAST)
    with contextlib.closing(ModelStore(tmp_path)) as made:
        made.device = -os.getpid()
        yield made


async def test_a_model_that_comes_while_the_disk_is_looked_at_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "QUIET_WITHIN_S", 0.0)
    monkeypatch.setattr(measuring, "BETWEEN_S", 0.0)
    looked, go = threading.Event(), threading.Event()
    with contextlib.closing(ModelStore(tmp_path)) as store, contextlib.closing(Paths(lambda path: 2)) as paths:
        files = store.files

        def slowly() -> list[Path]:
            found = files()
            looked.set()
            assert go.wait(GIVE_UP_S)
            return found

        monkeypatch.setattr(store, "files", slowly)
        store.device = -os.getpid()
        measures = measuring.Measuring(store, paths, lambda: (0.0, 1.0))
        measures.look()
        await until(looked.is_set, what="it has found nothing")
        there = file(tmp_path / "models" / ("ab" * 32), "partition_0.bin", 2 * LEAST)
        measures.look()
        go.set()
        assert measures._disk is not None
        await measures._disk
        assert (paths.status()[0].bandwidth > 0) == reads_direct(there)
        await measures.close()


async def test_a_disk_is_measured_in_turn(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has none in time has read nothing, and tries again."""
    monkeypatch.setattr(measuring, "_GLANCE_S", 0.001)
    monkeypatch.setattr(measuring, "AGAIN_S", 0.01)
    caplog.set_level("INFO")
    with contextlib.closing(Paths(lambda path: 2)) as paths:
        glances = count()
        measures = measuring.Measuring(store, paths, lambda: (now := float(next(glances)), now))
        async with turn(f"sllm-disk-{store.device}"):
            monkeypatch.setattr(measuring, "READ_WITHIN_S", 0.2)
            measures.look()
            await until(lambda: caplog.text.count("not within 0.2 s") == 2, what="it has had no turn twice")
            assert next(glances) >= 2, "it was quiet"
            monkeypatch.setattr(measuring, "READ_WITHIN_S", GIVE_UP_S)
            assert paths.status() == ()
        await until(lambda: idle(paths.status()), what="it was read")
        await measures.close()


async def test_what_is_not_read_in_time_is_not_read_in_the_turn_of_another(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(measuring, "AGAIN_S", GIVE_UP_S)
    monkeypatch.setattr(measuring, "QUIET_WITHIN_S", 0.0)
    monkeypatch.setattr(measuring, "READ_WITHIN_S", 0.2)
    with contextlib.closing(Paths(lambda path: 1)) as paths:
        held, go = threading.Event(), threading.Event()
        paths.put([Holds(held, go)], 0)
        await until(held.is_set, what="the disk is in use")
        measures = measuring.Measuring(store, paths, lambda: (0.0, 1.0))
        measures.look()
        await until(lambda: "not within 0.2 s" in caplog.text, what="it is given up")
        go.set()
        await until(lambda: idle(paths.status()), what="the disk is free")
        assert paths.status()[0].bandwidth == 0
        await measures.close()


class Holds(Task):
    """The disk's only thread, until it may go on."""

    def __init__(self, held: threading.Event, go: threading.Event) -> None:
        super().__init__(0, 0, (DISK,), lambda task, error: None)
        self._held, self._go = held, go

    def run(self, path: str) -> None:
        self._held.set()
        assert self._go.wait(GIVE_UP_S)


async def test_a_busy_machine_is_measured_when_it_is_quiet(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when it has been busy for long."""
    monkeypatch.setattr(measuring, "_GLANCE_S", 0.001)
    times = [(idle, float(total)) for total, idle in enumerate((0.0, 0.4, 0.8, 1.2, 1.8))]
    for long, glances in ((GIVE_UP_S, 5), (0.0, 1)):
        monkeypatch.setattr(measuring, "QUIET_WITHIN_S", long)
        left = list(reversed(times))
        with contextlib.closing(Paths(lambda path: 2)) as paths:
            measures = measuring.Measuring(store, paths, left.pop)
            measures.begun()
            measures.begun()
            await until(lambda paths=paths: idle(paths.status()), what="it was read")  # type: ignore[misc]
            assert len(left) == len(times) - glances
            assert (paths.status()[0].bandwidth > 0) == all(map(reads_direct, store.files()))
            await measures.close()
    idle_s, total_s = measuring.processor_time()
    assert 0 < idle_s < total_s


async def test_who_waits_for_a_turn_has_it_when_the_other_has_ended(tmp_path: Path) -> None:
    """However that was, and one of them at a time."""
    name, there = f"sllm-test-{os.getpid()}", list[int]()
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, name, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"mine\n"

    async def waiting() -> None:
        async with turn(name):
            there.append(1)
            assert sum(there) == 1
            await asyncio.sleep(0.01)
            there.append(-1)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await waiting()
    waiters = [asyncio.create_task(waiting()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not there
    holder.kill()
    async with asyncio.timeout(GIVE_UP_S):
        await asyncio.gather(*waiters)
        await holder.wait()
    assert len(there) == 10


class Store:
    """An object of ``nbytes`` bytes; each read takes as long as ``takes_s`` says."""

    name = "object"

    def __init__(self, path: str, nbytes: int, clock: list[float], takes_s: float = 0.01, broken: bool = False) -> None:
        self.path, self.nbytes, self._clock, self._takes_s, self._broken = path, nbytes, clock, takes_s, broken
        self.read_bytes = 0

    def read(self, view: memoryview, offset: int) -> str:
        if self._broken:
            raise Unavailable("the store is not there")
        assert offset + len(view) <= self.nbytes
        self.read_bytes += len(view)
        self._clock[0] += self._takes_s
        return ""

    def close(self) -> None:
        pass


async def test_the_largest_object_of_each_store_is_read_for_a_moment() -> None:
    """No more of it than is needed, and nothing of one that is known, is small, or cannot be reached."""
    clock = [50.0]
    small, large = Store("s3 a", LEAST, clock), Store("s3 a", MOST_OF_STORE + 5 * MIB, clock)
    slow = Store("http b", MOST_OF_STORE, clock, takes_s=STORE_S / 2)
    tiny, gone = Store("http c", LEAST - 1, clock), Store("http d", LEAST, clock, broken=True)
    with contextlib.closing(Paths(lambda path: 1, lambda: clock[0])) as paths:

        def told() -> dict[str, float]:
            return {status.path: status.bandwidth for status in paths.status()}

        for stores, path in (((small, large), "s3 a"), ((slow,), "http b"), ((gone,), "http d"), ((tiny,), "")):
            assert probe_stores(stores, paths, lambda: clock[0]) == [path][: bool(path)]
            await until(lambda: not any(any(each.queued.values()) for each in paths.status()), what="it was read")
        assert (small.read_bytes, large.read_bytes) == (0, MOST_OF_STORE)
        assert slow.read_bytes == 3 * MIB, "the third piece begins when the time is just over"
        assert told() == {"s3 a": pytest.approx(MIB / 0.01), "http b": pytest.approx(2 * MIB / STORE_S), "http d": 0}
        assert probe_stores([large, slow], paths) == [], "once"
        assert probe_stores([Store("http d", LEAST, clock)], paths) == ["http d"]


def test_of_many_stores_some_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Paths(lambda path: 1)) as paths:
        put: list[int] = []
        monkeypatch.setattr(paths, "put", lambda tasks, priority: put.append(priority))
        stores = [Store(f"http {number}", (1 + number) * LEAST, [0.0]) for number in range(2 * MOST_STORES)]
        assert len(probe_stores(stores, paths)) == MOST_STORES
        assert put == [len(PRIORITIES) - 1] * MOST_STORES


async def test_a_node_says_how_fast_a_store_is_before_it_loads_from_it(tmp_path: Path) -> None:
    """From when a model of it is registered, and again after its own restart."""
    write(tmp_path / "model", 2 * LEAST, cold_gigabyte.STEP)
    convert_directory(tmp_path / "model", tmp_path / "served" / "model")
    with range_server(tmp_path / "served") as server:
        for begins in (True, False):
            async with loaderd(tmp_path) as daemon:
                if begins:
                    await daemon.control.register(f"{server.url}/model")
                else:
                    await daemon.control.status(begun=True)

                async def measured() -> bool:
                    paths = (await daemon.control.status()).paths
                    return any(each.path == path_of(server.url) and each.bandwidth for each in paths)

                await until(measured, what="the store is measured")
                assert (await daemon.control.status()).resident == (), "nothing was loaded"

"""The disk and the stores are measured before the first load."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from benchmarks import cold_gigabyte
from benchmarks.synthetic import write
from sllm_loaderd.convert.directory import convert_directory
from sllm_loaderd.paths import Paths
from sllm_loaderd.probe import LEAST, MOST, MOST_OF_STORE, MOST_STORES, STORE_S, probe, probe_stores
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import DISK, PRIORITIES, PathStatus, path_of
from tests.fixtures.loaderd import loaderd
from tests.fixtures.range_server import range_server
from tests.fixtures.waiting import until


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


def idle(status: tuple[PathStatus, ...]) -> bool:
    return bool(status) and not any(status[0].queued.values())


async def test_the_largest_file_is_read_behind_all_loads(tmp_path: Path) -> None:
    small, large = file(tmp_path, "a", LEAST), file(tmp_path, "b", 2 * LEAST + 5)
    gone = tmp_path / "c"
    with contextlib.closing(Paths(lambda path: 2)) as paths:
        assert probe([small, large, gone], paths) == 2 * LEAST
        await until(lambda: idle(paths.status()), what="it was read")
        (disk,) = paths.status()
        assert disk.path == DISK
        assert (disk.bandwidth > 0) == reads_direct(large)
        if disk.bandwidth:
            assert probe([large], paths) == 0, "once"


def test_no_more_is_read_than_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Paths(lambda path: 1)) as paths:
        put: list[tuple[int, int]] = []
        monkeypatch.setattr(paths, "put", lambda tasks, priority: put.append((len(tasks), priority)))
        assert probe([], paths) == 0
        assert probe([file(tmp_path, "a", LEAST - 1)], paths) == 0
        large = tmp_path / "b"
        with large.open("wb") as sparse:
            sparse.truncate(MOST + 7 * MIB)
        assert probe([large], paths) == MOST
        assert [priority for _, priority in put] == [len(PRIORITIES) - 1]


async def test_a_node_with_models_says_how_fast_its_disk_is_before_it_loads_one(tmp_path: Path) -> None:
    there = file(tmp_path / "data" / "models" / ("ab" * 32), "partition_0.bin", 2 * LEAST)
    async with loaderd(tmp_path) as daemon:

        async def measured() -> bool:
            paths = (await daemon.control.status()).paths
            return idle(paths) and (paths[0].bandwidth > 0) == reads_direct(there)

        await until(measured, what="the disk is measured")


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

                async def measured() -> bool:
                    paths = (await daemon.control.status()).paths
                    return any(each.path == path_of(server.url) and each.bandwidth for each in paths)

                await until(measured, what="the store is measured")
                assert (await daemon.control.status()).resident == (), "nothing was loaded"

"""The disk is measured before the first load."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from sllm_loaderd.paths import Paths
from sllm_loaderd.probe import LEAST, MOST, probe
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import DISK, PRIORITIES, PathStatus
from tests.fixtures.loaderd import loaderd
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

"""The real daemon loads models whose bytes are elsewhere, and copies them to the SSD tier beside the load."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sllm_runtime.protocol.errors import Conflict, Forbidden, SllmError
from tests.fixtures.loaderd import SMALL_CHUNK, loaded, loaderd, numbers_model, same, small_checkpoint
from tests.fixtures.range_server import RangeServer, range_server
from tests.fixtures.sources import KEYS, KeyProgram, object_store, s3_settings
from tests.fixtures.waiting import GIVE_UP_S, until

WAIT = GIVE_UP_S


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, str]:
    directory, digest = small_checkpoint(tmp_path)
    served = tmp_path / "served" / "bucket" / "tiny"
    shutil.copytree(directory, served)
    return served, digest


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    return numbers_model(tmp_path / "again")


@pytest.fixture
def server(published: tuple[Path, str]) -> Iterator[RangeServer]:
    with range_server(published[0].parent) as running:
        yield running


async def test_a_model_of_an_object_store_comes_by_ranges_and_stays_on_the_ssd_tier(
    published: tuple[Path, str], arrays: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(tmp_path / "served") as endpoint:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        async with loaderd(tmp_path) as daemon:
            info = await daemon.control.register("s3://bucket/tiny")
            assert info.model == published[1]
            same(await loaded(daemon, info.model), arrays)
            await until(lambda: len(list((daemon.data / "ssd").glob("*.bin"))) == 1, what="the SSD copy")
            status = await daemon.control.status()
            assert status.remote == (info.model,)
            assert status.ssd is not None
            assert status.ssd.copies == ((info.model, 0, info.nbytes),)
            assert {path.path for path in status.paths} == {"disk", "s3 bucket"}
            await daemon.control.validate(info.model)
    async with loaderd(tmp_path) as daemon:  # the object store is gone
        same(await loaded(daemon, published[1]), arrays)
        await daemon.control.delete(published[1])
        assert not list((daemon.data / "ssd").iterdir())


async def test_a_tier_without_room_costs_the_copy_and_not_the_load(
    published: tuple[Path, str], server: RangeServer, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    async with loaderd(tmp_path, ssd_bytes=4096) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        same(await loaded(daemon, info.model), arrays)
        status = await daemon.control.status()
        assert status.ssd is not None
        assert (status.ssd.used, status.ssd.limit, status.ssd.copies) == (0, 4096, ())


async def test_a_spoiled_ssd_copy_is_made_good_by_the_source(
    published: tuple[Path, str], server: RangeServer, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        same(await loaded(daemon, info.model), arrays)
        await until(lambda: len(list((daemon.data / "ssd").glob("*.bin"))) == 1, what="the SSD copy")
        (copy,) = (daemon.data / "ssd").glob("*.bin")
        for at in range(100, copy.stat().st_size, SMALL_CHUNK):
            spoil(copy, at)
        holders = (f"holder-{number}" for number in itertools.count())
        noticed = False
        while not noticed:
            # A chunk that the source brings sooner than a busy disk is read there, and nobody looks at the copy.
            await daemon.control.evict(info.model)
            same(await loaded(daemon, info.model, next(holders)), arrays)
            noticed = not is_spoiled(copy, 100)
        # That load makes a new one, or the next does: where chunks of the source came first, there still was one.
        await daemon.control.evict(info.model)
        same(await loaded(daemon, info.model, next(holders)), arrays)
        whole = (published[0] / "partition_0.bin").read_bytes()
        await until(lambda: copy.exists() and copy.read_bytes() == whole, what="a new copy in place of the spoiled one")


def spoil(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"spoiled")


def is_spoiled(file: Path, at: int) -> bool:
    """Whether it is still the file that was spoiled there."""
    try:
        return file.read_bytes()[at:].startswith(b"spoiled")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("word", "error"), [("status 403", Forbidden), ("bigger", Conflict), ("wrong-range", SllmError)]
)
async def test_a_load_that_is_refused_ends_with_the_reason_and_frees_everything(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path, word: str, error: type[SllmError]
) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        server.script.extend([word] * 50)
        with pytest.raises(error, match=r"tiny/partition_0\.bin \(bytes \d+ to \d+\)"):
            await loaded(daemon, info.model)
        deadline = time.monotonic() + WAIT
        while (status := await daemon.control.status()).resident:
            assert time.monotonic() < deadline, "reads that had begun end by themselves"
            await asyncio.sleep(0.01)
        assert status.pool.used == 0
        server.script.clear()
        assert len(await loaded(daemon, info.model, "two")) == 6  # the daemon goes on


async def test_a_kill_in_the_middle_of_a_copy_leaves_nothing_of_it(
    published: tuple[Path, str], server: RangeServer, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        server.script.extend([None, *["stall 10"] * 50])
        load = asyncio.create_task(daemon.control.prefetch(info.model))
        await until(lambda: bool(list((daemon.data / "ssd").glob(".*.partial"))), what="the first chunk's copy")
        daemon.process.kill()
        with pytest.raises(SllmError):
            await load
    server.script.clear()
    async with loaderd(tmp_path) as daemon:
        assert not list((daemon.data / "ssd").iterdir())
        same(await loaded(daemon, info.model), arrays)


async def test_stopping_does_not_wait_for_a_server_that_hangs(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        server.script.extend(["stall 10"] * 50)
        asked = len(server.ranges)
        load = asyncio.create_task(daemon.control.prefetch(info.model))
        await until(lambda: len(server.ranges) > asked, what="a request for the partition")
        daemon.process.terminate()
        with pytest.raises(SllmError):
            await load
        assert await asyncio.to_thread(daemon.process.wait, WAIT / 3) == 0


async def test_stopping_does_not_wait_for_keys_that_do_not_come(
    published: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = KeyProgram(tmp_path / "keys")
    with object_store(tmp_path / "served") as endpoint:
        for name in KEYS:
            monkeypatch.delenv(name, raising=False)
        for name, value in program.settings(endpoint).items():
            monkeypatch.setenv(name, value)
        try:
            async with loaderd(tmp_path) as daemon:
                info = await daemon.control.register("s3://bucket/tiny")
                begun = program.begun
                program.hang()
                load = asyncio.create_task(daemon.control.prefetch(info.model))
                await until(lambda: program.begun > begun, what="keys are asked for")
                daemon.process.terminate()
                with pytest.raises(SllmError):
                    await load
                assert await asyncio.to_thread(daemon.process.wait, WAIT / 3) == 0
        finally:
            program.let_go()

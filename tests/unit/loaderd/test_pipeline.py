"""The pipeline in the real daemon: with each of its parts off, with an order that changes, with faults in mid-load."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sllm_loaderd.client import LoaderSession
from sllm_loaderd.convert import convert_directory
from sllm_loaderd.daemon.settings import read_settings
from sllm_loaderd.devices.tensors import bind
from sllm_loaderd.pipeline import Pipeline
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import CorruptCheckpoint, InvalidCheckpoint
from sllm_runtime.protocol.limits import CHUNK_BYTES
from tests.fixtures.loaderd import SMALL_CHUNK, drop, loaderd, numbers_model, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S, until

WAIT = GIVE_UP_S
SWITCHES = ("bulk", "direct", "pinned", "overlap", "integrity", "huge_pages")
PARTS = {"io_threads": "threads"}
OFF: dict[str, Any] = {**dict.fromkeys(SWITCHES, "false"), "io_threads": 1}


def test_each_part_is_a_switch_of_its_own(tmp_path: Path) -> None:
    needed = ["--node", "n", "--data", str(tmp_path), "--socket", str(tmp_path / "s")]
    assert read_settings(needed).pipeline == Pipeline()
    given = {name: [f"--{name.replace('_', '-')}", str(value)] for name, value in OFF.items()}
    everything = [text for pair in given.values() for text in pair]
    assert read_settings([*needed, *everything]).pipeline == Pipeline(False, False, 1, False, False, False)
    for name, pair in given.items():
        one = read_settings([*needed, *pair])
        wanted = Pipeline() if name == "huge_pages" else replace(Pipeline(), **{PARTS.get(name, name): OFF[name] == 1})
        assert (one.pipeline, one.huge_pages) == (wanted, name != "huge_pages")


async def test_without_integrity_damage_goes_unseen_and_the_status_says_so(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    numbers_model(source)
    convert_directory(source, tmp_path / "converted")
    whole: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "pool_bytes": 4 * CHUNK_BYTES, "prefault_bytes": 0}
    async with loaderd(tmp_path, integrity="off", convert="never", **whole) as daemon:
        assert not (await daemon.control.status()).integrity
        info = await daemon.control.register(str(tmp_path / "converted"))
        path = daemon.model_directory(info.model) / partition_name(0)
        spoiled = bytearray(path.read_bytes())
        spoiled[5] ^= 1
        path.write_bytes(spoiled)
        await daemon.control.prefetch(info.model)
        plain = await daemon.control.register(str(source))
        await daemon.control.prefetch(plain.model)
        assert not list((daemon.data / "digests").iterdir()), "what was not looked at is not learnt"
        await daemon.control.evict(info.model)
    async with loaderd(tmp_path, convert="never", **whole) as daemon:
        assert (await daemon.control.status()).integrity
        with pytest.raises(CorruptCheckpoint, match=r"partition_0\.bin: chunk 0 "):
            await daemon.control.prefetch(info.model)
        await daemon.control.prefetch(plain.model)
        assert len(list((daemon.data / "digests").iterdir())) == 1


async def test_the_same_bytes_come_whatever_is_off_and_in_whatever_order(tmp_path: Path) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    arrays = numbers_model(tmp_path / "same")
    ways: dict[str, dict[str, Any]] = {"on": {}, "off": OFF}
    for name, settings in ways.items():
        async with loaderd(tmp_path / name, fake_devices="1x4MiB@8GB/s", **settings) as daemon:
            info = await daemon.control.register(str(checkpoint))
            drop(daemon.model_directory(info.model) / partition_name(0))
            session = await asyncio.to_thread(LoaderSession, await daemon.control.grant("w", info.model))
            try:
                for device in ("cpu", "fake:0"):
                    load = session.load(device=device)
                    load.reorder([(3, 3), (0, 1)])
                    tensors = await asyncio.to_thread(bind, load)
                    await asyncio.to_thread(load.wait_all, WAIT)
                    for key, array in arrays.items():
                        np.testing.assert_array_equal(tensors[key].numpy(), array)
                    load.reorder([(0, 0)])  # it is over: nothing happens
                    del tensors
                    load.detach()
                status = await daemon.control.status()
                (disk,) = [path for path in status.paths if path.path == "disk"]
                assert disk.mode in ({"buffered"} if settings else {"direct", "buffered"})
            finally:
                await asyncio.to_thread(session.close)
            await daemon.control.gone("w")
            status = await daemon.control.status()
            assert (status.pool.held, status.pool.retiring) == (0, 0)
            assert [each.used for each in status.devices] == [0]


async def test_faults_on_the_way_to_a_device_free_everything(tmp_path: Path) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    async with loaderd(tmp_path, fake_devices="1x4MiB@200KB/s") as daemon:  # slow: it is still under way when it ends
        info = await daemon.control.register(str(checkpoint))
        path = daemon.model_directory(info.model) / partition_name(0)
        good = path.read_bytes()
        session = await asyncio.to_thread(LoaderSession, await daemon.control.grant("w", info.model))
        try:
            spoiled = bytearray(good)
            spoiled[SMALL_CHUNK + 5] ^= 1
            path.write_bytes(spoiled)
            load = session.load(device="fake:0")
            with pytest.raises(CorruptCheckpoint, match=r"partition_0\.bin: chunk 1 "):
                await asyncio.to_thread(load.wait_all, WAIT)
            load.detach()
            await daemon.control.evict(info.model)
            path.write_bytes(good)
            bad = session.load(device="fake:0")
            bad.reorder([(0, 99)])
            with pytest.raises(InvalidCheckpoint, match="blocks"):
                await asyncio.to_thread(bad.wait_all, WAIT)
            bad.detach()
            await daemon.control.evict(info.model)
            again = session.load(device="fake:0")
            await asyncio.to_thread(again.wait_all, WAIT)
            again.detach()
        finally:
            await asyncio.to_thread(session.close)
        process = psutil.Process(daemon.process.pid)
        await until(lambda: str(path) not in [file.path for file in process.open_files()], WAIT, "the file is closed")
        await daemon.control.gone("w")
        await daemon.control.evict(info.model)
        status = await daemon.control.status()
        assert (status.pool.used, status.devices[0].used) == (0, 0)

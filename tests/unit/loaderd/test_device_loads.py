"""Loads to (fake) devices through a real daemon: memory that is imported once, blocks, limits, and who holds what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sllm_loaderd.client import SessionLoad
from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_loaderd.devices.tensors import BoundTensors, bind
from sllm_runtime.protocol.errors import Conflict, DeviceOutOfMemory
from tests.fixtures.loaderd import (
    SMALL_CHUNK,
    LoaderProcess,
    loaderd,
    mapped,
    numbers_model,
    session,
    small_checkpoint,
)

DEVICES = "3x4MiB@2GB/s"
"""Each has room for two models of up to 2 MiB."""


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[LoaderProcess]:
    async with loaderd(tmp_path, fake_devices=DEVICES) as started:
        yield started


async def bound(load: SessionLoad) -> BoundTensors:
    tensors = await asyncio.to_thread(bind, load)
    await asyncio.to_thread(load.wait_all)
    return tensors


def same(tensors: BoundTensors, arrays: dict[str, np.ndarray]) -> bool:
    return all(torch.equal(tensors[name], torch.from_numpy(array)) for name, array in arrays.items())


async def used(daemon: LoaderProcess) -> list[int]:
    return [device.used >> 20 for device in (await daemon.control.status()).devices]


async def test_a_model_on_a_device_is_the_same_model(daemon: LoaderProcess, tmp_path: Path) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    arrays = numbers_model(tmp_path / "same")
    model = (await daemon.control.register(str(checkpoint))).model
    async with session(daemon, model, "a") as one, session(daemon, model, "b") as two:
        first = one.load(device="fake:1")
        tensors = await bound(first)
        assert same(tensors, arrays)
        assert await used(daemon) == [0, 2, 0]

        # Reading makes no page this process's own, and writing is seen by nobody else.
        mapping = first.attach()
        total = sum(float(tensor.double().sum()) for tensor in tensors.values())
        kept = mapped(mapping.address, 2**21)
        assert kept["Rss"] * 1024 >= mapping.nbytes
        assert kept["Private_Dirty"] == kept["Anonymous"] == 0
        tensors["layers.2.weight"].fill_(7.0)
        second = await bound(two.load(device="fake:1"))
        assert total == sum(float(tensor.double().sum()) for tensor in second.values())
        assert await used(daemon) == [0, 2, 0], "the same memory serves both"

        third = await bound(two.load(device="fake:0"))
        assert same(third, arrays)
        assert await used(daemon) == [2, 2, 0]
    for holder, left in (("a", [2, 2, 0]), ("b", [0, 0, 0])):
        await daemon.control.gone(holder)
        assert await used(daemon) == left
    assert same(third, arrays), "what a sandbox has mapped stays its own"
    status = await daemon.control.status()
    assert {path.path for path in status.paths} >= {"link fake:0", "link fake:1"}
    assert not status.pool.held


async def test_blocks_on_a_device_come_in_the_order_asked_for(daemon: LoaderProcess, tmp_path: Path) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    arrays = numbers_model(tmp_path / "same")
    model = (await daemon.control.register(str(checkpoint))).model
    async with session(daemon, model) as opened:
        load = opened.load(blocks=[(3, 3), (1, 1)], device="fake:2")
        tensors = await asyncio.to_thread(bind, load)
        await asyncio.to_thread(load.wait, 3)
        assert torch.equal(tensors["layers.2.weight"], torch.from_numpy(arrays["layers.2.weight"]))
        await asyncio.to_thread(load.wait_all)
        assert load.progress[0] == load.progress[1] < load.attach().nbytes


async def test_partitions_go_to_devices_of_their_own(daemon: LoaderProcess, tmp_path: Path) -> None:
    arrays = numbers_model(tmp_path / "source", layers=6)
    options = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0, plan=AutoPlan("auto-layers", 3))
    convert_directory(tmp_path / "source", tmp_path / "c", options=options)
    info = await daemon.control.register(str(tmp_path / "c"))
    assert len(info.partitions) == 3
    async with session(daemon, info.model) as opened:
        loads = [opened.load(rank, device=f"fake:{rank}") for rank in range(3)]
        parts = await asyncio.gather(*(bound(load) for load in loads))
        assert await used(daemon) == [2, 2, 2]
        tensors = {name: tensor for part in parts for name, tensor in part.items()}
        assert set(tensors) == set(arrays)
        assert all(torch.equal(tensors[name], torch.from_numpy(array)) for name, array in arrays.items())


async def test_a_device_that_is_full_or_not_there_says_so(daemon: LoaderProcess, tmp_path: Path) -> None:
    models = []
    for seed in range(3):
        checkpoint, _ = small_checkpoint(tmp_path / f"model{seed}", seed=seed)
        models.append((await daemon.control.register(str(checkpoint))).model)
    for holder, model in zip("ab", models, strict=False):
        async with session(daemon, model, holder) as opened:
            await bound(opened.load(device="fake:0"))
    async with session(daemon, models[2], "c") as opened:
        with pytest.raises(DeviceOutOfMemory, match=rf"fake:0 has {2**22} bytes"):
            await bound(opened.load(device="fake:0"))
        with pytest.raises(Conflict, match="cpu, fake:0, fake:1, fake:2"):
            await bound(opened.load(device="cuda:0"))
        await daemon.control.gone("a")
        await bound(opened.load(device="fake:0"))
        assert await used(daemon) == [4, 0, 0]

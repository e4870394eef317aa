"""Device memory outlives a killed loaderd: it is counted and, where nobody else could write to it, serves again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from sllm_loaderd.client import KeptChunks
from sllm_loaderd.client import memory as mappings
from sllm_loaderd.client.keeping import KeptDevice
from sllm_loaderd.sealed import create_sealed
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import Conflict, DeviceOutOfMemory
from sllm_runtime.protocol.loader import Adopted, StoreDevice
from tests.fixtures.loader_worker import loader_worker, seen
from tests.fixtures.loaderd import LoaderProcess, kill, loaderd, session, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S, until

MIB = 2**20
ONE = "1x2MiB@8GB/s"
"""Room for one copy of the model."""


@pytest.fixture
def kept() -> Iterator[KeptChunks]:
    made = KeptChunks()
    yield made
    made.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "model")[0]


async def bring_back(daemon: LoaderProcess, kept: KeptChunks) -> Adopted:
    (device,) = kept.devices()
    return await daemon.control.adopt_device(device)


async def used(daemon: LoaderProcess) -> int:
    (device,) = (await daemon.control.status()).devices
    return device.used


@pytest.mark.chaos
async def test_memory_on_a_device_serves_after_a_kill(tmp_path: Path, checkpoint: Path, kept: KeptChunks) -> None:
    right = hashlib.sha256((checkpoint / partition_name(0)).read_bytes()).hexdigest()
    async with contextlib.AsyncExitStack() as stack:
        async with loaderd(tmp_path, fake_devices=ONE, kept=kept) as daemon:
            model = (await daemon.control.register(str(checkpoint))).model
            fd = await daemon.control.grant("one", model)
            one = await stack.enter_async_context(loader_worker(fd, "fake:0"))
            await until(kept.devices, what="the memory is kept")
            await kill(daemon)
        assert await seen(one) == right

        async with loaderd(tmp_path, fake_devices=ONE, kept=kept) as again:
            answer = await bring_back(again, kept)
            assert (len(answer.ids), answer.counted) == (1, ())
            assert await used(again) == 2 * MIB
            assert (await bring_back(again, kept)).ids == answer.ids, "a connection that is made anew changes nothing"
            # Nothing of it can come from the disk now, and a second copy would not fit.
            (again.model_directory(model) / partition_name(0)).rename(tmp_path / "away")
            async with session(again, model, "two") as two:
                load = two.load(device="fake:0")
                await asyncio.to_thread(load.wait_all, GIVE_UP_S)
                assert await used(again) == 2 * MIB
                load.detach()
            await again.control.gone("two")
            assert await used(again) == 2 * MIB
            assert await seen(one) == right
            await again.control.gone("one")
            assert await used(again) == 0
            await until(lambda: not kept.devices(), what="what is free is not kept")


@pytest.mark.chaos
async def test_memory_that_was_not_filled_counts_and_serves_nobody(
    tmp_path: Path, checkpoint: Path, kept: KeptChunks
) -> None:
    slow = ONE.replace("8GB", "1KB")  # minutes for the model: it is under way when loaderd is killed
    async with loaderd(tmp_path, fake_devices=slow, kept=kept) as daemon:
        model = (await daemon.control.register(str(checkpoint))).model
        async with session(daemon, model, "one") as one:
            one.load(device="fake:0")
            await until(kept.devices, what="the memory is kept")
            await kill(daemon)
    async with loaderd(tmp_path, fake_devices=ONE, kept=kept) as again:
        answer = await bring_back(again, kept)
        assert (answer.ids, len(answer.counted)) == ((), 1)
        assert (await bring_back(again, kept)).counted == answer.counted
        async with session(again, model, "two") as two:
            with pytest.raises(DeviceOutOfMemory, match="fake:0"):
                await asyncio.to_thread(two.load(device="fake:0").wait_all, GIVE_UP_S)
            await again.control.gone("one")
            assert await used(again) == 0
            await asyncio.to_thread(two.load(device="fake:0").wait_all, GIVE_UP_S)
        await again.control.gone("two")


async def test_what_is_no_device_memory_is_not_trusted(tmp_path: Path, checkpoint: Path) -> None:
    async with loaderd(tmp_path, fake_devices=ONE) as daemon:
        model = (await daemon.control.register(str(checkpoint))).model
        memory = StoreDevice(
            batch=1, holder="w", id=7, model=model, partition=0, device="fake:0", nbytes=4096, size=2 * MIB
        )
        open_fd = os.memfd_create("open")
        os.ftruncate(open_fd, 2 * MIB)
        sealed_fd, address = create_sealed("sealed", 2 * MIB)
        mappings.unmap(address, 2 * MIB)
        try:
            held = frozenset({"w"})
            for wrong in (
                KeptDevice(memory, open_fd, held),
                KeptDevice(structs.replace(memory, size=4 * MIB), sealed_fd, held),
                KeptDevice(structs.replace(memory, nbytes=3 * MIB), sealed_fd, held),
                KeptDevice(structs.replace(memory, device="cuda:0"), sealed_fd, held),
            ):
                with pytest.raises(Conflict):
                    await daemon.control.adopt_device(wrong)
            right = KeptDevice(memory, sealed_fd, held)
            assert (await daemon.control.adopt_device(replace(right, holders=frozenset()))).counted == ()
            assert await used(daemon) == 0
            for strange in (structs.replace(memory, partition=9), structs.replace(memory, id=8, model="sha256:0")):
                answer = await daemon.control.adopt_device(replace(right, memory=strange))
                assert (answer.ids, answer.counted) == ((), (strange.id,))
            assert await used(daemon) == 4 * MIB, "memory that is in use counts, also above the limit"
            await daemon.control.gone("w")
            assert await used(daemon) == 0
        finally:
            os.close(open_fd)
            os.close(sealed_fd)


def test_what_comes_after_the_end_is_closed(kept: KeptChunks) -> None:
    message = StoreDevice(batch=1, holder="w", id=7, model="m", partition=0, device="fake:0", nbytes=1, size=2)
    kept.store_device(message, [os.memfd_create("one")])
    kept.store_device(replace_holder(message, "v"), [])
    (device,) = kept.devices()
    assert device.holders == {"w", "v"}
    kept.gone("w")
    assert kept.devices()[0].holders == {"v"}
    kept.store_device(structs.replace(message, id=9), [])
    assert len(kept) == 1, "without a descriptor there is nothing to keep"
    kept.close()
    kept.store_device(message, [os.memfd_create("two")])
    assert len(kept) == 0


def replace_holder(message: StoreDevice, holder: str) -> StoreDevice:
    return structs.replace(message, holder=holder, fds=0)

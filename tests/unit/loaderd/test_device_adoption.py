"""Device memory outlives a killed loaderd: it is counted and, where nobody else could write to it, serves again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from sllm_loaderd import device_adoption
from sllm_loaderd.client import KeptChunks
from sllm_loaderd.client import memory as mappings
from sllm_loaderd.client.keeping import KeptDevice
from sllm_loaderd.daemon.keeper import DeviceHandout, Keeper
from sllm_loaderd.device_adoption import CountedMemory, adopt_device
from sllm_loaderd.devices.fake import FakeDevice
from sllm_loaderd.devices.link import Link
from sllm_loaderd.files import chunk_digest
from sllm_loaderd.sealed import create_sealed
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import Conflict, DeviceOutOfMemory
from sllm_runtime.protocol.loader import AdoptDevice, Adopted, StoreDevice
from tests.fixtures.loader_worker import loader_worker, seen
from tests.fixtures.loaderd import LoaderProcess, kill, loaderd, session, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.loaderd.node import Node

MIB = 2**20
ONE = "1x2MiB@8GB/s"
"""Room for one copy of the model."""


@pytest.fixture
def kept() -> Iterator[KeptChunks]:
    made = KeptChunks()
    yield made
    made.close()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


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


async def test_memory_that_is_looked_at_is_nobody_elses_to_unmap(
    model: StoredModel, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> None:
    """Its client goes meanwhile, and then its holders are proven dead: who frees it would end loaderd by a fault."""
    begun, go, looked = threading.Event(), threading.Event(), list[str]()

    def slow(view: memoryview) -> str:
        begun.set()
        assert go.wait(GIVE_UP_S)
        looked.append(chunk_digest(view))
        return looked[-1]

    monkeypatch.setattr(device_adoption, "chunk_digest", slow)
    before, after, counted = FakeDevice(0, 2 * MIB, Link(1e12)), FakeDevice(0, 2 * MIB, Link(1e12)), CountedMemory()
    nbytes = model.index.partitions[0].nbytes
    made = before.allocate(nbytes)
    fd = made.export()
    stack.callback(os.close, fd)
    stack.callback(before.close)
    stack.callback(after.close)
    request = AdoptDevice(
        request=1, id=7, model=model.checkpoint.digest, partition=0, device=after.name, nbytes=nbytes, size=made.size,
        holders=("w",),
    )  # fmt: skip
    with contextlib.closing(Node()) as node:
        task = asyncio.create_task(adopt_device(request, fd, model, after, node.stage, counted))
        task.add_done_callback(lambda _: looked.append("over"))
        await until(begun.is_set, what="a thread looks at it")
        for _ in range(2):  # its request is cancelled, then its connection ends
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        go.set()
        await asyncio.wait([task])
        await until(lambda: len(looked) > 1, what="both have ended")
        assert looked[-1] == "over"
        counted.forget("w")
        assert after.used == 0


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


def test_memory_that_is_kept_by_a_client_stays_open_there_alone() -> None:
    device = FakeDevice(0, 2 * MIB, Link(1e12))
    sent, fds = list[int](), list[int]()

    def say(message: object, given: Sequence[int]) -> None:
        sent.append(len(given))
        fds.extend(given)

    keeper = Keeper(say)
    allocation = device.allocate(4096)
    for holder in ("one", "two"):
        keeper.keep_device(DeviceHandout(holder, "m", 0, device.name, 7, allocation))
    assert sent == [1, 0]
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    device.close()


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

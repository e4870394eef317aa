"""LoRA adapters load beside their base: same pool, same connection, many for one base, and only what was granted."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from sllm_loaderd.client import KeptChunks, LoaderSession
from sllm_loaderd.devices.tensors import bind
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.errors import Cancelled, Conflict, DigestMismatch, Forbidden, ModelNotFound
from sllm_runtime.protocol.limits import CHUNK_BYTES
from sllm_runtime.worker.adapters import Adapters, loader
from sllm_runtime.worker.arriving import Weights
from sllm_runtime.worker.engine.ours.lora import Lora
from tests.fixtures.loaderd import (
    SMALL_CHUNK,
    LoaderProcess,
    adapter_arrays,
    adapter_checkpoint,
    loaderd,
    session,
    small_checkpoint,
)
from tests.fixtures.waiting import GIVE_UP_S

ADAPTERS = 3


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[LoaderProcess]:
    async with loaderd(tmp_path, fake_devices="1x8MiB@2GB/s", conversions=2) as started:
        yield started


async def adapter(daemon: LoaderProcess, directory: Path, seed: int) -> str:
    """The digest of an adapter that the node has."""
    checkpoint = await asyncio.to_thread(adapter_checkpoint, directory, seed)
    return (await daemon.control.register(str(checkpoint))).model


async def right(opened: LoaderSession, digest: str, seed: int, device: str) -> bool:
    """Whether an adapter's tensors are what was saved."""
    load = opened.load(adapter=digest, device=device)
    tensors = await asyncio.to_thread(bind, load)
    await asyncio.to_thread(load.wait_all)
    expected = adapter_arrays(seed)
    return set(tensors) == set(expected) and all(
        torch.equal(tensors[name], torch.from_numpy(array)) for name, array in expected.items()
    )


async def test_adapters_load_beside_their_base(daemon: LoaderProcess, tmp_path: Path) -> None:
    base = (await daemon.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
    digests = [await adapter(daemon, tmp_path / f"adapter{seed}", seed) for seed in range(ADAPTERS + 1)]
    granted, other = digests[:ADAPTERS], digests[ADAPTERS]
    async with session(daemon, base, adapters=granted) as opened:
        assert opened.adapters == tuple(granted)
        whole = opened.load()
        await asyncio.to_thread(whole.wait_all)
        assert all([await right(opened, digest, seed, "cpu") for seed, digest in enumerate(granted)])
        assert await right(opened, granted[1], 1, "fake:0")
        status = await daemon.control.status()
        assert {part.model for part in status.resident} == {base, *granted}
        assert {part.holders for part in status.resident} == {("w",)}
        sizes = {part.model: part.total for part in status.resident}
        small = sum(sizes[digest] for digest in granted)
        assert status.pool.used == -(-sizes[base] // SMALL_CHUNK) * SMALL_CHUNK + small, "no whole chunk for each"
        assert small < SMALL_CHUNK
        with pytest.raises(Forbidden, match="this sandbox may load"):
            await right(opened, other, ADAPTERS, "cpu")

        # One that is granted later comes by a connection of its own, to the same sandbox.
        async with session(daemon, base, adapters=[other]) as later:
            assert await right(later, other, ADAPTERS, "cpu")
    await daemon.control.gone("w")
    assert (await daemon.control.status()).pool.held == 0
    with pytest.raises(ModelNotFound):
        await daemon.control.grant("x", base, adapters=["sha256:" + "0" * 64])


async def test_small_adapters_outlive_a_killed_loaderd(tmp_path: Path) -> None:
    kept = KeptChunks()
    try:
        async with loaderd(tmp_path, kept=kept) as daemon:
            base = (await daemon.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
            digest = await adapter(daemon, tmp_path / "adapter", 0)
            async with session(daemon, base, adapters=[digest]) as opened:
                assert await right(opened, digest, 0, "cpu")
            (batch,) = kept.batches()
            daemon.process.kill()
            await daemon.control.lost.wait()
        async with loaderd(tmp_path, kept=kept) as daemon:
            assert (await daemon.control.adopt(batch)).ids == batch.ids
            status = await daemon.control.status()
            (part,) = status.resident
            assert (part.model, part.nbytes, status.pool.used) == (digest, part.total, part.total)
            async with session(daemon, base, "second", adapters=[digest]) as opened:
                assert await right(opened, digest, 0, "cpu")
            for holder in ("w", "second"):
                await daemon.control.gone(holder)
            await daemon.control.evict(digest)
            assert (await daemon.control.status()).pool.used == 0
    finally:
        kept.close()


async def test_an_adapter_comes_to_the_node_when_it_is_asked_for(daemon: LoaderProcess, tmp_path: Path) -> None:
    """From the first of its sources that has it; what is not there fails its own load, and others go on."""
    model = (await daemon.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
    places = [str(await asyncio.to_thread(adapter_checkpoint, tmp_path / f"adapter{seed}", seed)) for seed in (0, 1)]
    digests = [open_checkpoint(Path(place)).digest for place in places]
    gone, slow = ("sha256:" + digit * 64 for digit in "01")
    silent = socket.create_server(("127.0.0.1", 0))  # connections are made, and nobody answers
    fd = await daemon.control.grant(
        "w",
        model,
        adapters=(*digests, gone, slow),
        sources={
            digests[0]: (str(tmp_path / "nowhere"), places[0]),
            digests[1]: (places[0],),
            gone: ("/nowhere",),
            slow: (f"http://127.0.0.1:{silent.getsockname()[1]}/slow",),
        },
    )
    opened = await asyncio.to_thread(LoaderSession, fd)
    try:
        assert await daemon.control.models() == (model,)
        missing = opened.load(adapter=gone)
        given_up, left = opened.load(adapter=slow), opened.load(adapter=slow)
        given_up.cancel()
        assert await right(opened, digests[0], 0, "cpu")
        assert await right(opened, digests[0], 0, "fake:0")
        with pytest.raises(ModelNotFound, match="/nowhere is not there"):
            await asyncio.to_thread(missing.wait_all, GIVE_UP_S)
        with pytest.raises(Cancelled):
            await asyncio.to_thread(given_up.wait_all, GIVE_UP_S)
        with pytest.raises(DigestMismatch, match="the source has changed"):
            await asyncio.to_thread(opened.load(adapter=digests[1]).wait_all, GIVE_UP_S)
        assert not left.ready
    finally:
        await asyncio.to_thread(opened.close)
        silent.close()
    assert digests[0] in await daemon.control.models()


async def test_a_sandbox_loads_to_its_own_devices_alone(daemon: LoaderProcess, tmp_path: Path) -> None:
    base = (await daemon.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
    with pytest.raises(Conflict, match="fake:7"):
        await daemon.control.grant("w", base, devices=["cpu", "fake:7"])
    for own, foreign in (("cpu", "fake:0"), ("fake:0", "cpu")):
        fd = await daemon.control.grant("w", base, devices=[own])
        opened = await asyncio.to_thread(LoaderSession, fd)
        try:
            await asyncio.to_thread(opened.load(device=own).wait_all)
            with pytest.raises(Forbidden, match=f"may load to {own} only"):
                await asyncio.to_thread(opened.load(device=foreign).wait_all)
        finally:
            await asyncio.to_thread(opened.close)
        await daemon.control.gone("w")


async def test_rights_to_some_partitions_of_the_base_leave_adapters_whole(
    daemon: LoaderProcess, tmp_path: Path
) -> None:
    base = (await daemon.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
    digest = await adapter(daemon, tmp_path / "adapter", 0)
    opened = await asyncio.to_thread(
        LoaderSession, await daemon.control.grant("w", base, partitions=[7], adapters=[digest])
    )
    try:
        assert await right(opened, digest, 0, "cpu")
        with pytest.raises(Forbidden, match="partitions"):
            await asyncio.to_thread(opened.load().wait_all)
    finally:
        await asyncio.to_thread(opened.close)


@pytest.mark.parametrize("convert", ["now", "later", "never"])
async def test_an_adapter_is_known_as_one_whenever_models_are_converted(tmp_path: Path, convert: str) -> None:
    """What nobody knows as an adapter is refused to the function that names it."""
    home = tmp_path / "adapter"
    await asyncio.to_thread(adapter_checkpoint, home, 0)  # what PEFT saved is in ``home``
    async with loaderd(tmp_path, convert=convert, chunk_bytes=CHUNK_BYTES, pool_bytes=4 * CHUNK_BYTES) as started:
        info = await started.control.register(str(home))
        assert info.adapter == "base"
        base = (await started.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
        async with session(started, base, adapters=[info.model]) as opened:
            assert await right(opened, info.model, 0, "cpu")


async def test_more_adapters_may_be_named_at_once_than_loads_are_made_together(tmp_path: Path) -> None:
    """As many calls as an instance takes at once, each with another adapter that this node lacks (up to 256 go with a
    function): those that loaderd does not take yet wait, and are not refused."""
    count = 80
    names = [f"a{number}" for number in range(count)]
    places = [tmp_path / name for name in names]
    first = await asyncio.to_thread(adapter_checkpoint, places[0], 0)
    digest = open_checkpoint(first).digest
    digests = {name: f"sha256:{number:064x}" for number, name in enumerate(names)} | {names[0]: digest}
    async with loaderd(tmp_path, conversions=2) as started:
        model = (await started.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
        sources = {each: ("/nowhere",) for each in digests.values()} | {digest: (str(first),)}
        fd = await started.control.grant("w", model, adapters=tuple(digests.values()), sources=sources)
        opened = await asyncio.to_thread(LoaderSession, fd)
        try:
            load = loader(Weights(opened, [], 0.0, GIVE_UP_S), GIVE_UP_S)
            kept = Adapters(digests, load, 0, GIVE_UP_S)
            lora = Lora({f"layers.{layer}.weight": torch.zeros(256, 64) for layer in range(4)})

            async def named(name: str) -> None:
                async with kept.held(name, lora):
                    assert lora.get(name) is not None

            ended = await asyncio.gather(*(named(name) for name in reversed(names)), return_exceptions=True)
            assert {type(each) for each in ended[:-1]} == {ModelNotFound}
            assert ended[-1] is None
        finally:
            await asyncio.to_thread(opened.close)


_FULL = """
import resource, sys
from sllm_loaderd.client import LoaderSession
from sllm_runtime.worker.start import data_bytes

opened = LoaderSession(int(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (4 << 20), resource.RLIM_INFINITY))
load = opened.load(adapter=sys.argv[2])
try:
    load.wait_all()
    print("there")
finally:
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
load.detach()
load = opened.load(adapter=sys.argv[2])
load.wait_all()
print("there")
"""


async def test_a_process_with_little_memory_left_keeps_its_loaderd_when_an_adapter_comes(tmp_path: Path) -> None:
    """A mapping of a whole chunk takes what was left for the stack of the thread that fills in pages. That thread makes
    the first use cheap; without it the adapter is there all the same, and the connection goes on."""
    async with loaderd(tmp_path, chunk_bytes=CHUNK_BYTES, pool_bytes=4 * CHUNK_BYTES) as started:
        base = (await started.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model
        await asyncio.to_thread(adapter_checkpoint, tmp_path / "adapter", 0)
        digest = (await started.control.register(str(tmp_path / "adapter"))).model
        fd = await started.control.grant("w", base, adapters=[digest])
        command = [sys.executable, "-c", _FULL, str(fd), digest]
        try:
            found = await asyncio.to_thread(
                subprocess.run, command, pass_fds=[fd], capture_output=True, text=True, timeout=GIVE_UP_S, check=False
            )
        finally:
            os.close(fd)
    assert found.stdout.split() == ["there", "there"], found.stderr

"""The real daemon over its real sockets: loads, sharing, rights, faults, and that it frees what it gave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from sllm_loaderd.client import LoaderControl, LoaderSession
from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.daemon import server, service
from sllm_loaderd.daemon.settings import read_settings
from sllm_loaderd.daemon.usage import used_inodes
from sllm_loaderd.devices.tensors import bind
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.errors import (
    Cancelled,
    Conflict,
    CorruptCheckpoint,
    DigestMismatch,
    InstanceLost,
    InvalidCheckpoint,
    ModelNotFound,
    PoolExhausted,
    Unavailable,
)
from sllm_runtime.protocol.loader import MOST_REQUESTS, Answer, Granted, Hello, Load
from tests.fixtures.loaderd import (
    SMALL_CHUNK,
    LoaderProcess,
    drop,
    loaderd,
    mapped,
    numbers_model,
    session,
    small_checkpoint,
)
from tests.fixtures.models import save_byte_tokenizer, save_model
from tests.fixtures.range_server import range_server
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S, dead, until

WAIT = GIVE_UP_S


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[LoaderProcess]:
    async with loaderd(tmp_path) as started:
        yield started


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "model")[0]


# --- the way of a model ------------------------------------------------------------------------------
async def test_a_hugging_face_directory_becomes_tensors_in_a_sandbox(tmp_path: Path) -> None:
    import torch

    model = save_model("tied_llama", tmp_path / "source", dtype=torch.bfloat16)
    save_byte_tokenizer(tmp_path / "source")
    stages = []
    async with loaderd(tmp_path, chunk_bytes=16 * 2**20, pool_bytes=64 * 2**20) as daemon:
        info = await daemon.control.register(str(tmp_path / "source"), report=lambda *seen: stages.append(seen))
        assert (info.architecture, info.dtype, info.order) == ("LlamaForCausalLM", "bfloat16", "traced")
        assert info.sources == (str(tmp_path / "source"),)
        assert stages[-1] == ("convert", stages[-1][2], stages[-1][2])
        async with session(daemon, info.model) as opened:
            assert opened.model == info.model
            load = opened.load()
            tensors = await asyncio.to_thread(bind, load)
            await asyncio.to_thread(load.wait_all)
            files = load.files()
            assert files["tokenizer.json"] == (tmp_path / "source" / "tokenizer.json").read_bytes()
            assert set(files) == set(info.files)
            for name, value in model.state_dict().items():
                assert torch.equal(tensors[name], value)
            assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
            load.detach()
        assert torch.equal(tensors["model.norm.weight"], model.model.norm.weight)  # outlives session and load


async def test_registering_twice_does_the_work_once_and_a_change_is_seen(
    daemon: LoaderProcess, checkpoint: Path
) -> None:
    uri = str(checkpoint)
    one, two = await asyncio.gather(daemon.control.register(uri), daemon.control.register(uri))
    assert one.model == two.model
    assert await daemon.control.models() == (one.model,)
    assert (await daemon.control.register(uri, digest=one.model)).model == one.model
    other, _ = small_checkpoint(checkpoint.parent / "other", seed=1)
    for path in other.iterdir():
        os.replace(path, checkpoint / path.name)
    assert (await daemon.control.register(uri)).model != one.model
    with pytest.raises(DigestMismatch):
        await daemon.control.register(uri, digest=one.model)
    assert len(await daemon.control.models()) == 2


async def test_blocks_become_ready_and_the_second_load_reads_nothing(daemon: LoaderProcess, checkpoint: Path) -> None:
    info = await daemon.control.register(str(checkpoint))
    drop(daemon.model_directory(info.model) / partition_name(0))
    async with session(daemon, info.model) as opened:
        load = opened.load()
        for block in range(len(info.blocks)):
            await asyncio.to_thread(load.wait, block)
        await asyncio.to_thread(load.wait_all)
        assert load.progress == (info.nbytes, info.nbytes)
        (daemon.model_directory(info.model) / partition_name(0)).unlink()
        again = opened.load()
        await asyncio.to_thread(again.wait_all)
        load.detach()
        again.detach()
    status = await daemon.control.status()
    assert [(r.model, r.nbytes, r.holders) for r in status.resident] == [(info.model, info.nbytes, ("w",))]
    assert status.paths[0].bandwidth > 0


async def test_reading_makes_no_page_private_and_writing_is_seen_by_nobody_else(
    daemon: LoaderProcess, checkpoint: Path
) -> None:
    info = await daemon.control.register(str(checkpoint))
    async with session(daemon, info.model, "a") as one, session(daemon, info.model, "b") as two:
        loads = [one.load(), two.load()]
        tensors = [await asyncio.to_thread(bind, load) for load in loads]
        for load in loads:
            await asyncio.to_thread(load.wait_all)
        name = "layers.2.weight"
        assert tensors[0][name].data_ptr() != tensors[1][name].data_ptr()
        total = sum(float(tensor.double().sum()) for tensor in tensors[0].values())
        assert total == sum(float(tensor.double().sum()) for tensor in tensors[1].values())
        mapping = loads[0].attach()
        used = mapped(mapping.address, info.nbytes + SMALL_CHUNK)
        assert used["Rss"] * 1024 >= info.nbytes
        assert used["Private_Dirty"] == 0
        assert used["Anonymous"] == 0
        before = tensors[1][name].clone()
        tensors[0][name].fill_(7.0)
        assert bool((tensors[1][name] == before).all())
        assert mapped(mapping.address, info.nbytes + SMALL_CHUNK)["Anonymous"] * 1024 >= before.nbytes
        for load in loads:
            load.detach()
    async with session(daemon, info.model, "c") as three:
        load = three.load()
        fresh = await asyncio.to_thread(bind, load)
        await asyncio.to_thread(load.wait_all)
        assert bool((fresh[name] == before).all())
        load.detach()


async def test_some_blocks_in_another_order(daemon: LoaderProcess, checkpoint: Path) -> None:
    info = await daemon.control.register(str(checkpoint))
    arrays = numbers_model(checkpoint.parent / "same")
    async with session(daemon, info.model) as opened:
        load = opened.load(blocks=[(3, 3), (1, 1)])
        tensors = await asyncio.to_thread(bind, load)
        await asyncio.to_thread(load.wait, 3)
        await asyncio.to_thread(load.wait_all)
        for layer in (0, 2):
            np.testing.assert_array_equal(tensors[f"layers.{layer}.weight"].numpy(), arrays[f"layers.{layer}.weight"])
        status = await daemon.control.status()
        assert 0 < status.resident[0].nbytes < info.nbytes
        rest = opened.load()
        await asyncio.to_thread(rest.wait_all)
        for partial in (load, rest):
            partial.detach()
        with pytest.raises(InvalidCheckpoint, match="blocks"):
            opened.load(blocks=[(0, 99)]).wait_all(WAIT)
        with pytest.raises(InvalidCheckpoint, match="no partition 5"):
            opened.load(partition=5).wait_all(WAIT)
        with pytest.raises(Conflict, match="cuda"):
            opened.load(device="cuda:0").wait_all(WAIT)


# --- faults ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [0, 2 * SMALL_CHUNK + 100, -1])
async def test_a_corrupt_byte_reaches_no_function(daemon: LoaderProcess, checkpoint: Path, place: int) -> None:
    info = await daemon.control.register(str(checkpoint))
    path = daemon.model_directory(info.model) / partition_name(0)
    good = path.read_bytes()
    bad = bytearray(good)
    bad[place] ^= 0x10
    path.write_bytes(bad)
    async with session(daemon, info.model) as opened:
        load = opened.load()
        with pytest.raises(CorruptCheckpoint, match=r"partition_0\.bin: chunk \d+ .*convert the model again"):
            await asyncio.to_thread(load.wait_all, WAIT)
        load.detach()
        with pytest.raises(CorruptCheckpoint, match=r"layers|embed|head|padding"):
            await daemon.control.validate(info.model)
        path.write_bytes(good)
        again = opened.load()
        await asyncio.to_thread(again.wait_all, WAIT)
        again.detach()
    await daemon.control.validate(info.model)


async def test_a_truncated_partition_and_a_broken_index_are_refused(daemon: LoaderProcess, checkpoint: Path) -> None:
    info = await daemon.control.register(str(checkpoint))
    directory = daemon.model_directory(info.model)
    async with session(daemon, info.model) as opened:
        os.truncate(directory / partition_name(0), SMALL_CHUNK)
        with pytest.raises(CorruptCheckpoint, match="65536 bytes where its index says"):
            await asyncio.to_thread(opened.load().wait_all, WAIT)


async def test_an_index_that_is_not_the_one_it_is_called_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(str(checkpoint))
        index = daemon.model_directory(info.model) / "index.json"
        index.write_bytes(index.read_bytes() + b" ")
    async with loaderd(tmp_path) as daemon:
        for ask in (daemon.control.describe, daemon.control.prefetch):
            with pytest.raises(DigestMismatch, match="is the index of"):
                await ask(info.model)
        with pytest.raises(DigestMismatch):
            await daemon.control.grant("w", info.model)
        assert (await daemon.control.status()).pool.used == 0


async def test_a_source_that_cannot_be_converted_leaves_nothing(daemon: LoaderProcess, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"garbage")
    cases = {
        str(tmp_path / "broken"): InvalidCheckpoint,
        str(tmp_path / "none"): ModelNotFound,
        "ftp://x": InvalidCheckpoint,
    }
    for uri, kind in cases.items():
        with pytest.raises(kind):
            await daemon.control.register(uri)
    assert list(daemon.models.iterdir()) == []
    with pytest.raises(ModelNotFound, match="register its source first"):
        await daemon.control.describe("sha256:" + "0" * 64)
    with pytest.raises(InvalidCheckpoint):
        await daemon.control.grant("w", "../../etc")


async def test_a_pool_that_is_too_small_says_what_holds_it_and_evicts_the_oldest(tmp_path: Path) -> None:
    models = [small_checkpoint(tmp_path / f"m{seed}", seed=seed)[0] for seed in range(3)]
    async with loaderd(tmp_path, pool_bytes=12 * SMALL_CHUNK) as daemon:  # each model has 5 chunks
        one, two, three = [(await daemon.control.register(str(path))).model for path in models]
        await daemon.control.prefetch(one)
        await daemon.control.prefetch(two)
        await daemon.control.prefetch(one)  # now two is the oldest
        await daemon.control.prefetch(three)
        resident = [status.model for status in (await daemon.control.status()).resident]
        assert resident == [one, three]
        await daemon.control.pin(one)
        async with session(daemon, three) as opened:
            load = opened.load()
            await asyncio.to_thread(load.wait_all)
            load.detach()
        with pytest.raises(PoolExhausted, match=r"pinned.*held by 1") as caught:
            await daemon.control.prefetch(two)
        assert f"needs {5 * SMALL_CHUNK} bytes" in caught.value.message
        await daemon.control.gone("w")
        await daemon.control.prefetch(two)
        await daemon.control.pin(one, False)
        await daemon.control.reserve(three, 5 * SMALL_CHUNK)
        assert [status.model for status in (await daemon.control.status()).resident] == [two]
        with pytest.raises(PoolExhausted, match="reserved"):
            await daemon.control.reserve(one, 12 * SMALL_CHUNK)
        await daemon.control.prefetch(three)
        await daemon.control.evict(three)
        await daemon.control.reserve(three, 0)
        await daemon.control.prefetch(one)


async def test_evicted_chunks_retire_until_their_sandbox_is_dead(daemon: LoaderProcess, checkpoint: Path) -> None:
    info = await daemon.control.register(str(checkpoint))
    sleeper = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    pidfd = os.pidfd_open(sleeper.pid)
    fd = await daemon.control.grant("w", info.model, pidfd=pidfd)
    os.close(pidfd)
    opened = await asyncio.to_thread(LoaderSession, fd)
    load = opened.load()
    await asyncio.to_thread(load.wait_all)
    load.detach()
    await asyncio.to_thread(opened.close)
    await daemon.control.evict(info.model)
    retiring = (await daemon.control.status()).pool.retiring
    assert retiring == 5 * SMALL_CHUNK
    await asyncio.wait_for(sleeper.communicate(b"\n"), WAIT)
    deadline = time.monotonic() + WAIT
    while (await daemon.control.status()).pool.retiring:
        assert time.monotonic() < deadline
    status = await daemon.control.status()
    assert (status.pool.used, status.pool.held, status.pool.free) == (0, 0, status.pool.limit)


SANDBOX = """
import sys
from sllm_loaderd.client import LoaderSession
session = LoaderSession(int(sys.argv[1]))
load = session.load()
load.wait_all()
mapping = load.attach()
session.close()
print("mapped", flush=True)
input()
"""


async def test_a_sandbox_left_by_its_invoker_is_freed_when_no_process_has_its_chunks(
    daemon: LoaderProcess, checkpoint: Path
) -> None:
    info = await daemon.control.register(str(checkpoint))
    async with LoaderControl(daemon.socket) as invoker:
        fd = await invoker.grant("w", info.model)
        sandbox = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SANDBOX, str(fd), pass_fds=[fd], stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        os.close(fd)
        assert sandbox.stdout is not None
        assert await asyncio.wait_for(sandbox.stdout.readline(), WAIT) == b"mapped\n"
    await daemon.control.evict(info.model)
    used = used_inodes()
    assert used is not None
    assert len(used) >= 5
    assert (await daemon.control.status()).pool.retiring == 5 * SMALL_CHUNK
    await asyncio.wait_for(sandbox.communicate(b"\n"), WAIT)
    deadline = time.monotonic() + WAIT
    while (await daemon.control.status()).pool.retiring:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_model_without_a_byte(daemon: LoaderProcess, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "empty").mkdir()
    save_file({"a": torch.empty(0, 3), "b": torch.empty(0)}, tmp_path / "empty" / "model.safetensors")
    convert_directory(tmp_path / "empty", tmp_path / "c", options=ConvertOptions(chunk_bytes=SMALL_CHUNK))
    info = await daemon.control.register(str(tmp_path / "c"))
    async with session(daemon, info.model) as opened:
        load = opened.load()
        tensors = await asyncio.to_thread(bind, load)
        await asyncio.to_thread(load.wait_all)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"a": (0, 3), "b": (0,)}
        load.detach()


async def test_deleting_a_model_frees_disk_and_memory(daemon: LoaderProcess, checkpoint: Path) -> None:
    info = await daemon.control.register(str(checkpoint))
    await daemon.control.prefetch(info.model)
    await daemon.control.delete(info.model)
    assert list(daemon.models.iterdir()) == []
    assert (await daemon.control.status()).resident == ()
    with pytest.raises(ModelNotFound):
        await daemon.control.delete(info.model)
    assert (await daemon.control.register(str(checkpoint))).model == info.model


async def test_a_cancelled_registration_ends_its_process_and_leaves_nothing(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    async with loaderd(tmp_path) as daemon:
        running = psutil.Process(daemon.process.pid)
        asked = asyncio.create_task(daemon.control.register(str(tmp_path / "source")))
        await until(running.children, what="no conversion was started")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: not running.children(), what="the conversion goes on")
        assert list(daemon.models.iterdir()) == []
        daemon.control.lost.clear()
        assert await daemon.control.models() == ()


async def test_a_client_that_dies_in_mid_load_harms_nobody(tmp_path: Path) -> None:
    directory, _ = small_checkpoint(tmp_path / "model", layers=40)
    async with loaderd(tmp_path, pool_bytes=96 * SMALL_CHUNK, io_threads=1) as daemon:
        info = await daemon.control.register(str(directory))
        for number in range(5):
            fd = await daemon.control.grant(f"w{number}", info.model)
            with socket.socket(fileno=fd) as raw:
                for message in (Hello(), Load(request=1)):
                    payload = pack(message)
                    raw.sendall(struct.pack(">I", len(payload)) + payload)
            await daemon.control.gone(f"w{number}")
        async with session(daemon, info.model) as opened:
            load = opened.load()
            await asyncio.to_thread(load.wait_all, WAIT)
            load.detach()
        await daemon.control.gone("w")
        await daemon.control.evict(info.model)
        assert (await daemon.control.status()).pool.free == 96 * SMALL_CHUNK


async def test_cancelling_a_load_tells_who_waits(daemon: LoaderProcess, checkpoint: Path) -> None:
    info = await daemon.control.register(str(checkpoint))
    async with session(daemon, info.model) as opened:
        load = opened.load()
        load.cancel()
        with contextlib.suppress(Cancelled):  # it may have been quicker
            await asyncio.to_thread(load.wait_all, WAIT)
        load.detach()
        with suspended(daemon.process.pid):  # or it may be quicker again
            given_up = opened.load()
            given_up.detach()
        with pytest.raises(Cancelled):
            given_up.wait(99, WAIT)
        assert not load.ready or load.progress[0] == load.progress[1]


# --- rights and rubbish --------------------------------------------------------------------------------
async def test_a_sandbox_gets_its_own_model_and_partitions_only(daemon: LoaderProcess, checkpoint: Path) -> None:
    mine = await daemon.control.register(str(checkpoint))
    other = await daemon.control.register(str(small_checkpoint(checkpoint.parent / "o", seed=5)[0]))
    fd = await daemon.control.grant("w", mine.model, (0,))
    with socket.socket(fileno=fd) as raw:
        raw.settimeout(WAIT)
        for message in (Hello(), Load(request=1, model=other.model), Load(request=2, partition=1)):
            payload = pack(message)
            raw.sendall(struct.pack(">I", len(payload)) + payload)
        heard = b""
        while heard.count(b"forbidden") < 2:
            part = raw.recv(4096)
            assert part
            heard += part
    fd = await daemon.control.grant("w", mine.model)
    with socket.socket(fileno=fd) as raw:
        raw.settimeout(WAIT)
        payload = pack({"type": "Delete", "request": 1, "model": mine.model})
        for encoded in (pack(Hello()), payload):
            raw.sendall(struct.pack(">I", len(encoded)) + encoded)
        while raw.recv(4096):
            pass
    assert mine.model in await daemon.control.models()


RUBBISH = {
    "a huge length": b"\xff\xff\xff\xff",
    "no msgpack": b"\x00\x00\x00\x03\xc1\xc1\xc1",
    "another version": (lambda p: struct.pack(">I", len(p)) + p)(pack(Hello(version=99))),
    "no hello": (lambda p: struct.pack(">I", len(p)) + p)(pack(Load(request=1))),
    "nothing": b"",
    "half a message": b"\x00\x00\x00\x09\x81",
}


async def test_rubbish_ends_its_own_connection_only(daemon: LoaderProcess) -> None:
    loop = asyncio.get_running_loop()
    for data in RUBBISH.values():
        with socket.socket(socket.AF_UNIX) as raw:
            raw.setblocking(False)
            await loop.sock_connect(raw, str(daemon.socket))
            await loop.sock_sendall(raw, data)
            raw.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(WAIT):
                while await loop.sock_recv(raw, 4096):
                    pass
    assert await daemon.control.models() == ()
    assert daemon.socket.stat().st_mode & 0o777 == 0o600


async def test_a_client_of_another_version_is_told(daemon: LoaderProcess) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.setblocking(False)
        await loop.sock_connect(raw, str(daemon.socket))
        payload = pack(Hello(version=99))
        await loop.sock_sendall(raw, struct.pack(">I", len(payload)) + payload)
        assert b"version 99 is not served" in await loop.sock_recv(raw, 4096)


async def test_a_client_that_cannot_be_sent_to_ends_its_own_connection_only(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it is there: the kernel refuses what is sent."""
    stop, path = asyncio.Event(), tmp_path / "s"
    places = ("--node", "x", "--data", str(tmp_path / "data"), "--socket", str(path))

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    serving = asyncio.create_task(server.run(read_settings([*places, "--pool-bytes", str(2**24)]), stop))
    try:
        await until(lambda: serving.done() or path.exists(), WAIT, "it serves")
        async with LoaderControl(path) as refused, LoaderControl(path) as other:
            model = (await other.register(str(checkpoint))).model
            monkeypatch.setattr(socket, "send_fds", refuse)
            with pytest.raises(Unavailable):
                await refused.grant("w", model)
            assert await other.models() == (model,)
    finally:
        stop.set()
        await serving


@pytest.mark.parametrize("bounded", [True, False])
async def test_one_request_too_many_ends_itself_alone(
    daemon: LoaderProcess, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """The client holds back what loaderd would refuse; of one that does not the connection goes on, too."""
    model = (await daemon.control.register(str(checkpoint))).model
    if not bounded:
        monkeypatch.setattr(daemon.control, "_short", asyncio.Semaphore(10_000))
    with suspended(daemon.process.pid):  # so that it has all of them to read at once
        asking = [asyncio.create_task(daemon.control.describe(model)) for _ in range(MOST_REQUESTS + 50)]
        await asyncio.sleep(0)
    found = await asyncio.gather(*asking, return_exceptions=True)
    refused = [answer for answer in found if isinstance(answer, BaseException)]
    assert all(isinstance(error, Unavailable) and "ask again" in error.message for error in refused)
    assert bool(refused) is not bounded
    assert (await daemon.control.status()).models == (model,)


async def test_requests_that_were_cancelled_before_they_began_leave_nothing(
    daemon: LoaderProcess, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would count among those under way as long as the connection lasts."""
    model = (await daemon.control.register(str(checkpoint))).model
    monkeypatch.setattr(daemon.control, "_short", asyncio.Semaphore(10_000))
    with suspended(daemon.process.pid):  # so that it hears of each one and of its end at once
        for _ in range(MOST_REQUESTS):
            asking = asyncio.create_task(daemon.control.describe(model))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
    await asyncio.gather(*(daemon.control.describe(model) for _ in range(MOST_REQUESTS // 2)))


async def test_what_frees_memory_and_says_that_it_lives_is_never_too_much(
    daemon: LoaderProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.control, "_long", asyncio.Semaphore(10_000))
    _, digest = small_checkpoint(tmp_path / "served")
    with range_server(tmp_path / "served") as server:
        server.script.append("stall 0")
        uri = f"{server.url}/checkpoint"
        asking = [asyncio.create_task(daemon.control.register(uri)) for _ in range(MOST_REQUESTS)]
        await until(lambda: server.ranges, WAIT, "it comes, for all of them")
        with pytest.raises(Unavailable, match="ask again"):
            await daemon.control.describe(digest)
        await daemon.control.gone("w")
        assert (await daemon.control.status()).models == ()
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)


async def test_a_grant_that_comes_as_its_asker_gives_up_leaves_no_descriptor(
    daemon: LoaderProcess, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (await daemon.control.register(str(checkpoint))).model
    dispatch, given = daemon.control._dispatch, list[int]()

    def late(wire: AsyncWire, message: Answer) -> None:
        pending = list(daemon.control._pending.values())
        dispatch(wire, message)
        if isinstance(message, Granted):
            given.extend(pending[0].answer.result()[1])
            asking.cancel()

    monkeypatch.setattr(daemon.control, "_dispatch", late)
    asking = asyncio.create_task(daemon.control.grant("w", model))
    await asyncio.wait([asking])
    assert asking.cancelled()
    (fd,) = given
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    await daemon.control.gone("w")


async def test_sandboxes_that_have_come_and_gone_leave_no_descriptor(daemon: LoaderProcess, checkpoint: Path) -> None:
    """Neither what came with their grants, nor its duplicate, nor their connections."""
    model = (await daemon.control.register(str(checkpoint))).model
    process = psutil.Process(daemon.process.pid)
    pidfd = os.pidfd_open(os.getpid())
    try:

        async def come_and_go(count: int) -> None:
            for number in range(count):
                os.close(await daemon.control.grant(f"w{number}", model, pidfd=pidfd))
                await daemon.control.gone(f"w{number}")

        await come_and_go(1)
        before = process.num_fds()
        await come_and_go(8)
        await until(lambda: process.num_fds() <= before, what="as many are open as before")
    finally:
        os.close(pidfd)


async def test_what_a_sandbox_had_is_free_when_its_process_has_ended(daemon: LoaderProcess, checkpoint: Path) -> None:
    """Whatever its invoker says, or does not say."""
    model = (await daemon.control.register(str(checkpoint))).model
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    pidfd = os.pidfd_open(process.pid)
    try:
        fd = await daemon.control.grant("w", model, pidfd=pidfd)
        opened = await asyncio.to_thread(LoaderSession, fd)
        load = opened.load()
        await asyncio.to_thread(load.wait_all, WAIT)
        load.detach()
        await asyncio.to_thread(opened.close)
        assert (await daemon.control.status()).pool.held
    finally:
        os.close(pidfd)
        process.kill()
        await process.wait()

    async def free() -> bool:
        return not (await daemon.control.status()).pool.held

    await until(free, what="its process has ended")


async def test_a_prefetch_that_is_given_up_loads_nothing_further(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "model")
    with range_server(tmp_path / "model") as server:
        async with loaderd(tmp_path) as daemon:
            info = await daemon.control.register(f"{server.url}/checkpoint")
            server.script.extend(["stall 10"] * 50)
            asked = len(server.ranges)
            prefetch = asyncio.create_task(daemon.control.prefetch(info.model))
            await until(lambda: len(server.ranges) > asked, what="a request for the partition")
            prefetch.cancel()
            await asyncio.wait([prefetch])
            evicting = asyncio.create_task(daemon.control.evict(info.model))  # refused while somebody loads it
            server.released.set()
            await evicting
            assert not (await daemon.control.status()).resident


async def test_many_long_requests_hold_up_no_short_one(
    daemon: LoaderProcess, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (await daemon.control.register(str(checkpoint))).model
    monkeypatch.setattr(daemon.control, "_long", asyncio.Semaphore(0))
    waiting = asyncio.create_task(daemon.control.prefetch(model))
    assert (await daemon.control.describe(model)).model == model
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_what_was_fetched_and_is_of_no_use_goes_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at its start alone: it may run for months."""
    monkeypatch.setattr(service, "_TIDY_S", 0.01)
    places = ("--node", "x", "--data", str(tmp_path / "data"), "--socket", str(tmp_path / "s"))
    stop, old = asyncio.Event(), tmp_path / "data" / "cache" / "fetched" / "old"

    def leave() -> None:
        old.mkdir(parents=True)
        os.utime(old, (0, 0))

    leave()
    serving = asyncio.create_task(server.run(read_settings([*places, "--pool-bytes", str(2**24)]), stop))
    try:
        for _ in range(2):
            await until(lambda: serving.done() or not old.exists(), WAIT, "it is removed")
            leave()
    finally:
        stop.set()
        await serving


# --- life and death ------------------------------------------------------------------------------------
@pytest.mark.chaos
async def test_kill_9_in_mid_use(tmp_path: Path, checkpoint: Path) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(str(checkpoint))
        async with session(daemon, info.model) as opened:
            load = opened.load()
            tensors = await asyncio.to_thread(bind, load)
            await asyncio.to_thread(load.wait_all)
            (daemon.models / ".staging-left").mkdir()
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            daemon.process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(WAIT):
                await daemon.control.lost.wait()
            with pytest.raises(Unavailable):
                await daemon.control.models()
            for name, tensor in tensors.items():  # what is mapped stays
                assert bool((tensor == before[name]).all())
            load.wait_all(0.1)
            with pytest.raises(InstanceLost):
                await asyncio.to_thread(opened.load().wait_all, WAIT)
            load.detach()
    async with loaderd(tmp_path) as again:
        assert await again.control.models() == (info.model,)
        assert [path.name for path in again.models.iterdir()] == [info.model.removeprefix("sha256:")]


async def test_two_daemons_do_not_share_a_directory(daemon: LoaderProcess, tmp_path: Path) -> None:
    arguments = ["--node", "x", "--data", str(daemon.data), "--socket", str(tmp_path / "other.sock")]
    done = await asyncio.to_thread(run_loaderd, *arguments)
    assert done.returncode == 1
    assert "another loaderd uses" in done.stderr
    done = await asyncio.to_thread(run_loaderd, *arguments, "--pool-bytes", "-1")
    assert done.returncode == 2
    assert "POOL_BYTES" in done.stderr


def run_loaderd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sllm_loaderd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


@pytest.mark.chaos
async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'sllm_loaderd', *sys.argv[1:]], pass_fds=[])\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
    )
    arguments = ["--node", "x", "--data", tmp_path / "data", "--socket", tmp_path / "s", "--pool-bytes", "1048576"]
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *map(str, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await asyncio.wait_for(parent.stdout.readline(), WAIT)))
    await until((tmp_path / "s").exists, what="it did not start")
    assert child.cmdline()[0].startswith("sllm-loaderd x")
    parent.kill()
    await parent.communicate()
    await dead([child])


async def test_waits_have_deadlines(daemon: LoaderProcess, checkpoint: Path) -> None:
    from sllm_runtime.protocol.errors import DeadlineExceeded

    with pytest.raises(DeadlineExceeded):
        await daemon.control.register(str(checkpoint), deadline_s=0.0001)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await LoaderControl(daemon.data / "no.sock").open()
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(InstanceLost, match="does not answer"):
        await asyncio.to_thread(lambda: LoaderSession(theirs.detach(), timeout=0.05))


def test_its_lines_are_as_those_of_the_other_daemons(tmp_path: Path) -> None:
    """A node's log is read by programs (``SLLM_LOG_JSON``), or by who looks for more (``SLLM_LOG_LEVEL``)."""
    (tmp_path / "models").write_text("in the way")
    command = [sys.executable, "-m", "sllm_loaderd", "--node", "n1", "--data", str(tmp_path), "--socket", "s"]
    environment = {**os.environ, "SLLM_LOG_JSON": "1", "SLLM_LOG_LEVEL": "debug"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "CRITICAL" in line or "critical" in line]
    assert [json.loads(line)["component"] for line in lines] == ["loaderd"], done.stderr

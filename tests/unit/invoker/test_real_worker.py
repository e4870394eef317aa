"""The node with the real fork server, the real worker and the real loaderd: what the scripts stand for elsewhere."""

import asyncio
import contextlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from sllm_invoker import machine
from sllm_invoker.fork_server import ZYGOTE
from sllm_loaderd.probe import LEAST
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.limits import CHUNK_BYTES
from sllm_runtime.protocol.loader import DISK
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.node import PrepareModel, PrepareReply, StartInstance
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.invoker import NodeUnderTest, node_under_test, store_bundle
from tests.fixtures.loaderd import drop, loaderd, numbers_model
from tests.fixtures.nats import NODE, Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S, until

SOURCE = """
import os, subprocess, sys

class Layer:
    pass

def build(config=None):
    import torch
    net = torch.nn.Module()
    net.embed = torch.nn.Embedding(33, 64)
    net.layers = torch.nn.ModuleList(torch.nn.Linear(64, 256, bias=False) for _ in range(4))
    net.head = torch.nn.Linear(64, 7, bias=False)
    return net

def total(model):
    return float(sum(p.double().sum() for p in model.module.parameters()))

def spell(text: str):
    print("spelling", text)
    for letter in text:
        yield letter

def leave():
    subprocess.Popen(["setsid", "sleep", "1000"])
    return os.getpid()

def litter():
    import tempfile
    tempfile.mkdtemp(prefix="litter-")

def crowd():
    import time
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        time.sleep(8)
    for fd in taken:
        os.close(fd)
    return "goes on"

def hoard():
    raise RuntimeError(len(bytearray(2**31)))
"""
MEMORY = 512 * 2**20


def bundle() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("user.py", SOURCE)
    return buffer.getvalue()


def order(digest: str, nbytes: int, entry: str, kind: str, model: ModelRecord | None = None) -> StartInstance:
    made = Manifest(
        name="real",
        handler=Handler(entry=f"user:{entry}", kind=kind, streams=kind == "generator"),  # type: ignore[arg-type]
        memory=MEMORY,
        model=model.uri if model else None,
        model_loader="build" if model else "auto",
    )
    return StartInstance(
        term=1, instance=f"i-{entry}-{time.monotonic_ns()}", function="real", version=1, manifest=made, bundle=digest,
        bundle_bytes=nbytes, model=model,
    )  # fmt: skip


@pytest.fixture
async def node(nats: Nats, tmp_path: Path) -> AsyncIterator[NodeUnderTest]:  # noqa: F811
    async with (
        loaderd(tmp_path, chunk_bytes=CHUNK_BYTES, pool_bytes=16 * CHUNK_BYTES, prefault_bytes=0) as storage,
        node_under_test(nats, tmp_path, fork_server=ZYGOTE, loaderd_socket=storage.socket, pool_size=2) as under,
    ):
        yield under


async def test_the_disk_is_measured_when_the_first_workers_wait(nats: Nats, tmp_path: Path) -> None:  # noqa: F811
    """And not while they are made."""
    model = tmp_path / "data" / "models" / ("ab" * 32)
    model.mkdir(parents=True)
    (model / partition_name(0)).write_bytes(bytes(2 * LEAST))
    async with (
        loaderd(tmp_path) as storage,
        node_under_test(nats, tmp_path, loaderd_socket=storage.socket) as under,
    ):
        await until(lambda: under.status.paths, what="its disk is read")
        assert {status.pool_idle for status in under.statuses if status.paths} == {1}
        assert 0 in {status.pool_idle for status in under.statuses}, "it has reported before"


async def answer(node: NodeUnderTest, wanted: StartInstance, body: object = None) -> list[object]:
    """Start it, call it once, stop it."""
    await node.command("start", wanted)
    await node.reaches(wanted.instance, InstanceState.READY, within_s=60.0)
    assert wanted.models.keys() <= (node.status.shared or {}).keys(), "its model's bytes are set aside"
    _, call = await node.gateway.open(wanted.instance, json.dumps(body or {}).encode())
    end = await node.gateway.ended(call)
    assert end.error is None, end.error
    await node.stop(wanted.instance)
    await node.reaches(wanted.instance, InstanceState.STOPPED)
    return [msgspec.json.decode(value) for value in call.values]


async def prepared(node: NodeUnderTest, source: Path) -> ModelRecord:
    reply = await node.controller.call(
        subjects.node_command(NODE, "prepare"),
        PrepareModel(term=1, uri=str(source), wait_s=GIVE_UP_S),
        PrepareReply,
        timeout_s=2 * GIVE_UP_S,
    )
    assert reply.model is not None
    return reply.model


async def test_real_functions_with_and_without_a_model(node: NodeUnderTest, tmp_path: Path) -> None:
    arrays = numbers_model(tmp_path / "source")
    packed = bundle()
    digest = await store_bundle(node.controller, packed)
    model = await prepared(node, tmp_path / "source")
    assert model.nbytes >= sum(array.nbytes for array in arrays.values())
    await until(lambda: node.status.models, what="the node says what it has")
    assert node.status.dram_limit == 16 * CHUNK_BYTES
    assert node.status.memory == machine.memory() - node.status.dram_limit, "the pool's memory is nobody else's"

    drop(next(tmp_path.rglob(partition_name(0))))  # noqa: ASYNC240 - a directory of two files
    (total,) = await answer(node, order(digest, len(packed), "total", "function", model))
    assert total == pytest.approx(sum(float(array.astype("f8").sum()) for array in arrays.values()), rel=1e-6)
    await until(lambda: node.status.resident == (model.digest,), what="the weights stay in memory")
    await until(lambda: node.status.shared == {}, what="nobody uses them")
    await until(lambda: any(p.bandwidth for p in node.status.paths if p.path == DISK), what="its disk's speed")

    assert await answer(node, order(digest, len(packed), "spell", "generator"), {"text": "abc"}) == ["a", "b", "c"]
    assert len(await answer(node, order(digest, len(packed), "leave", "function"))) == 1

    wanted = order(digest, len(packed), "hoard", "function")
    await node.command("start", wanted)
    await node.reaches(wanted.instance, InstanceState.READY, within_s=60.0)
    _, call = await node.gateway.open(wanted.instance, b"{}")
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert "MemoryError" in end.error.message
    spans = node.instance(wanted.instance)
    assert spans is not None
    assert [span.name for span in spans.spans] == ["sandbox", "import", "setup"]


async def test_a_function_that_has_all_descriptors_for_a_while_is_heard(node: NodeUnderTest) -> None:
    packed = bundle()
    digest = await store_bundle(node.controller, packed)
    assert await answer(node, order(digest, len(packed), "crowd", "function")) == ["goes on"]


async def test_temporary_files_go_with_their_instance(node: NodeUnderTest) -> None:
    """Of workers that are forked when the fork server has imported all, as nearly every one is."""
    packed, complete = bundle(), asyncio.Event()
    digest = await store_bundle(node.controller, packed)
    renew = node.driver._on_complete

    def completed() -> None:
        renew()
        complete.set()

    node.driver.on_complete(completed)
    async with asyncio.timeout(2 * GIVE_UP_S):
        await complete.wait()
    for _ in range(4):  # those that waited before are among the first
        assert await answer(node, order(digest, len(packed), "litter", "function")) == [None]
    assert list((node.data / "tmp").rglob("litter-*")) == []
    assert list((node.data / "work").iterdir()) == []


async def test_warm_workers_have_the_pages_that_starts_touched(node: NodeUnderTest, tmp_path: Path) -> None:
    """Those of a start that was rehearsed, and, forked from then on, those of this one, which goes through a model."""
    numbers_model(tmp_path / "source")
    packed = bundle()
    digest = await store_bundle(node.controller, packed)
    model = await prepared(node, tmp_path / "source")
    await until(lambda: len(warm()) == 2 and min(warm().values()) > 6 * 2**20, what="the pool is full and has them")
    first = warm()
    for _ in range(4):  # those that take the first ones' places may be forked before these are looked at
        wanted = order(digest, len(packed), "total", "function", model)
        await node.command("start", wanted)
        await node.reaches(wanted.instance, InstanceState.READY, within_s=60.0)
        await until(lambda: len(warm()) == 2, what="it is full again")
    await until(lambda: not warm().keys() & first.keys() and len(warm()) == 2, what="others wait")
    await until(lambda: max(warm().values()) > max(first.values()) + 2**20, what="they have more")


def warm() -> dict[int, int]:
    """Bytes that each warm worker shares with nobody."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith("sllm-worker (warm)"):
                found[process.pid] = process.memory_full_info().uss
    return found


async def test_a_start_without_what_it_needs_names_it(node: NodeUnderTest) -> None:
    missing = order("sha256:" + "0" * 64, 10, "spell", "generator")
    await node.command("start", missing)
    status = await node.reaches(missing.instance, InstanceState.FAILED, within_s=60.0)
    assert status.error is not None
    assert "is not stored; deploy the function again" in status.error.message
    assert status.error.stage == "import"

    packed = bundle()
    digest = await store_bundle(node.controller, packed)
    nowhere = ModelRecord(digest="sha256:" + "1" * 64, uri="/nowhere", nbytes=10, partitions=(10,))
    lost = order(digest, len(packed), "total", "function", nowhere)
    await node.command("start", lost)
    status = await node.reaches(lost.instance, InstanceState.FAILED, within_s=60.0)
    assert status.error is not None
    assert "/nowhere" in status.error.message
    assert status.error.stage == "weights"

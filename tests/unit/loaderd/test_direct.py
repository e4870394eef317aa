"""Safetensors loaded as they are: from their headers, through the same pipeline, and converted behind that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sllm_loaderd.client import LoaderSession
from sllm_loaderd.convert.direct import index_directly
from sllm_loaderd.daemon.registration import Registrations
from sllm_loaderd.devices.tensors import bind
from sllm_loaderd.learnt import LearntDigests
from sllm_loaderd.sources import open_source
from sllm_loaderd.store import ModelStore
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.checkpoint import (
    BLOCK_ALIGN,
    CheckpointIndex,
    PartitionRecord,
    block_chunks,
    block_spans,
    check_index,
    decode_index,
    encode_index,
)
from sllm_runtime.protocol.errors import CorruptCheckpoint, InvalidCheckpoint, SllmError, UnsupportedModel
from sllm_runtime.protocol.loader import CONVERT_LATER, CONVERT_NEVER
from tests.fixtures.examples import examples
from tests.fixtures.loaderd import LoaderProcess, loaderd, mapped, numbers_model, programs, same, session
from tests.fixtures.models import save_model
from tests.fixtures.range_server import range_server
from tests.fixtures.sources import hub
from tests.fixtures.waiting import GIVE_UP_S, until

WAIT = GIVE_UP_S
POOL: dict[str, Any] = {"chunk_bytes": 16 * 2**20, "pool_bytes": 2**27}


def sharded(directory: Path, layers: int = 4) -> dict[str, np.ndarray]:
    """`numbers_model` in two files with an index, layers not in their order."""
    arrays = numbers_model(directory, layers=layers)
    (directory / "model.safetensors").unlink()
    names = sorted(arrays, reverse=True)
    parts = {"model-1.safetensors": names[: layers // 2], "model-2.safetensors": names[layers // 2 :]}
    for file, inside in parts.items():
        save_file({name: arrays[name] for name in inside}, directory / file)
    weight_map = {name: file for file, inside in parts.items() for name in inside}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "generation_config.json").write_text('{"a": 1}')
    return arrays


def index_of(uri: str, target: Path, **options: Any) -> CheckpointIndex:
    source = open_source(uri)
    with contextlib.closing(source):
        digest = index_directly(source, source.entries(), target, **options)
    return open_checkpoint(target, digest).index


async def loaded(daemon: LoaderProcess, digest: str) -> dict[str, np.ndarray]:
    fd = await daemon.control.grant("w", digest)

    def session() -> dict[str, np.ndarray]:
        with contextlib.closing(LoaderSession(fd)) as opened:
            load = opened.load()
            tensors = bind(load, WAIT)
            for block in range(len(load.blocks())):
                load.wait(block, WAIT)
            load.wait_all(WAIT)
            return {name: tensor.float().numpy().copy() for name, tensor in tensors.items()}

    try:
        return await asyncio.to_thread(session)
    finally:
        await daemon.control.gone("w")


# --- the index ------------------------------------------------------------------------------------
def test_the_index_of_files_as_they_are(tmp_path: Path) -> None:
    arrays = sharded(tmp_path / "model")
    index = index_of(str(tmp_path / "model"), tmp_path / "index", min_block=0, chunk_bytes=2**16)
    assert [segment.name for segment in index.segments] == ["model-1.safetensors", "model-2.safetensors"]
    assert all(segment.offset % BLOCK_ALIGN == 0 for segment in index.segments)
    assert [file.name for file in index.files] == ["generation_config.json"]
    files = {s.name: (s, (tmp_path / "model" / s.name).read_bytes()) for s in index.segments}
    for tensor in index.tensors:
        segment, data = next(f for f in files.values() if f[0].offset <= tensor.offset < f[0].offset + f[0].nbytes)
        start = tensor.offset - segment.offset
        assert data[start : start + tensor.nbytes] == arrays[tensor.name].tobytes()
    assert [block.shared for block in index.blocks if block.layers] == [(f"layers.{n}.weight",) for n in range(4)]
    chunks = block_chunks(index, 0)
    assert {number for needed in chunks for number in needed} <= set(range(-(-index.nbytes // 2**16)))
    assert decode_index(encode_index(index)) == index


def test_the_same_files_have_the_same_digest_everywhere_and_others_another(tmp_path: Path) -> None:
    sharded(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    os.utime(tmp_path / "two" / "model-1.safetensors")
    one, two = (index_of(str(tmp_path / name), tmp_path / f"{name}.index") for name in ("one", "two"))
    assert one == two
    numbers_model(tmp_path / "other", seed=1)
    numbers_model(tmp_path / "third", seed=2)
    assert index_of(str(tmp_path / "other"), tmp_path / "o") != index_of(str(tmp_path / "third"), tmp_path / "t")


def test_execution_order_and_ties_come_from_the_module(tmp_path: Path) -> None:
    model = save_model("tied_llama", tmp_path / "model")
    index = index_of(str(tmp_path / "model"), tmp_path / "index", min_block=0)
    assert index.order == "traced"
    assert ("lm_head.weight", "model.embed_tokens.weight") in {(alias.name, alias.of) for alias in index.aliases}
    assert "model.embed_tokens.weight" in index.blocks[0].shared
    assert "model.embed_tokens.weight" in index.blocks[-1].shared
    names = {tensor.name for tensor in index.tensors} | {alias.name for alias in index.aliases}
    assert names >= set(model.state_dict())


def test_what_has_to_be_converted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="no safetensors"):
        index_of(str(tmp_path / "bin"), tmp_path / "a")
    (tmp_path / "odd").mkdir()
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        }
    ).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(5)
    (tmp_path / "odd" / "model.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedModel, match="no multiple of its items"):
        index_of(str(tmp_path / "odd"), tmp_path / "b")
    sharded(tmp_path / "short")
    (tmp_path / "short" / "model-2.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"model-2\.safetensors"):
        index_of(str(tmp_path / "short"), tmp_path / "c")


@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_hostile_index_of_files_gives_a_typed_error_or_is_sound(data: st.DataObject) -> None:
    """Numbers of a good index are replaced; what passes the checks keeps every tensor in one file."""
    document = msgspec.to_builtins(GOOD)
    kind = data.draw(st.sampled_from(["segments", "tensors", "blocks", "partitions"]))
    record = data.draw(st.sampled_from(document[kind]))
    key = data.draw(st.sampled_from(sorted(record)))
    number = st.sampled_from([-1, 0, 1, 4095, 4096, 8192, 2**53, 2**63, 2**70])
    record[key] = data.draw(number | st.text(max_size=3) | st.sampled_from([record[key], None, [], ["x"], [0, 0]]))
    try:
        index = decode_index(json.dumps(document).encode())
    except InvalidCheckpoint:
        return
    for tensor in index.tensors:
        end = tensor.offset + tensor.nbytes
        inside = [s for s in index.segments if s.offset <= tensor.offset and end <= s.offset + s.nbytes]
        assert len(inside) == 1
        assert any(tensor.name in block.shared for block in index.blocks)


def good_index(directory: Path) -> CheckpointIndex:
    sharded(directory / "model")
    return index_of(str(directory / "model"), directory / "index", min_block=0)


@pytest.fixture(autouse=True, scope="module")
def _good(tmp_path_factory: pytest.TempPathFactory) -> None:
    global GOOD
    GOOD = good_index(tmp_path_factory.mktemp("good"))


GOOD: CheckpointIndex


def test_digests_are_not_to_be_in_such_an_index() -> None:
    part = msgspec.structs.replace(GOOD.partitions[0], digests=("0" * 32,))
    with pytest.raises(InvalidCheckpoint, match="1 digests for 0 chunks"):
        check_index(msgspec.structs.replace(GOOD, partitions=(part,)))


def test_digests_are_learnt_kept_and_held_against_later_loads(tmp_path: Path) -> None:
    index = msgspec.structs.replace(GOOD, chunk_bytes=2**16)
    count = -(-index.nbytes // 2**16)
    learnt = LearntDigests(tmp_path / "notes.json", index)
    assert learnt.of(0) == ("",) * count
    assert [learnt.learn(0, number, f"{number:032x}") for number in range(count)] == [None] * count
    again = LearntDigests(tmp_path / "notes.json", index)
    assert again.of(0) == learnt.of(0)
    assert isinstance(again.learn(0, 1, "f" * 32), CorruptCheckpoint)
    (tmp_path / "notes.json").write_text("[[")
    assert LearntDigests(tmp_path / "notes.json", index).of(0) == ("",) * count


# --- the daemon -----------------------------------------------------------------------------------
@pytest.mark.parametrize("noted", ["[]", '[["a"]]', '[["a", "b"], ["c"]]', "{", "null"])
def test_digests_of_another_shape_are_as_none(tmp_path: Path, noted: str) -> None:
    part = PartitionRecord(rank=0, nbytes=2 * BLOCK_ALIGN, digests=("", ""))
    index = CheckpointIndex(partitions=(part,), blocks=(), chunk_bytes=BLOCK_ALIGN, tensors=())
    (tmp_path / "notes.json").write_text(noted)
    learnt = LearntDigests(tmp_path / "notes.json", index)
    assert learnt.of(0) == ("", "")
    assert learnt.learn(0, 1, "a digest") is None
    assert isinstance(learnt.learn(0, 1, "another"), CorruptCheckpoint)


async def test_a_directory_is_loaded_without_a_copy_and_a_change_is_refused(tmp_path: Path) -> None:
    arrays = sharded(tmp_path / "model", layers=6)
    async with loaderd(tmp_path, **POOL) as daemon:
        info = await daemon.control.register(str(tmp_path / "model"), convert=CONVERT_NEVER)
        assert info.nbytes >= sum(array.nbytes for array in arrays.values())
        assert sum(block.nbytes for block in info.blocks) == sum(array.nbytes for array in arrays.values())
        assert {file.name for file in daemon.model_directory(info.model).iterdir()} == {
            "index.json",
            "generation_config.json",
        }
        same(await loaded(daemon, info.model), arrays)
        await daemon.control.validate(info.model)
        await daemon.control.evict(info.model)
        same(await loaded(daemon, info.model), arrays)
        await daemon.control.evict(info.model)
        file = tmp_path / "model" / "model-2.safetensors"
        stat = file.stat()
        with file.open("r+b") as opened:
            opened.seek(-3, os.SEEK_END)
            opened.write(b"xyz")
        with pytest.raises(SllmError, match="changed"):
            await loaded(daemon, info.model)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # whoever hides it meets the digests
        with pytest.raises(CorruptCheckpoint, match="digest"):
            await loaded(daemon, info.model)


async def test_files_of_a_server_are_loaded_and_copied_to_the_ssd_tier(tmp_path: Path) -> None:
    arrays = sharded(tmp_path / "served" / "model")
    with range_server(tmp_path / "served") as server:
        async with loaderd(tmp_path, **POOL) as daemon:
            info = await daemon.control.register(f"{server.url}/model", convert=CONVERT_NEVER)
            same(await loaded(daemon, info.model), arrays)
            deadline = time.monotonic() + WAIT
            while not list((daemon.data / "ssd").glob("*.bin")):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
    async with loaderd(tmp_path, **POOL) as daemon:  # the server is gone
        same(await loaded(daemon, info.model), arrays)


async def test_a_conversion_behind_the_first_use_takes_its_place(tmp_path: Path) -> None:
    arrays = sharded(tmp_path / "model")
    async with loaderd(tmp_path, convert=CONVERT_LATER, **POOL) as daemon:
        info = await daemon.control.register(str(tmp_path / "model"))
        same(await loaded(daemon, info.model), arrays)
        deadline = time.monotonic() + WAIT
        while len(await daemon.control.models()) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        shutil.move(tmp_path / "model", tmp_path / "away")  # what is loaded from here on is the conversion
        await daemon.control.evict(info.model)
        same(await loaded(daemon, info.model), arrays)
        status = await daemon.control.status()
        assert [resident.model for resident in status.resident] == [info.model]
        await daemon.control.delete(info.model)
        assert await daemon.control.models() == ()


async def test_deleting_a_model_ends_the_conversion_that_was_to_take_its_place(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    async with loaderd(tmp_path, **POOL) as daemon:
        running = psutil.Process(daemon.process.pid)
        info = await daemon.control.register(str(tmp_path / "model"), convert=CONVERT_LATER)
        await until(running.children, what="it is converted")
        await daemon.control.delete(info.model)
        assert not running.children()
        assert list(daemon.models.iterdir()) == []


async def test_a_later_conversion_fetches_nothing_that_the_node_has(tmp_path: Path) -> None:
    arrays = sharded(tmp_path / "served" / "model")
    weights = sum(array.nbytes for array in arrays.values())
    with range_server(tmp_path / "served") as server:
        async with loaderd(tmp_path, convert=CONVERT_LATER, **POOL) as daemon:
            info = await daemon.control.register(f"{server.url}/model")
            same(await loaded(daemon, info.model), arrays)
            before = len(server.ranges)

            async def converted() -> bool:
                return len(await daemon.control.models()) == 2

            await until(converted, what="the conversion takes its place")
            spans = [re.fullmatch(r"bytes=(\d+)-(\d+)", text) for text in server.ranges[before:]]
            fetched = sum(int(span[2]) - int(span[1]) + 1 for span in spans if span is not None)
            assert fetched < weights // 4, "small files alone"
            assert not list((daemon.data / "cache" / "fetched").glob("*")), "nothing is left of it"
            await daemon.control.evict(info.model)
    async with loaderd(tmp_path, **POOL) as daemon:  # the server is gone
        same(await loaded(daemon, info.model), arrays)


async def test_converting_now_what_was_loaded_as_it_is(tmp_path: Path) -> None:
    arrays = sharded(tmp_path / "model")
    async with loaderd(tmp_path, **POOL) as daemon:
        before = await daemon.control.register(str(tmp_path / "model"), convert=CONVERT_NEVER)
        after = await daemon.control.register(str(tmp_path / "model"))
        assert before.model != after.model
        assert (await daemon.control.register(str(tmp_path / "model"))).model == after.model
        for digest in (before.model, after.model):  # both names of it serve
            same(await loaded(daemon, digest), arrays)


async def test_page_tables_are_filled_in_behind_each_block(tmp_path: Path) -> None:
    arrays = sharded(tmp_path / "model")
    async with loaderd(tmp_path, **POOL) as daemon:
        info = await daemon.control.register(str(tmp_path / "model"), convert=CONVERT_NEVER)
        async with session(daemon, info.model) as opened:
            load = opened.load()
            tensors = await asyncio.to_thread(bind, load)
            await asyncio.to_thread(load.wait_all)
            index = load.index()
            spans = [span for block in index.blocks for span in block_spans(index, block)]
            assert sum(nbytes for _, nbytes in spans) == sum(array.nbytes for array in arrays.values())
            address = tensors["layers.0.weight"].untyped_storage().data_ptr()
            deadline = time.monotonic() + WAIT
            while mapped(address, 16 * 2**20)["Rss"] * 1024 < sum(array.nbytes for array in arrays.values()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert mapped(address, 16 * 2**20)["Private_Dirty"] == 0


async def test_validate_compares_what_loads_of_a_model_that_was_not_converted_are_held_against(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    async with loaderd(tmp_path, **POOL) as daemon:
        info = await daemon.control.register(str(tmp_path / "model"), convert=CONVERT_NEVER)
        await loaded(daemon, info.model)
        await daemon.control.validate(info.model)
        file = tmp_path / "model" / "model-2.safetensors"
        stat = file.stat()
        with file.open("r+b") as opened:  # a disk that has lost a bit
            opened.seek(-3, os.SEEK_END)
            opened.write(b"xyz")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(CorruptCheckpoint, match="chunk 0"):
            await daemon.control.validate(info.model)


async def test_validate_reads_the_conversion_that_stands_for_a_model(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    async with loaderd(tmp_path, **POOL) as daemon:
        info = await daemon.control.register(str(tmp_path / "model"), convert=CONVERT_LATER)

        async def converted() -> bool:
            return len(await daemon.control.models()) == 2

        await until(converted, what="the conversion takes its place")
        await until(lambda: list((daemon.data / "replaced").glob("[!.]*")), what="it is noted")
        (partition,) = daemon.models.glob("*/partition_0.bin")
        data = bytearray(partition.read_bytes())
        data[0] ^= 1
        partition.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="chunk 0"):
            await daemon.control.validate(info.model)


async def test_a_model_that_was_converted_behind_its_first_load_counts_as_on_the_disk(tmp_path: Path) -> None:
    """It is read from there from then on, and needs no copy on the SSD tier."""
    sharded(tmp_path / "served" / "model")
    with range_server(tmp_path / "served") as server:
        async with loaderd(tmp_path, convert=CONVERT_LATER, **POOL) as daemon:
            info = await daemon.control.register(f"{server.url}/model")
            assert (await daemon.control.status()).remote == (info.model,)
            await loaded(daemon, info.model)
            await until(lambda: list((daemon.data / "replaced").glob("[!.]*")), what="its conversion takes its place")
            await daemon.control.evict(info.model)
            assert (await daemon.control.status()).remote == ()


async def test_what_a_hubs_model_was_when_it_was_registered_is_what_loads_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its branch has moved since, and nothing of it was loaded here before: no digest tells one commit from another."""
    arrays = numbers_model(tmp_path / "one")
    numbers_model(tmp_path / "two", seed=1)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with hub(tmp_path / "one") as server, programs():
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        async with loaderd(tmp_path, **POOL) as daemon:
            info = await daemon.control.register("hf://org/tiny", convert=CONVERT_NEVER)
        server.moved = tmp_path / "two"
        async with loaderd(tmp_path, **POOL) as daemon:
            same(await loaded(daemon, info.model), arrays)


class _NothingHeld:
    """``Held`` of a node whose pool has nothing of any model."""

    async def loaded(self, *_: Any) -> None:
        """At once."""

    async def hand_over(self, *_: Any) -> None:
        """Nothing."""


async def test_a_conversion_of_other_weights_never_stands_for_a_model(tmp_path: Path) -> None:
    """The directory is saved anew while the conversion waits for its turn behind another one."""
    sharded(tmp_path / "model")
    store = ModelStore(tmp_path / "data", ssd_bytes=0)
    held: Any = _NothingHeld()
    registrations = Registrations(store, 1, held, WAIT)
    try:
        turns = registrations._turns
        await turns.acquire()  # another model is converted
        digest = await registrations.register(str(tmp_path / "model"), lambda *_: None, CONVERT_LATER)

        async def waits() -> bool:
            return turns.locked() and bool(turns._waiters)

        await until(waits, what="it waits for its turn")
        file = tmp_path / "model" / "model-2.safetensors"
        data = bytearray(file.read_bytes())
        data[-4:] = b"\0\0\0\0" if data[-4:] != b"\0\0\0\0" else b"\0\0\1\1"
        file.write_bytes(data)
        turns.release()

        async def ended() -> bool:
            return not registrations._later

        await until(ended, what="the conversion ends")
        assert store.replacement(digest) is None
    finally:
        await registrations.close()
        store.close()

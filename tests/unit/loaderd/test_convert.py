"""Conversion of real model directories, and of broken ones."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sllm_loaderd.client import memory
from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.safetensors import SafetensorsSource
from sllm_loaderd.devices.tensors import BoundTensors, base_tensor
from sllm_loaderd.verify import Checkpoint, describe, open_checkpoint, validate_checkpoint
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import Conflict, CorruptCheckpoint, InvalidCheckpoint, SllmError, UnsupportedModel
from tests.fixtures.examples import examples
from tests.fixtures.loaderd import SMALL_CHUNK, numbers_model, small_checkpoint
from tests.fixtures.models import BUILDERS, save_byte_tokenizer, save_model

OPTIONS = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0)


def bound(checkpoint: Checkpoint) -> BoundTensors:
    """The checkpoint's tensors over a buffer in this process."""
    import ctypes

    data = (checkpoint.directory / partition_name(0)).read_bytes()
    return BoundTensors(checkpoint.index, 0, base_tensor((ctypes.c_ubyte * len(data)).from_buffer_copy(data)))


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any, Checkpoint]]:
    directory = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, directory / "source", dtype=torch.bfloat16)
    save_byte_tokenizer(directory / "source")
    convert_directory(directory / "source", directory / "checkpoint", options=OPTIONS)
    yield request.param, model, validate_checkpoint(directory / "checkpoint")
    shutil.rmtree(directory)


def test_every_parameter_of_the_module_is_there_bit_for_bit(converted: tuple[str, Any, Checkpoint]) -> None:
    name, model, checkpoint = converted
    tensors = bound(checkpoint)
    for parameter, value in model.named_parameters(remove_duplicate=False):
        assert parameter in tensors, f"{name}: {parameter}"
        assert torch.equal(tensors[parameter], value), f"{name}: {parameter}"


def test_the_order_is_that_of_execution(converted: tuple[str, Any, Checkpoint]) -> None:
    name, _, checkpoint = converted
    index = checkpoint.index
    assert index.order == "traced"
    assert "embed" in index.tensors[0].name or "wte" in index.tensors[0].name
    numbers = [block.layers for block in index.blocks]
    layers = [layer for layer in numbers if layer is not None]
    assert layers == [(number, number) for number in range(len(layers))], name
    assert numbers[0] is None
    assert numbers[-1] is None
    assert describe(checkpoint).architecture.startswith(type(converted[1]).__name__[:3])


def test_a_tied_head_is_stored_once_and_its_block_waits_for_the_embedding(tmp_path: Path) -> None:
    save_model("tied_llama", tmp_path / "source")
    convert_directory(tmp_path / "source", tmp_path / "checkpoint", options=OPTIONS)
    index = open_checkpoint(tmp_path / "checkpoint").index
    assert [(alias.name, alias.of) for alias in index.aliases] == [("lm_head.weight", "model.embed_tokens.weight")]
    assert index.blocks[-1].shared == ("model.embed_tokens.weight",)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_the_files_hold_beside_the_embedding_is_stored_once_if_it_is_the_same(
    same: bool, tmp_path: Path
) -> None:
    """As older files have it. Whose head is another one keeps it, whatever its configuration says."""
    model = save_model("tied_llama", tmp_path / "source")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if not same:
        state["lm_head.weight"][-1, -1] += 1
    save_file(state, tmp_path / "source" / "model.safetensors")
    convert_directory(tmp_path / "source", tmp_path / "checkpoint", options=OPTIONS)
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    own = {tensor.name for tensor in checkpoint.index.tensors}
    assert own == set(state) - ({"lm_head.weight"} if same else set())
    tensors = bound(checkpoint)
    assert all(torch.equal(tensors[name], value) for name, value in state.items())


def test_experts_are_stored_as_the_module_holds_them_and_keep_their_own_names(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path / "source")
    source = SafetensorsSource(sorted((tmp_path / "source").glob("*.safetensors")))
    names = set(source.tensors)
    source.close()
    convert_directory(tmp_path / "source", tmp_path / "checkpoint", options=OPTIONS)
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    assert any(name.endswith("experts.3.w3.weight") for name in names)
    tensors = bound(checkpoint)
    assert names <= set(tensors)
    fused = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    one = tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"]
    assert torch.equal(fused[2, : one.shape[0]], one)
    assert one.data_ptr() == fused[2].data_ptr()


def test_the_same_source_gives_the_same_digest_and_shards_make_no_difference(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "one")
    save_model("llama", tmp_path / "many", shard="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    digests = {convert_directory(tmp_path / name, tmp_path / f"c-{name}") for name in ("one", "many")}
    assert len(digests) == 1
    assert convert_directory(tmp_path / "one", tmp_path / "again") in digests


def test_a_pytorch_file_gives_the_same_checkpoint_as_safetensors(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "safe")
    shutil.copytree(tmp_path / "safe", tmp_path / "torch", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(model.state_dict(), tmp_path / "torch" / "pytorch_model.bin")
    digests = {convert_directory(tmp_path / name, tmp_path / f"c-{name}") for name in ("safe", "torch")}
    assert len(digests) == 1


def test_pytorch_views_and_ties(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    state = {"base": base, "same": base, "turned": base.t(), "part": base[2:4, 3:7], "none": torch.empty(0, 4)}
    state["flag"] = torch.tensor([True, False])
    state["one"] = torch.tensor(7)
    (tmp_path / "source").mkdir()
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    convert_directory(tmp_path / "source", tmp_path / "checkpoint", options=OPTIONS)
    checkpoint = validate_checkpoint(tmp_path / "checkpoint")
    tensors = bound(checkpoint)
    for name, value in state.items():
        assert torch.equal(tensors[name], value)
        assert tensors[name].dtype == value.dtype
    assert [(alias.name, alias.of) for alias in checkpoint.index.aliases] == [("same", "base")]


def test_a_pytorch_file_with_code_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    torch.save({"a": Path("x")}, tmp_path / "source" / "pytorch_model.bin")
    with pytest.raises(InvalidCheckpoint, match="not a file of tensors alone"):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_every_dtype_and_any_name(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex64, torch.int32, torch.int16]
    state = {f"ключ {dtype} \n\"'/.{n}": torch.ones(3, 5).to(dtype) for n, dtype in enumerate(dtypes)}
    state |= {"zero": torch.zeros(0, 7), "scalar": torch.tensor(2.5), "": torch.ones(1)}
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source" / "model.safetensors")
    convert_directory(tmp_path / "source", tmp_path / "checkpoint", options=OPTIONS)
    checkpoint = validate_checkpoint(tmp_path / "checkpoint")
    tensors = bound(checkpoint)
    assert checkpoint.index.order == "offset"
    assert set(tensors) == set(state)
    for name, value in state.items():
        assert tensors[name].dtype == value.dtype
        assert tensors[name].shape == value.shape
        assert bytes(tensors[name].reshape(-1).view(torch.uint8)) == bytes(value.reshape(-1).view(torch.uint8))


def test_only_small_files_that_are_known_are_taken_and_never_code(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model("llama", source)
    save_byte_tokenizer(source)
    for name in ("modeling_x.py", "README.md", ".hidden.json", "training_args.bin", "optimizer.pt", "notes.json"):
        (source / name).write_bytes(b"x")
    convert_directory(source, tmp_path / "checkpoint")
    names = {file.name for file in open_checkpoint(tmp_path / "checkpoint").index.files}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    there = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert there == names | {"index.json", "partition_0.bin"}


def test_an_architecture_nobody_knows_is_ordered_by_offset_and_says_so(tmp_path: Path) -> None:
    numbers_model(tmp_path / "source")
    for config in ('{"architectures": ["NoSuchModel"]}', '{"architectures": "x"}', "{", '{"auto_map": {}}'):
        (tmp_path / "source" / "config.json").write_text(config)
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")
        assert open_checkpoint(tmp_path / "checkpoint").index.order == "offset"
        shutil.rmtree(tmp_path / "checkpoint")


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    numbers_model(tmp_path / "source")
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(Conflict):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")
    assert list((tmp_path / "checkpoint").iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    numbers_model(tmp_path / "source", layers=8)
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint", options=OPTIONS, progress=progress)
    assert len(seen) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- broken sources -------------------------------------------------------------------------------
def write_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **changes}


BROKEN: dict[str, tuple[Any, bytes]] = {
    "trailing bytes": ({"a": entry(0, 4)}, bytes(5)),
    "too short": ({"a": entry(0, 4)}, bytes(3)),
    "a hole": ({"a": entry(0, 4), "b": entry(6, 8)}, bytes(8)),
    "an overlap": ({"a": entry(0, 4), "b": entry(2, 8)}, bytes(8)),
    "begins late": ({"a": entry(2, 4)}, bytes(4)),
    "wrong shape": ({"a": entry(0, 4, shape=[5])}, bytes(4)),
    "huge shape": ({"a": entry(0, 4, shape=[2**40, 2**40])}, bytes(4)),
    "negative": ({"a": entry(0, 4, shape=[-1, -4])}, bytes(4)),
    "backwards": ({"a": entry(0, 4, data_offsets=[4, 0])}, bytes(4)),
    "no json": (b"{", b""),
    "no object": (b"[]", b""),
    "deep": (b"[" * 100_000, b""),
    "name twice": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},' * 1
                   + b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', bytes(1)),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case: str, tmp_path: Path) -> None:
    header, data = BROKEN[case]
    write_safetensors(tmp_path / "source" / "model.safetensors", header, data)
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("length", [2**63, 10**9, 50])
def test_a_header_longer_than_its_file_is_refused(length: int, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "source" / "model.safetensors", {}, length=length)
    with pytest.raises(InvalidCheckpoint, match="header of"):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")


def test_what_is_converted_already_is_no_model_to_convert(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "source" / "model.safetensors", {"a": entry(0, 4)}, bytes(4))
    convert_directory(tmp_path / "source", tmp_path / "checkpoint")
    with pytest.raises(InvalidCheckpoint, match="converted already"):
        convert_directory(tmp_path / "checkpoint", tmp_path / "again")


def test_a_dtype_that_is_not_served_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "source" / "model.safetensors", {"a": entry(0, 4, dtype="F6_E2M3")}, bytes(4))
    with pytest.raises(UnsupportedModel, match="F6_E2M3"):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")


def shards(directory: Path, weight_map: dict[str, str], **files: dict[str, int]) -> None:
    directory.mkdir()
    for file, tensors in files.items():
        save_file({name: torch.full((2,), value) for name, value in tensors.items()}, directory / f"{file}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def both_shards_have_it(path: Path) -> None:
    shards(path, {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": 1}, y={"a": 1, "b": 2})


def shard_is_outside(path: Path) -> None:
    shards(path, {"a": "../x.safetensors"}, x={"a": 1})
    shutil.copy(path / "x.safetensors", path.parent / "x.safetensors")


def shard_is_missing(path: Path) -> None:
    shards(path, {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": 1})


def tensor_is_in_another_shard(path: Path) -> None:
    shards(path, {"a": "y.safetensors", "b": "x.safetensors"}, x={"a": 1}, y={"b": 2})


def tensor_is_not_in_the_map(path: Path) -> None:
    shards(path, {"a": "x.safetensors"}, x={"a": 1, "b": 1})


def map_is_no_map(path: Path) -> None:
    shards(path, {}, x={"a": 1})
    (path / "model.safetensors.index.json").write_text("[1]")


def there_are_no_weights(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def it_is_no_directory(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize(
    "make",
    [both_shards_have_it, shard_is_outside, shard_is_missing, tensor_is_in_another_shard, tensor_is_not_in_the_map,
     map_is_no_map, there_are_no_weights, it_is_no_directory],
)  # fmt: skip
def test_shards_that_do_not_fit_are_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "source")
    with pytest.raises(InvalidCheckpoint):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


HEADER = json.dumps(
    {"a": entry(0, 4), "b": entry(4, 8, dtype="F32", shape=[1]), "__metadata__": {"format": "pt"}}
).encode()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(HEADER) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 9)
)
def test_a_damaged_header_gives_a_typed_error_or_a_sound_source(
    tmp_path: Path, damage: list[tuple[int, int]], extra: int
) -> None:
    raw = bytearray(HEADER)
    for place, value in damage:
        raw[place] = value
    path = tmp_path / "model.safetensors"
    write_safetensors(path, bytes(raw), bytes(extra))
    with contextlib.suppress(SllmError):
        source = SafetensorsSource([path])
        assert sum(tensor.nbytes for tensor in source.tensors.values()) == extra
        source.close()


# --- validation -----------------------------------------------------------------------------------
def test_validation_names_the_first_bad_chunk_and_its_tensors(tmp_path: Path) -> None:
    directory, _ = small_checkpoint(tmp_path)
    path = directory / partition_name(0)
    data = bytearray(path.read_bytes())
    data[2 * SMALL_CHUNK + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"chunk 2 \(bytes 131072 to 196608\).*layers\.1\.weight"):
        validate_checkpoint(directory)


def test_a_truncated_partition_and_a_changed_file_are_found(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    convert_directory(tmp_path / "source", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match=r"config\.json"):
        validate_checkpoint(tmp_path / "checkpoint")
    directory, _ = small_checkpoint(tmp_path / "small")
    with (directory / partition_name(0)).open("r+b") as file:
        file.truncate(SMALL_CHUNK)
    with pytest.raises(CorruptCheckpoint, match="65536 bytes where its index says"):
        validate_checkpoint(directory)
    (directory / partition_name(0)).unlink()
    with pytest.raises(CorruptCheckpoint, match="cannot be opened"):
        validate_checkpoint(directory)


def test_arrays_come_back_as_numpy_wrote_them(tmp_path: Path) -> None:
    arrays = numbers_model(tmp_path / "m" / "source", seed=3)
    directory, _ = small_checkpoint(tmp_path / "m", seed=3)
    tensors = bound(open_checkpoint(directory))
    for name, value in arrays.items():
        np.testing.assert_array_equal(tensors[name].numpy(), value)
    assert memory.HUGE_PAGE == 2 * 2**20


@pytest.mark.parametrize("stays", [True, False], ids=["shards are there", "shards are gone"])
def test_one_file_beside_the_index_of_former_shards_is_the_model(stays: bool, tmp_path: Path) -> None:
    """save_pretrained in shards, then again in one: it leaves the index there, and from_pretrained takes the one."""
    from tests.fixtures.models import llama

    shards, source = tmp_path / "shards", tmp_path / "hf"
    llama().save_pretrained(shards, max_shard_size="60KB")
    llama().save_pretrained(source, max_shard_size="60KB")
    second = llama()
    second.save_pretrained(source)
    assert (source / "model.safetensors.index.json").exists()
    if stays:
        for file in shards.glob("model-*.safetensors"):
            shutil.copyfile(file, source / file.name)
    theirs = type(second).from_pretrained(source)
    assert torch.equal(theirs.lm_head.weight, second.lm_head.weight)
    convert_directory(source, tmp_path / "checkpoint")
    found = bound(open_checkpoint(tmp_path / "checkpoint"))
    assert torch.equal(found["lm_head.weight"], second.lm_head.weight)

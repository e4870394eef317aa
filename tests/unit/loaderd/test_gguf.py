"""GGUF files written by the reference package: the models in them compute what the originals compute."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.gguf.blocks import to_bfloat16, unpack
from sllm_loaderd.convert.gguf.header import PLAIN
from sllm_loaderd.convert.gguf.source import GgufSource
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_loaderd.verify import Checkpoint, validate_checkpoint
from sllm_runtime.protocol.checkpoint import QUANT_BLOCKS
from sllm_runtime.protocol.errors import InvalidCheckpoint, SllmError, UnsupportedModel
from tests.fixtures.examples import examples
from tests.fixtures.gguf_files import EXAMPLES, arrays_of, model_of, swapped, write_gguf
from tests.fixtures.loaderd import SMALL_CHUNK, bound_tensors, ignore, loaderd

OPTIONS = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0)
IDS = torch.tensor([[1, 5, 9, 77, 3, 30, 2, 8, 64, 100, 21, 11, 50, 49, 48, 47, 46, 45, 44, 43]])


def converted(path: Path, target: Path, *, keep: bool = False) -> Checkpoint:
    options = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0, keep=keep)
    convert_directory(path, target, options=options, verify=ignore)
    return validate_checkpoint(target)


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    """What the module that the derived config.json names computes with the checkpoint's tensors."""
    config: Any = transformers.AutoConfig.from_pretrained(checkpoint.directory)
    model: Any = getattr(transformers, config.architectures[0])(config).eval()
    bound = bound_tensors(checkpoint)
    state = {name: bound[name].float() for name, _ in model.named_parameters(remove_duplicate=False)}
    missing, _ = model.load_state_dict(state, strict=False)
    assert not [name for name in missing if "rotary" not in name]
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_model_in_the_file_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    path = tmp_path / "model.gguf"
    write_gguf(path, name, arrays_of(name, model), model.config)
    checkpoint = converted(path, tmp_path / "checkpoint")
    assert checkpoint.index.order == "traced"
    with torch.no_grad():
        expected = model(IDS).logits
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-4, atol=1e-4)
    if not EXAMPLES[name].plus_one:
        bound = bound_tensors(checkpoint)
        for parameter, value in model.named_parameters(remove_duplicate=False):
            assert torch.equal(bound[parameter], value), parameter


@pytest.mark.parametrize("kind", sorted(QUANT_BLOCKS))
def test_every_packed_kind_is_unpacked_as_the_reference_does(kind: str) -> None:
    elements, nbytes = QUANT_BLOCKS[kind]
    assert gguf.GGML_QUANT_SIZES[Kind[kind.upper()]] == (elements, nbytes)
    data = np.random.default_rng(7).integers(0, 256, (300, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        found, expected = unpack(kind, data.reshape(-1)), gguf.quants.dequantize(data, Kind[kind.upper()]).reshape(-1)
    np.testing.assert_array_equal(found, expected)
    rounded = gguf.quants.quantize(expected, Kind.BF16).view(np.uint16)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(to_bfloat16(found)[numbers], rounded[numbers])


UNREAD = sorted(kind.name for kind in Kind if kind.name.lower() not in QUANT_BLOCKS and kind not in PLAIN)


@pytest.mark.parametrize("name", UNREAD)
def test_a_kind_that_is_not_read_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    elements, _ = gguf.GGML_QUANT_SIZES[Kind[name]]
    model = model_of("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", {"token_embd.weight": np.zeros((1, elements), np.float32)}, model.config)
    written = path.read_bytes()
    plain = b"token_embd.weight" + struct.pack("<IQQI", 2, elements, 1, Kind.F32)
    assert written.count(plain) == 1
    path.write_bytes(written.replace(plain, plain[:-4] + struct.pack("<I", Kind[name])))
    with pytest.raises(UnsupportedModel, match=rf"'token_embd.weight' has ggml type {name}, which is not read"):
        GgufSource([path])


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", Kind.Q4_0), ("llama", Kind.Q5_1), ("mixtral", Kind.Q8_0), ("gpt2", Kind.Q4_0)]
)
def test_quantised_tensors_become_bfloat16(name: str, kind: Any, tmp_path: Path) -> None:
    model = model_of(name)
    arrays = arrays_of(name, model)
    write_gguf(tmp_path / "model.gguf", name, arrays, model.config, kind=kind)
    checkpoint = converted(tmp_path / "model.gguf", tmp_path / "checkpoint")
    bound = bound_tensors(checkpoint)
    assert json.loads((checkpoint.directory / "config.json").read_text())["dtype"] == "bfloat16"
    for ours, theirs, turn in PAIRS[name]:
        numbers = gguf.quants.dequantize(gguf.quants.quantize(arrays[theirs], kind), kind)
        bits = torch.from_numpy(gguf.quants.quantize(turn(numbers), Kind.BF16).view(np.int16).copy())
        assert bound[ours].dtype == torch.bfloat16
        assert torch.equal(bound[ours].view(torch.int16), bits.view(bound[ours].shape)), ours


def _back(rows: np.ndarray) -> np.ndarray:
    """The inverse of `swapped` for four heads, found by swapping the numbers of the rows."""
    order = swapped(np.arange(len(rows)).reshape(-1, 1), 4).reshape(-1)
    return np.ascontiguousarray(rows[np.argsort(order)])


def _same(numbers: np.ndarray) -> np.ndarray:
    return numbers


LAYER = "model.layers.1"
PAIRS: dict[str, list[tuple[str, str, Any]]] = {
    "llama": [
        (f"{LAYER}.self_attn.q_proj.weight", "blk.1.attn_q.weight", _back),
        (f"{LAYER}.mlp.down_proj.weight", "blk.1.ffn_down.weight", _same),
        ("model.embed_tokens.weight", "token_embd.weight", _same),
    ],
    "mixtral": [
        (f"{LAYER}.block_sparse_moe.experts.3.w2.weight", "blk.1.ffn_down_exps.weight", lambda a: a[3].copy()),
        (f"{LAYER}.mlp.experts.down_proj", "blk.1.ffn_down_exps.weight", _same),
    ],
    "gpt2": [("transformer.h.0.attn.c_attn.weight", "blk.0.attn_qkv.weight", lambda a: np.ascontiguousarray(a.T))],
}


def test_kept_blocks_stay_packed_and_the_index_says_what_they_are(tmp_path: Path) -> None:
    model = model_of("llama")
    arrays = arrays_of("llama", model)
    write_gguf(tmp_path / "model.gguf", "llama", arrays, model.config, kind=Kind.Q4_0)
    checkpoint = converted(tmp_path / "model.gguf", tmp_path / "checkpoint", keep=True)
    quants = {quant.name: quant for quant in checkpoint.index.quants}
    bound = bound_tensors(checkpoint)
    assert len(quants) == 2 * 7 + 2
    for ours, theirs, turn in PAIRS["llama"]:
        packed = turn(gguf.quants.quantize(arrays[theirs], Kind.Q4_0))
        assert (quants[ours].kind, quants[ours].shape) == ("q4_0", arrays[theirs].shape)
        np.testing.assert_array_equal(bound[ours].numpy(), packed)


def test_packed_blocks_are_not_cut_by_a_split(tmp_path: Path) -> None:
    model = model_of("llama")
    arrays = arrays_of("llama", model)
    write_gguf(tmp_path / "model.gguf", "llama", arrays, model.config, kind=Kind.Q4_0)
    options = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0, keep=True, plan=AutoPlan("auto", 2))
    convert_directory(tmp_path / "model.gguf", tmp_path / "checkpoint", options=options, verify=ignore)
    checkpoint = validate_checkpoint(tmp_path / "checkpoint")
    name = f"{LAYER}.mlp.down_proj.weight"
    halves = [bound_tensors(checkpoint, rank)[name].numpy() for rank in range(2)]
    numbers = [gguf.quants.dequantize(np.ascontiguousarray(half), Kind.Q4_0) for half in halves]
    whole = gguf.quants.dequantize(gguf.quants.quantize(arrays["blk.1.ffn_down.weight"], Kind.Q4_0), Kind.Q4_0)
    np.testing.assert_array_equal(np.concatenate(numbers, axis=1), whole)


def test_files_split_in_parts_give_the_same_checkpoint(tmp_path: Path) -> None:
    model = model_of("qwen2")
    arrays = arrays_of("qwen2", model)
    write_gguf(tmp_path / "one.gguf", "qwen2", arrays, model.config)
    parts = tmp_path / "parts"
    parts.mkdir()
    write_gguf(parts / "model.gguf", "qwen2", arrays, model.config, split=7)
    files = sorted(parts.iterdir())
    assert len(files) > 2
    digests = {convert_directory(tmp_path / "one.gguf", tmp_path / "a"), convert_directory(parts, tmp_path / "b")}
    digests.add(convert_directory(files[0], tmp_path / "c"))
    assert len(digests) == 1
    files[1].unlink()
    with pytest.raises(InvalidCheckpoint, match=f"{files[1].name} is missing"):
        convert_directory(parts, tmp_path / "d")


def test_several_models_in_a_directory_are_not_guessed_between(tmp_path: Path) -> None:
    model = model_of("qwen2")
    (tmp_path / "source").mkdir()
    for name in ("a", "b"):
        write_gguf(tmp_path / "source" / f"{name}.gguf", "qwen2", arrays_of("qwen2", model), model.config)
    with pytest.raises(InvalidCheckpoint, match="give one file"):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    model = model_of("qwen2")
    tokens = [*(chr(code) for code in range(33, 127)), "¡", "¢", "£", "¤", "¥", "he", "<|end|>"]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 100 + [3], "tokenizer.ggml.merges": ["h e"],
            "tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eos_token_id": 100}  # fmt: skip
    write_gguf(tmp_path / "model.gguf", "qwen2", arrays_of("qwen2", model), model.config, keys=keys)
    checkpoint = converted(tmp_path / "model.gguf", tmp_path / "checkpoint")
    load: Any = transformers.AutoTokenizer.from_pretrained
    tokenizer = load(checkpoint.directory)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hehe<|end|>").input_ids) == ["he", "he", "<|end|>"]
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_vocabulary_that_cannot_be_rebuilt_is_left_out(tmp_path: Path) -> None:
    model = model_of("qwen2")
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "aaab"], "tokenizer.ggml.merges": ["a"]}
    write_gguf(tmp_path / "model.gguf", "qwen2", arrays_of("qwen2", model), model.config, keys=keys)
    checkpoint = converted(tmp_path / "model.gguf", tmp_path / "checkpoint")
    assert [file.name for file in checkpoint.index.files] == ["config.json"]


@pytest.mark.parametrize("lacks", ["a scaling that the file tells", "a number of the file"])
def test_what_cannot_be_derived_is_taken_from_the_directory(lacks: str, tmp_path: Path) -> None:
    """A ``config.json`` that lies there wins, as the refusal of the file alone says."""
    model, directory = model_of("llama3"), tmp_path / "model"
    arrays = arrays_of("llama3", model)
    if lacks.startswith("a scaling"):
        arrays["rope_freqs.weight"] = np.full_like(arrays["rope_freqs.weight"], 3.0)
    directory.mkdir()
    keys = {"context_length": "none"} if lacks.startswith("a number") else {}
    write_gguf(directory / "model.gguf", "llama3", arrays, model.config, keys=keys)
    with pytest.raises((InvalidCheckpoint, UnsupportedModel)):
        converted(directory, tmp_path / "refused")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)
    checkpoint = converted(directory, tmp_path / "checkpoint")
    assert (checkpoint.directory / "config.json").read_bytes() == (directory / "config.json").read_bytes()
    with torch.no_grad():
        assert torch.equal(logits(checkpoint), model(IDS).logits)


# --- broken files -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small() -> Any:
    return model_of("qwen2")


def small_file(path: Path, model: Any) -> bytearray:
    """A file of two short tensors and one of a single row."""
    arrays = arrays_of("qwen2", model)
    kept = {name: arrays[name][:8].copy() for name in ("token_embd.weight", "output.weight")}
    write_gguf(path, "qwen2", kept | {"output_norm.weight": arrays["output_norm.weight"]}, model.config)
    return bytearray(path.read_bytes())


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (InvalidCheckpoint, lambda d: b"GGUX" + d[4:]),
        (UnsupportedModel, lambda d: d[:4] + struct.pack("<I", 1) + d[8:]),
        (UnsupportedModel, lambda d: d[:4] + struct.pack(">I", 3) + d[8:]),
        (InvalidCheckpoint, lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:]),
        (InvalidCheckpoint, lambda d: d[:16] + struct.pack("<Q", 2**60) + d[24:]),
        (InvalidCheckpoint, lambda d: d[:24] + struct.pack("<Q", 2**63) + d[32:]),
        (InvalidCheckpoint, lambda d: d[:-64]),
        (InvalidCheckpoint, lambda d: d + bytes(4096)),
        (UnsupportedModel, lambda d: d.replace(b"qwen2", b"qwenX")),
        (UnsupportedModel, lambda d: d.replace(b"output_norm", b"outputXnorm")),
    ],
)
def test_a_broken_file_is_refused(error: type[SllmError], change: Any, small: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(change(small_file(path, small)))
    with pytest.raises(error) as caught:
        GgufSource([path])
    assert caught.value.field


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_gives_a_typed_error_or_readable_tensors(
    tmp_path: Path, small: Any, damage: list[tuple[int, int]]
) -> None:
    path = tmp_path / "model.gguf"
    kept = tmp_path / "kept"
    if not kept.exists():
        kept.write_bytes(small_file(path, small))
    data = bytearray(kept.read_bytes())
    for place, value in damage:
        data[place] = value
    path.write_bytes(data)
    try:
        source = GgufSource([path])
    except SllmError:
        return
    for tensor in source.tensors.values():
        out = bytearray(min(tensor.nbytes, 4096))
        source.read(tensor.name, 0, memoryview(out))
    source.close()


async def test_a_node_takes_a_gguf_file_as_a_model(tmp_path: Path) -> None:
    model = model_of("qwen3")
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", arrays_of("qwen3", model), model.config)
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(str(path))
        again = await daemon.control.register(str(path))
    assert info.architecture == "Qwen3ForCausalLM"
    assert info.order == "traced"
    assert again.model == info.model


def test_a_label_beside_the_file_is_no_description_of_it(tmp_path: Path) -> None:
    """As hubs have it: all else would be the defaults of a class, another theta among it, and nobody would be told."""
    model, directory = model_of("llama3"), tmp_path / "model"
    directory.mkdir()
    write_gguf(directory / "model.gguf", "llama3", arrays_of("llama3", model), model.config)
    alone = converted(directory, tmp_path / "alone")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    beside = converted(directory, tmp_path / "beside")
    config = json.loads((beside.directory / "config.json").read_text())
    assert config["hidden_size"] == model.config.hidden_size
    assert beside.digest == alone.digest

"""The vocabulary of a GGUF file gives the engine the ids that llama.cpp gives."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.gguf.source import GgufSource
from sllm_loaderd.convert.gguf.tokenizer import derive_tokenizer
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.worker.chat import ChatTemplate
from sllm_runtime.worker.constraints import Grammar
from sllm_runtime.worker.engine.admission import end_ids
from sllm_runtime.worker.tokens import Tokens
from tests.fixtures.gguf_files import EXAMPLES, Example, arrays_of, model_of, write_gguf
from tests.fixtures.loaderd import SMALL_CHUNK
from tests.unit.loaderd.test_gguf import IDS, converted, logits

BYTES = list(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = ["▁", "h", "i", "hi", "▁hi", "▁▁", "▁▁hi"]


def _keys(kind: str, tokens: Sequence[tuple[str, int]], given: dict[str, Any]) -> dict[str, Any]:
    keys = {"model": kind, "tokens": [t for t, _ in tokens], "token_type": [n for _, n in tokens], **given}
    return {key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def byte_level(pre: str, special: Sequence[tuple[str, int]], **given: Any) -> dict[str, Any]:
    """Ids 0 to 255 are bytes, 256 is ``hi``, 257 ``ihi``, which no merge makes; ``special`` from 258 on."""
    tokens = [*((byte, NORMAL) for byte in BYTES), ("hi", NORMAL), ("ihi", NORMAL), *special]
    return _keys("gpt2", tokens, {"pre": pre, "merges": ["h i"], **given})


def sentencepiece(special: Sequence[tuple[str, int]] = (), **given: Any) -> dict[str, Any]:
    """Ids 0 to 2 are special, 3 to 258 bytes, PIECES from 259 on, then ``special``."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(piece, NORMAL) for piece in PIECES] + list(special)
    scores = [0.0] * 259 + [-float(number) for number in range(len(tokens) - 259)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return _keys("llama", tokens, {"pre": "default", "scores": scores, **ids, **given})


def texts_of(architecture: str, keys: dict[str, Any], text: str, *, special: bool = False) -> list[str]:
    """The tokens of ``text`` as the engine cuts it."""
    tokens = Tokens.from_json(derive_tokenizer(architecture, keys)["tokenizer.json"])
    names: list[str] = keys["tokenizer.ggml.tokens"]
    return [names[id_] if id_ < len(names) else f"no row {id_}" for id_ in tokens.encode(text, special=special)]


LLAMA3 = [("<|begin_of_text|>", CONTROL), ("<|eot_id|>", CONTROL)]


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("llama", sentencepiece(), ["<s>", "▁hi"]),
        ("llama", sentencepiece(add_bos_token=False), ["▁hi"]),
        ("llama", sentencepiece(add_eos_token=True), ["<s>", "▁hi", "</s>"]),
        ("phi3", sentencepiece(), ["<s>", "▁hi"]),
        ("gemma2", sentencepiece(add_bos_token=True, add_space_prefix=False), ["<s>", "hi"]),
        ("llama", byte_level("llama-bpe", LLAMA3, bos_token_id=258), ["<|begin_of_text|>", "hi"]),
        ("llama", byte_level("llama-bpe", LLAMA3, bos_token_id=258, add_bos_token=False), ["hi"]),
        ("llama", byte_level("tekken", LLAMA3, bos_token_id=258), ["<|begin_of_text|>", "hi"]),
        ("qwen2", byte_level("qwen2", LLAMA3, bos_token_id=258), ["hi"]),
    ],
)
def test_a_prompt_begins_and_ends_as_the_file_says(
    architecture: str, keys: dict[str, Any], expected: list[str]
) -> None:
    assert texts_of(architecture, keys, "hi", special=True) == expected


BAR = "\uff5c"
DEEPSEEK = [f"<{BAR}{name}{BAR}>" for name in ("begin▁of▁sentence", "User", "Assistant", "think")]


def test_special_tokens_of_other_letters_than_bytes_have_are_found_in_a_prompt() -> None:
    """DeepSeek-R1-Distill: its template writes nothing else."""
    first, user, assistant, think = DEEPSEEK
    special = [*((token, CONTROL) for token in (first, user, assistant)), (think, USER_DEFINED)]
    keys = byte_level("deepseek-r1-qwen", special, bos_token_id=258)
    expected = [first, user, "hi", assistant, think]
    assert texts_of("qwen2", keys, "".join(expected)) == expected
    tokens = Tokens.from_json(derive_tokenizer("qwen2", keys)["tokenizer.json"])
    assert tokens.decode([256, 260, 261, 258]) == f"hi{think}"


FOREIGN = pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("llama", byte_level("llama-bpe", LLAMA3, eos_token_id=259)),
        ("llama", byte_level("tekken", [("<s>", CONTROL), ("</s>", CONTROL)], eos_token_id=259)),
        ("gemma3", sentencepiece()),
    ],
)


@FOREIGN
def test_no_token_lies_behind_the_vocabulary(architecture: str, keys: dict[str, Any]) -> None:
    """The engine has as many rows as the file has tokens."""
    tokens = Tokens.from_json(derive_tokenizer(architecture, keys)["tokenizer.json"])
    for text in ("<|endoftext|>", "<mask>"):
        assert max(tokens.encode(text)) < len(keys["tokenizer.ggml.tokens"])


@FOREIGN
def test_outputs_can_be_held_to_a_shape(architecture: str, keys: dict[str, Any]) -> None:
    tokens = Tokens.from_json(derive_tokenizer(architecture, keys)["tokenizer.json"])
    size = len(keys["tokenizer.ggml.tokens"])
    Grammar.of({"response_format": {"type": "json_object"}}, tokens.vocabulary(size, frozenset({size - 1})))


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["ihi"]), ("tekken", ["ihi"]), ("qwen2", ["i", "hi"])])
def test_llama_3_takes_a_piece_that_is_a_token_whole(pre: str, expected: list[str]) -> None:
    assert texts_of("llama", byte_level(pre, [], add_bos_token=False), "ihi") == expected


@pytest.mark.parametrize(
    ("given", "text", "expected"),
    [
        ({"add_space_prefix": False}, "hi hi", ["hi", "▁hi"]),
        ({"add_space_prefix": False}, "[I]hi", ["[I]", "hi"]),
        ({}, "hi hi", ["▁hi", "▁hi"]),
        ({}, " hi", ["▁▁hi"]),
        ({}, "<s>hi", ["<s>", "▁hi"]),
        ({"add_space_prefix": True}, "[I]hi", ["[I]", "▁hi"]),
    ],
)
def test_a_space_stands_before_texts_where_the_file_says_so(
    given: dict[str, Any], text: str, expected: list[str]
) -> None:
    """As llama.cpp, and as the tokenizer.json of Llama 2 and Mistral 7B: before the first and behind special ones."""
    assert texts_of("llama", sentencepiece([("[I]", CONTROL)], **given), text) == expected


def test_what_is_decoded_begins_as_it_was_generated_where_no_space_is_put_before() -> None:
    tokens = Tokens.from_json(derive_tokenizer("llama", sentencepiece(add_space_prefix=False))["tokenizer.json"])
    assert tokens.decode(tokens.encode(" hi", special=False)) == " hi"


@pytest.mark.parametrize(
    ("special", "given", "expected"),
    [
        ([("<end_of_turn>", CONTROL)], {}, {2, 266}),  # Gemma
        ([("<|user|>", CONTROL), ("<|end|>", CONTROL)], {}, {2, 267}),  # Phi-3
        ([("[/E]", CONTROL)], {"eot_token_id": 266}, {2, 266}),
        ([("[/E]", CONTROL)], {}, {2}),
    ],
)
def test_a_turn_ends_with_its_own_token(
    special: list[tuple[str, int]], given: dict[str, Any], expected: set[int], tmp_path: Path
) -> None:
    """Its id is in no metadata of most files."""
    model = model_of("qwen2")
    arrays = arrays_of("qwen2", model)
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2", arrays, model.config, keys=sentencepiece(special, **given))
    options = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0)
    convert_directory(path, tmp_path / "checkpoint", options=options)
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert end_ids(config, None, 1000) == expected


def test_a_model_without_a_window_says_so_with_a_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """llama.cpp's converter tells Phi-4 from Phi-3 by ``sliding_window = 0``."""
    keys = {**EXAMPLES["phi3"].keys, "attention.sliding_window": 0}
    monkeypatch.setitem(EXAMPLES, "phi4", Example(EXAMPLES["phi3"].arch, EXAMPLES["phi3"].make, keys=keys))
    monkeypatch.setitem(EXAMPLES, "phi3", EXAMPLES["phi4"])
    model = model_of("phi3")
    path = tmp_path / "model.gguf"
    write_gguf(path, "phi3", arrays_of("phi3", model), model.config)
    with torch.no_grad():
        expected = model(IDS).logits
    torch.testing.assert_close(logits(converted(path, tmp_path / "checkpoint")), expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_a_template_for_tools_keeps_it() -> None:
    """Hermes 3 (a Llama): its file has both under names of their own."""
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use"],
             "tokenizer.chat_template.tool_use": "{{ tools }}"}  # fmt: skip
    files = derive_tokenizer("llama", byte_level("llama-bpe", LLAMA3, **named))
    assert ChatTemplate.from_files(files).render([]) == "plain"
    assert ChatTemplate.from_files(files, tools=True).render([], ["f"]) == "['f']"


def test_transformers_reads_what_was_made(tmp_path: Path) -> None:
    for name, data in derive_tokenizer("llama", sentencepiece()).items():
        (tmp_path / name).write_bytes(data)
    load: Any = transformers.AutoTokenizer.from_pretrained
    assert load(tmp_path)("hi").input_ids == [1, 263]


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ],
)
def test_rotary_positions_are_scaled_where_llama_cpp_scales_them(keys: dict[str, Any], tmp_path: Path) -> None:
    """A factor alone is linear, and files of 2023 have it under another name."""
    model = model_of("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", arrays_of("llama", model), model.config, keys=keys)
    convert_directory(path, tmp_path / "checkpoint", options=ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0))
    rope = json.loads((tmp_path / "checkpoint" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope.get("factor")) == ("linear", 4.0)


@pytest.mark.parametrize("kind", [0, 7])
def test_a_header_of_gigabytes_is_refused_before_it_is_in_memory(kind: int, tmp_path: Path) -> None:
    """A file of nothing, 4 KiB on the disk: each of its bytes would be an object here."""
    count = 65 * 2**20
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, kind, count)
    path = tmp_path / "model.gguf"
    path.write_bytes(head)
    os.truncate(path, len(head) + count)
    tracemalloc.start()
    try:
        with pytest.raises(SllmError):
            GgufSource([path])
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_a_text_that_is_cut_in_an_unknown_way_gets_no_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp refuses such a file. As GPT-2 cuts it would be other tokens than the model has learnt."""
    assert derive_tokenizer("llama", byte_level("deepseek-coder", LLAMA3)) == {}
    assert "deepseek-coder" in caplog.text
    assert derive_tokenizer("gpt2", byte_level("gpt-2", LLAMA3))


def test_digits_stand_alone_where_the_vocabulary_was_learnt_so() -> None:
    """SmolLM, which is a llama to llama.cpp."""
    keys = byte_level("smollm", [("12", NORMAL)])
    keys["tokenizer.ggml.merges"].append("1 2")
    assert texts_of("llama", keys, "12") == ["1", "2"]
    plain = byte_level("gpt-2", [("12", NORMAL)])
    plain["tokenizer.ggml.merges"].append("1 2")
    assert texts_of("gpt2", plain, "12") == ["12"]

"""A Llama in transformers' layout as a GGUF file, tensor by tensor, for llama.cpp."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "fp32": gguf.GGMLQuantizationType.F32}
FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "fp32": gguf.LlamaFileType.ALL_F32}


def write(directory: Path, file: Path, dtype: str) -> None:
    """``directory``: config.json, tokenizer.json (byte-level BPE) and one model.safetensors; ``dtype`` of TYPES. Norms
    are float32, as llama.cpp wants them."""
    config = json.loads((directory / "config.json").read_bytes())
    writer = gguf.GGUFWriter(file, "llama")
    _header(writer, config, dtype)
    _vocabulary(writer, json.loads((directory / "tokenizer.json").read_bytes()), config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        data = _as_rotated(name, tensor.to(torch.float32).numpy(), config)
        kind = TYPES[dtype] if data.ndim > 1 else TYPES["fp32"]
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None, name
        writer.add_tensor(found, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _header(writer: gguf.GGUFWriter, config: dict[str, Any], dtype: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(FILE_TYPES[dtype])


def _vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Prompts and outputs are ids, so how text is cut does not matter: it has to be a vocabulary, though."""
    ids = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    ids |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    size = config["vocab_size"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    added = {token["id"] for token in tokenizer["added_tokens"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([ids.get(number, f"<|unused{number}|>") for number in range(size)])
    writer.add_token_types([control if number in added else normal for number in range(size)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _as_rotated(name: str, data: "np.ndarray[Any, Any]", config: dict[str, Any]) -> "np.ndarray[Any, Any]":
    """llama.cpp turns neighbouring elements of a head, transformers those half a head apart: rows of Q and K in its
    order."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    which = next((field for part, field in heads.items() if f".{part}." in name), None)
    if which is None:
        return data
    halves = data.reshape(config[which], 2, -1, data.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))

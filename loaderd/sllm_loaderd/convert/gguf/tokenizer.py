"""tokenizer.json and tokenizer_config.json out of a GGUF file's metadata, by transformers' own builders."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from sllm_loaderd.convert.gguf.header import Value

log = logging.getLogger(__name__)

_FIELDS: Final = {
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id", "padding_token_id": "pad_token_id", "add_space_prefix": "add_prefix_space",
}  # fmt: skip
_SPECIAL: Final = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip


def derive_tokenizer(architecture: str, metadata: Mapping[str, Value]) -> dict[str, bytes]:
    """The tokenizer's files by name; none where the file has no vocabulary, or one that cannot be rebuilt."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return {}
    fields = {name: metadata[key] for field, name in _FIELDS.items() if (key := f"tokenizer.ggml.{field}") in metadata}
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

        backend, _ = convert_gguf_tokenizer(architecture, fields)
        content: str = backend.to_str()
    # The builders take a vocabulary as it is meant to be, and may raise anything on another, even a panic of Rust's,
    # which is no Exception. Weights are of use alone.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.warning("no tokenizer from this GGUF file (%s: %s)", type(error).__name__, error)
        return {}
    config = _config(metadata, [str(token) for token in tokens])
    return {"tokenizer.json": content.encode(), "tokenizer_config.json": json.dumps(config, indent=1).encode()}


def _config(metadata: Mapping[str, Value], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(tokens):
            config[name] = tokens[number]
    for name, flag in (("add_bos_token", "add_bos_token"), ("add_eos_token", "add_eos_token")):
        value = metadata.get(f"tokenizer.ggml.{flag}", name == "add_bos_token" and _sentencepiece(metadata))
        config[name] = bool(value)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _sentencepiece(metadata: Mapping[str, Value]) -> bool:
    """llama.cpp puts the first token before a text of such a vocabulary, unless the file says otherwise."""
    return metadata.get("tokenizer.ggml.model") == "llama"

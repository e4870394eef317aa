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
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_WHOLE_PIECES: Final = frozenset({
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    "tekken",
})  # fmt: skip
"""llama.cpp's names of Llama 3 and Mistral Nemo: pieces that are tokens are whole, texts have a first token."""
_PLAIN: Final = frozenset({
    "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe",
    "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling",
})  # fmt: skip
"""llama.cpp's names of vocabularies whose texts are cut as GPT-2's."""
_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Those that are cut so behind their digits, each of which stands alone."""
_OF_GEMMA: Final = frozenset({"gemma", "gemma2", "gemma3"})


def derive_tokenizer(architecture: str, metadata: Mapping[str, Value]) -> dict[str, bytes]:
    """The tokenizer's files by name; none where the file has no vocabulary, or one that cannot be rebuilt."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return {}
    fields = {name: metadata[key] for field, name in _FIELDS.items() if (key := f"tokenizer.ggml.{field}") in metadata}
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )

        # The builders cut what they do not know as GPT-2: other tokens than the model has learnt, and nobody is told.
        pre = metadata.get("tokenizer.ggml.pre", "default")
        known = {"default", *_PLAIN, *_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS}
        if metadata.get("tokenizer.ggml.model") == "gpt2" and pre not in known:
            log.warning("no tokenizer from this GGUF file: %r cuts texts in a way that is not known here", pre)
            return {}
        backend, _ = convert_gguf_tokenizer(architecture, fields)
        content = _completed(json.loads(backend.to_str()), metadata, [str(token) for token in tokens], architecture)
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
    config |= {f"add_{name}_token": _adds(metadata, name) for name in ("bos", "eos")}
    if (template := _template(metadata)) is not None:
        config["chat_template"] = template
    return config


def _template(metadata: Mapping[str, Value]) -> str | list[dict[str, str]] | None:
    """The chat template; several as transformers' tokenizer_config.json names them."""
    default, names = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates")
    found = {} if not isinstance(default, str) else {"default": default}
    for name in names if isinstance(names, list) else []:
        if isinstance(template := metadata.get(f"tokenizer.chat_template.{name}"), str):
            found[str(name)] = template
    if found.keys() <= {"default"}:
        return found.get("default")
    return [{"name": name, "template": template} for name, template in found.items()]


def _adds(metadata: Mapping[str, Value], name: str) -> bool:
    """Whether llama.cpp puts that token around a text: where the file says nothing, the first one before those of some
    vocabularies."""
    first = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_PIECES
    return bool(metadata.get(f"tokenizer.ggml.add_{name}_token", name == "bos" and first))


def _completed(made: dict[str, Any], metadata: Mapping[str, Value], tokens: list[str], architecture: str) -> str:
    """tokenizer.json with what the builders leave to transformers' own classes, which no engine has, or get wrong."""
    given, vocabulary = metadata.get("tokenizer.ggml.token_type"), made["model"]["vocab"]
    types = given if isinstance(given, list) and isinstance(vocabulary, dict) else []
    # The builders' classes bring special tokens of one model each: behind the vocabulary there is no row for them.
    added = {entry["id"]: entry for entry in made["added_tokens"] if entry["id"] < len(tokens)}
    spelled = {number: text for text, number in vocabulary.items()} if types else {}
    for number, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind in (_CONTROL, _USER_DEFINED) and number not in added and token not in vocabulary:
            # Not in the alphabet of bytes (<\uff5cUser\uff5c>), and spelled in it there: no text would be that token.
            vocabulary.pop(spelled.get(number, token), None)
            vocabulary[token] = number
            added[number] = {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                             "normalized": False, "special": kind == _CONTROL}  # fmt: skip
    made["added_tokens"] = [added[number] for number in sorted(added)]
    if metadata.get("tokenizer.ggml.model") == "gpt2" and metadata.get("tokenizer.ggml.pre") in _DIGITS:
        alone = {"type": "Digits", "individual_digits": True}
        made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [alone, made["pre_tokenizer"]]}
    if metadata.get("tokenizer.ggml.pre") in _WHOLE_PIECES:
        made["model"]["ignore_merges"] = True
    if metadata.get("tokenizer.ggml.model") == "llama" and architecture not in _OF_GEMMA:
        _set_spaces(made, prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    made["post_processor"] = _around(metadata, tokens)
    return json.dumps(made, ensure_ascii=False)


def _set_spaces(made: dict[str, Any], *, prefix: bool) -> None:
    """As llama.cpp: a space before every run of text, at the beginning and after a special token, or before none."""
    written = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    before = [{"type": "Prepend", "prepend": "\u2581"}] if prefix else []
    made["normalizer"] = {"type": "Sequence", "normalizers": [*before, written]}
    made["pre_tokenizer"] = None
    if not prefix:
        steps = made["decoder"]["decoders"]
        made["decoder"]["decoders"] = [step for step in steps if step["type"] != "Strip"]


def _around(metadata: Mapping[str, Value], tokens: list[str]) -> dict[str, Any] | None:
    """What the tokenizer puts around a text."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos") if _adds(metadata, name)}
    put = {name: id_ for name, id_ in ids.items() if type(id_) is int and 0 <= id_ < len(tokens)}
    if not put:
        return None
    special = {name: {"SpecialToken": {"id": tokens[id_], "type_id": 0}} for name, id_ in put.items()}
    begin, end = [[special[name]] if name in special else [] for name in ("bos", "eos")]
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [*begin, text[0], *end],
        "pair": [*begin, text[0], *end, *begin, text[1], *end],
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in put.values()},
    }

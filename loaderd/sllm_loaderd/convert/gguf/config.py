"""config.json out of a GGUF file's metadata: transformers' words for what llama.cpp wrote down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sllm_loaderd.convert.gguf.architectures import Architecture
from sllm_loaderd.convert.gguf.header import GgufHeader
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel

Factors = Callable[[str], Sequence[float] | None]
"""The numbers of a small tensor of the file, by name; None if it has no such tensor."""

_LLAMA3: Final = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor and original length of every Llama 3.1 and later; the file has the result only."""
_ENDS: Final = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
"""Tokens that end an output whatever the file says, as llama.cpp has it: most files name one of several alone."""
_GEMMA_27B: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that scale queries by the width of a head in the residual stream, as llama.cpp tells them."""


_DEPTHS: Final = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "text_config"})
"""One of these says how deep a model is in a ``config.json`` that describes one."""


def is_label(config: bytes) -> bool:
    """Whether a ``config.json`` is but a label (``{"model_type": "mistral"}``), as hubs have them beside GGUF files:
    what it leaves out would be a class's defaults, and the file says what it is."""
    try:
        found = json.loads(config)
    except ValueError:
        return False
    return isinstance(found, dict) and not _DEPTHS & found.keys()


class Metadata:
    """Numbers of one architecture's keys. Raises ``InvalidCheckpoint`` for one that is missing or of another kind."""

    def __init__(self, header: GgufHeader, prefix: str) -> None:
        self._values, self._prefix, self._file = header.metadata, prefix, header.path

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 to 2**31."""
        value = self._values.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # the same for every layer
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**31:
            raise self._bad(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._values.get(f"{self._prefix}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._bad(key, value)
        return float(f"{value:.7g}")  # stored as float32: 1e-05, not 9.999999747378752e-06

    def text(self, key: str) -> str:
        """A string; empty if it is not there."""
        value = self._values.get(f"{self._prefix}.{key}")
        return value if isinstance(value, str) else ""

    def token(self, name: str) -> int | None:
        """The id of a special token, if the file names it."""
        value = self._values.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def ends(self) -> int | list[int] | None:
        """Ids that end an output: of a text, of a turn, of a message."""
        tokens = self._values.get("tokenizer.ggml.tokens")
        named = enumerate(tokens) if isinstance(tokens, list) else []
        found = [self.token(name) for name in ("eos", "eot", "eom")]
        found += [number for number, token in named if isinstance(token, str) and token in _ENDS]
        ids = list(dict.fromkeys(id_ for id_ in found if id_ is not None))
        return ids if len(ids) > 1 else next(iter(ids), None)

    def _bad(self, key: str, value: object) -> InvalidCheckpoint:
        text = f"{self._file}: metadata {self._prefix}.{key} is {str(value)[:80]!r}; fetch the file again"
        return InvalidCheckpoint(text, field=key)


def heads(header: GgufHeader, prefix: str) -> tuple[int, int]:
    """Query heads and key-value heads. Raises ``InvalidCheckpoint``."""
    metadata = Metadata(header, prefix)
    query = metadata.whole("attention.head_count")
    return query, metadata.whole("attention.head_count_kv", query)


def derive_config(
    header: GgufHeader, prefix: str, kind: Architecture, vocabulary: int, dtype: str, factors: Factors
) -> dict[str, Any]:
    """config.json of this file's model. ``vocabulary``: rows of the embedding. ``dtype``: what most weights have.

    Raises ``InvalidCheckpoint`` for metadata that is missing, ``UnsupportedModel`` for a rotary scaling that cannot be
    told from the file.
    """
    metadata = Metadata(header, prefix)
    special = {
        "bos_token_id": metadata.token("bos"), "eos_token_id": metadata.ends(),
        "pad_token_id": metadata.token("padding"),
    }  # fmt: skip
    shared = {
        "architectures": [kind.cls],
        "model_type": kind.model_type,
        "dtype": dtype,
        "vocab_size": vocabulary,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in header.tensors),
        **special,  # null where the file names none: transformers' defaults are those of one other model
    }
    if kind.model_type == "gpt2":
        return shared | _gpt2(metadata)
    config = shared | _decoder(metadata)
    config["rope_parameters"] = _rope(metadata, config, factors)
    config |= _extras(metadata, kind.model_type, config, factors)
    biased = any(tensor.name == "blk.0.attn_q.bias" for tensor in header.tensors)
    return config | ({"attention_bias": True} if biased and kind.model_type == "llama" else {})


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    width = metadata.whole("embedding_length")
    return {
        "n_embd": width,
        "n_layer": metadata.whole("block_count"),
        "n_head": metadata.whole("attention.head_count"),
        "n_positions": metadata.whole("context_length"),
        "n_inner": metadata.whole("feed_forward_length", 4 * width),
        "layer_norm_epsilon": metadata.real("attention.layer_norm_epsilon"),
    }


def _decoder(metadata: Metadata) -> dict[str, Any]:
    width, query = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    return {
        "hidden_size": width,
        "intermediate_size": metadata.whole("feed_forward_length"),
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": query,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", query),
        "head_dim": metadata.whole("attention.key_length", width // max(query, 1)),
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
    }


def _rope(metadata: Metadata, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    theta = metadata.real("rope.freq_base", 10_000.0)
    if theta <= 0:
        raise UnsupportedModel(f"rotary base {theta} is not above 0", field="rope.freq_base")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factor = metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 0.0))  # the older name
    scaling = metadata.text("rope.scaling.type") or ("linear" if factor else "")  # as llama.cpp
    if scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": factor or 1.0}
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = metadata.whole("rope.scaling.original_context_length")
    if (divisors := factors("rope_freqs.weight")) is not None:
        rope |= _llama3(divisors, theta)
    return rope


def _llama3(divisors: Sequence[float], theta: float) -> dict[str, Any]:
    """The parameters that give ``divisors``, by which each rotary frequency was divided."""
    factor = round(max(divisors), 4)
    low, high, length = _LLAMA3
    for number, divisor in enumerate(divisors):
        wavelength = 2 * math.pi * theta ** (number / len(divisors))
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        if factor < 1 or not abs(divisor * ((1 - smooth) / factor + smooth) - 1) < 1e-3:
            raise UnsupportedModel("rope_freqs.weight is no scaling of Llama 3; give a directory with its config.json")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": length}  # fmt: skip


def _extras(metadata: Metadata, model_type: str, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    """What one architecture has beyond the others, its own ``rope_parameters`` included."""
    size = metadata.whole("attention.sliding_window", 0)  # llama.cpp writes 0 where there is none (Phi-4)
    window = {"sliding_window": size} if size else {}
    if model_type == "mixtral":
        return {"num_local_experts": metadata.whole("expert_count"),
                "num_experts_per_tok": metadata.whole("expert_used_count")}  # fmt: skip
    if model_type == "mistral":
        return {"sliding_window": None, **window}
    if model_type in ("gemma2", "gemma3_text"):
        return window | _gemma(metadata, model_type.removesuffix("_text"), config)
    if model_type == "phi3":
        return {"sliding_window": None, **window, **_phi3(metadata, config, factors)}
    return {}


def _gemma(metadata: Metadata, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    wide = config["num_hidden_layers"] == _GEMMA_27B[name]
    scalar = config["hidden_size"] // max(config["num_attention_heads"], 1) if wide else config["head_dim"]
    extras: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    if name == "gemma3":
        local = {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base_swa", 10_000.0)}
        return extras | {"rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local}}
    return extras | {
        f"{kind}_logit_softcapping": metadata.real(f"{kind}_logit_softcapping", default)
        for kind, default in (("attn", 50.0), ("final", 30.0))
    }


def _phi3(metadata: Metadata, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    head = config["head_dim"]
    rope = {**config["rope_parameters"],
            "partial_rotary_factor": metadata.whole("rope.dimension_count", head) / max(head, 1)}  # fmt: skip
    original = metadata.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    long, short = factors("rope_factors_long.weight"), factors("rope_factors_short.weight")
    if long is not None and short is not None:
        rope |= {"rope_type": "longrope", "long_factor": list(long), "short_factor": list(short),
                 "original_max_position_embeddings": original}  # fmt: skip
    return {"rope_parameters": rope, "original_max_position_embeddings": original}

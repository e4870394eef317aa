"""The execution order of families that everybody serves, by the names of their tensors.

What ``module`` would trace, without torch and transformers: importing these takes more of a processor than converting a
small model. A test holds each table against the trace. What does not fit its table to the letter is traced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from sllm_loaderd.convert.module_plan import ModulePlan


@dataclass(frozen=True, slots=True)
class _Family:
    """Modules in the order in which a forward pass uses them; each has a weight and perhaps a bias."""

    embeddings: tuple[str, ...]
    """The first one is the head's too, where the two are tied."""
    layers: str
    layer: tuple[str, ...]
    end: tuple[str, ...]
    """What comes between the last layer and the head."""
    tied: bool = False
    """Unless its configuration says otherwise."""
    head: tuple[str, ...] = ("lm_head",)


class _Config(msgspec.Struct, frozen=True):
    """What of a config.json tells one order from another."""

    architectures: tuple[str, ...]
    model_type: str
    num_hidden_layers: int = 0
    n_layer: int = 0
    tie_word_embeddings: bool | UnsetType = UNSET
    do_layer_norm_before: bool = True


_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NORMED_QKV: Final = (
    "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj",
)  # fmt: skip
_GATED: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_FUSED: Final = ("mlp.gate_up_proj", "mlp.down_proj")


def _llama(attention: tuple[str, ...], mlp: tuple[str, ...]) -> _Family:
    layer = ("input_layernorm", *attention, "self_attn.o_proj", "post_attention_layernorm", *mlp)
    return _Family(("model.embed_tokens",), "model.layers", layer, ("model.norm",))


def _gemma(*attention: str) -> _Family:
    before = ("input_layernorm", *attention, "self_attn.o_proj", "post_attention_layernorm")
    layer = (*before, "pre_feedforward_layernorm", *_GATED, "post_feedforward_layernorm")
    return _Family(("model.embed_tokens",), "model.layers", layer, ("model.norm",), tied=True)


def _opt(layer: tuple[str, ...]) -> _Family:
    embeddings = ("embed_tokens", "embed_positions", "project_in")
    inside = tuple(f"model.decoder.{name}" for name in (*embeddings, "final_layer_norm", "project_out"))
    return _Family(inside[:3], "model.decoder.layers", layer, inside[3:], tied=True)


_OPT_ATTENTION: Final = (*_QKV, "self_attn.out_proj")
_POST_NORM_OPT: Final = _opt((*_OPT_ATTENTION, "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"))
_FAMILIES: Final[Mapping[tuple[str, str], _Family]] = {
    ("llama", "LlamaForCausalLM"): _llama(_QKV, _GATED),
    ("mistral", "MistralForCausalLM"): _llama(_QKV, _GATED),
    ("qwen2", "Qwen2ForCausalLM"): _llama(_QKV, _GATED),
    ("qwen3", "Qwen3ForCausalLM"): _llama(_NORMED_QKV, _GATED),
    ("phi3", "Phi3ForCausalLM"): _llama(("self_attn.qkv_proj",), _FUSED),
    ("gemma2", "Gemma2ForCausalLM"): _gemma(*_QKV),
    ("gemma3_text", "Gemma3ForCausalLM"): _gemma(*_QKV, "self_attn.q_norm", "self_attn.k_norm"),
    ("opt", "OPTForCausalLM"): _opt(("self_attn_layer_norm", *_OPT_ATTENTION, "final_layer_norm", "fc1", "fc2")),
    ("falcon", "FalconForCausalLM"): _Family(
        ("transformer.word_embeddings",),
        "transformer.h",
        (
            "input_layernorm", "ln_attn", "ln_mlp", "self_attention.query_key_value", "self_attention.dense",
            "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        ),
        ("transformer.ln_f",),
        tied=True,
    ),
    ("gpt2", "GPT2LMHeadModel"): _Family(
        ("transformer.wte", "transformer.wpe"),
        "transformer.h",
        ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
        ("transformer.ln_f",),
        tied=True,
    ),
    ("bert", "BertModel"): _Family(
        (
            "embeddings.word_embeddings", "embeddings.token_type_embeddings", "embeddings.position_embeddings",
            "embeddings.LayerNorm",
        ),
        "encoder.layer",
        (
            "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
            "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
        ),
        ("pooler.dense",),
        head=(),
    ),
}  # fmt: skip


def known_plan(config_json: bytes, names: Collection[str]) -> ModulePlan | None:
    """The plan of the model that has this configuration and whose files hold ``names``; None for any name that its
    family has not, and for families that are not known here."""
    try:
        config = msgspec.json.decode(config_json, type=_Config)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    family = _FAMILIES.get((config.model_type, config.architectures[0] if config.architectures else ""))
    if family is not None and config.model_type == "opt" and not config.do_layer_norm_before:
        family = _POST_NORM_OPT
    layers = config.num_hidden_layers or config.n_layer
    if family is None or not 0 < layers <= len(names):
        return None
    order = tuple(f"{module}.{kind}" for module in _modules(family, layers) for kind in ("weight", "bias"))
    if not set(order).issuperset(names):
        return None
    tied = family.tied if config.tie_word_embeddings is UNSET else config.tie_word_embeddings
    ties = tuple((f"{family.embeddings[0]}.weight", f"{head}.weight") for head in family.head if tied)
    return ModulePlan(order, True, ties)


def _modules(family: _Family, layers: int) -> Iterator[str]:
    inside = (f"{family.layers}.{number}.{module}" for number in range(layers) for module in family.layer)
    return chain(family.embeddings, inside, family.end, family.head)

"""What llama.cpp's converter did to each architecture's tensors, and how it is undone: names, order, offsets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sllm_loaderd.convert.gguf.header import GgufHeader, GgufTensor
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel

HEADS: Final = "heads"
"""Rows of each head were interleaved for rotary embeddings: they are put back."""
TURNED: Final = "turned"
"""The matrix was transposed."""
MINUS_ONE: Final = "minus one"
"""One was added to every number."""
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT: Final = re.compile(r"ffn_(gate|down|up)(?:_exps|\.(\d+))")
_NOT_STORED: Final = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""What a configuration or the module itself holds in transformers."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """``model_type`` and ``cls`` are transformers'; ``layer`` and ``top`` map llama.cpp's names to the module's."""

    model_type: str
    cls: str
    prefix: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    heads: frozenset[str] = frozenset()
    turned: frozenset[str] = frozenset()
    norms_plus_one: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor under its Hugging Face name: ``source``, or of its outermost dimension only index ``expert``, with
    ``change`` undone. ``heads``: how many heads its rows are, for ``HEADS``."""

    name: str
    source: GgufTensor
    change: str = ""
    heads: int = 0
    expert: int | None = None


_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA: Final = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_GEMMA: Final = {
    **_LLAMA, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_PHI3: Final = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_MIXTRAL: Final = {**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"}
_GPT2_TOP: Final = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip
_GPT2: Final = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_ROTARY: Final = frozenset({"attn_q", "attn_k"})
_LAYERS: Final = "model.layers"


def _llama_like(kind: str, cls: str, layer: Mapping[str, str] = _LLAMA, *, plus_one: bool = False) -> Architecture:
    return Architecture(kind, cls, _LAYERS, _TOP, layer, norms_plus_one=plus_one)


ARCHITECTURES: Final = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYERS, _TOP, _LLAMA, heads=_ROTARY),
    "mistral": Architecture("mistral", "MistralForCausalLM", _LAYERS, _TOP, _LLAMA, heads=_ROTARY),
    "mixtral": Architecture(
        "mixtral", "MixtralForCausalLM", _LAYERS, _TOP, _MIXTRAL, heads=_ROTARY,
        experts={"gate": "w1", "down": "w2", "up": "w3"},
    ),
    "qwen2": _llama_like("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _llama_like("qwen3", "Qwen3ForCausalLM"),
    "gemma2": _llama_like("gemma2", "Gemma2ForCausalLM", _GEMMA, plus_one=True),
    "gemma3": _llama_like("gemma3_text", "Gemma3ForCausalLM", _GEMMA, plus_one=True),
    "phi3": _llama_like("phi3", "Phi3ForCausalLM", _PHI3),
    "gpt2": Architecture(
        "gpt2", "GPT2LMHeadModel", "transformer.h", _GPT2_TOP, _GPT2,
        turned=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}  # fmt: skip
"""By llama.cpp's name, but for mixtral, which it calls a llama with experts."""


def architecture_of(header: GgufHeader) -> tuple[str, Architecture]:
    """The prefix of this file's metadata keys, and the architecture. Raises ``UnsupportedModel``."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES or name == "mixtral":
        served = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{header.path}: architecture {name!r} is none of {served}", field=header.path.name)
    experts = name == "llama" and header.metadata.get("llama.expert_count")
    return name, ARCHITECTURES["mixtral" if experts else name]


def targets(tensor: GgufTensor, kind: Architecture, query_heads: int, key_heads: int) -> list[Target]:
    """The tensors that ``tensor`` is in transformers; several for the experts of a layer, none for what is computed.

    Raises ``UnsupportedModel`` for a name that the architecture has not.
    """
    if _NOT_STORED.fullmatch(tensor.name):
        return []
    match = _LAYER.fullmatch(tensor.name)
    if match is None:
        stem, _, leaf = tensor.name.rpartition(".")
        if stem not in kind.top:
            raise _unknown(tensor, kind)
        return [Target(f"{kind.top[stem]}.{leaf}", tensor, _change(stem, leaf, kind))]
    number, stem, leaf = match.groups()
    base = f"{kind.prefix}.{int(number)}"
    if kind.experts and (expert := _EXPERT.fullmatch(stem)):
        return _experts(tensor, f"{base}.block_sparse_moe.experts", kind.experts[expert[1]], expert[2])
    if stem not in kind.layer:
        raise _unknown(tensor, kind)
    change = _change(stem, leaf, kind)
    heads = query_heads if stem == "attn_q" else key_heads
    if change == HEADS and (heads < 1 or tensor.shape[0] % (2 * heads)):
        text = f"tensor {tensor.name!r} of {tensor.shape} is not rows of {heads} heads"
        raise InvalidCheckpoint(text, field=tensor.name)
    return [Target(f"{base}.{kind.layer[stem]}.{leaf}", tensor, change, heads if change == HEADS else 0)]


def _change(stem: str, leaf: str, kind: Architecture) -> str:
    if stem in kind.heads:
        return HEADS
    if stem in kind.turned and leaf == "weight":
        return TURNED
    return MINUS_ONE if kind.norms_plus_one and stem.endswith("norm") and leaf == "weight" else ""


def _experts(tensor: GgufTensor, base: str, leaf: str, number: str | None) -> list[Target]:
    if number is not None:
        return [Target(f"{base}.{int(number)}.{leaf}.weight", tensor)]
    if len(tensor.shape) != 3:
        raise InvalidCheckpoint(f"tensor {tensor.name!r} of {tensor.shape} is not a row of matrices", field=tensor.name)
    return [Target(f"{base}.{number}.{leaf}.weight", tensor, expert=number) for number in range(tensor.shape[0])]


def _unknown(tensor: GgufTensor, kind: Architecture) -> UnsupportedModel:
    text = f"tensor {tensor.name[:80]!r} has no place in {kind.cls} as it is known here"
    return UnsupportedModel(text, field=tensor.name[:80])

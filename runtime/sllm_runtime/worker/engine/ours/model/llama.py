"""Llama 2 and 3.x, Mistral, Qwen 2, 2.5 and 3, Mixtral: one body; configuration and tensor names tell them apart."""

from __future__ import annotations

from typing import Any

import torch

from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.model.backend import Mlp, Norm
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Embed, Layer
from sllm_runtime.worker.engine.ours.model.parts import Gated, linear, output_head, rms_norm
from sllm_runtime.worker.engine.ours.model.rope import Rope, context
from sllm_runtime.worker.engine.ours.model.weights import Weights


def heads_of(config: Any) -> Heads:
    """From num_attention_heads, num_key_value_heads and head_dim."""
    queries = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, getattr(config, "num_key_value_heads", None) or queries, width)


def window_of(config: Any, layer: int) -> int:
    """Sliding window of a layer; 0: none."""
    if config.model_type == "llama":  # its class reads neither, though a config.json may have both
        return 0
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    return window if kinds is None or kinds[layer] == "sliding_attention" else 0


def attention(config: Any, weights: Weights, name: str, layer: int, rope: Rope) -> Attention:
    """Separate projections, or one fused as Phi-3 has it; Qwen 3 norms queries and keys."""
    heads, hidden, kind = heads_of(config), config.hidden_size, config.model_type
    biased = kind == "qwen2" or (kind in ("llama", "qwen3") and config.attention_bias)
    queries, kv = heads.queries * heads.width, heads.kv * heads.width
    if kind == "phi3":
        projections = {f"{name}.qkv_proj": queries + 2 * kv}
    else:
        projections = {f"{name}.q_proj": queries, f"{name}.k_proj": kv, f"{name}.v_proj": kv}

    def norm(which: str) -> Norm | None:
        if kind != "qwen3":
            return None
        return rms_norm(weights, f"{name}.{which}_norm", heads.width, config.rms_norm_eps)

    return Attention(
        heads,
        linear(weights, hidden, projections, bias=biased),
        linear(weights, queries, {f"{name}.o_proj": hidden}, bias=biased and kind != "qwen2"),
        Look(heads.width**-0.5, window_of(config, layer)),
        rope,
        norm("q"),
        norm("k"),
    )


def mlp(config: Any, weights: Weights, name: str, tile: int) -> Mlp:
    """Gated; several, as experts, in Mixtral."""
    gate, hidden, inner = weights.backend.gate(config.hidden_act), config.hidden_size, config.intermediate_size
    if config.model_type == "mixtral":
        count = config.num_local_experts
        here = getattr(config, "experts_here", range(count))  # a rank has some of them
        up = weights.get(f"{name}.experts.gate_up_proj", len(here), 2 * inner, hidden)
        down = weights.get(f"{name}.experts.down_proj", len(here), hidden, inner)
        make = weights.backend.linear
        experts = {
            number: Gated(make([up[i]], None, None), make([down[i]], None, None), gate) for i, number in enumerate(here)
        }
        chooser = linear(weights, hidden, {f"{name}.gate": count})
        return weights.backend.experts(chooser, experts, config.num_experts_per_tok, tile)
    biased = config.model_type == "llama" and config.mlp_bias
    fused = {f"{name}.gate_up_proj": 2 * inner}
    apart = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
    up_proj = linear(weights, hidden, fused if config.model_type == "phi3" else apart, bias=biased)
    return Gated(up_proj, linear(weights, inner, {f"{name}.down_proj": hidden}, bias=biased), gate)


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM and
    Phi3ForCausalLM have them."""
    rope = Rope(config, heads_of(config).width)
    hidden = config.hidden_size

    def norm(name: str) -> Norm:
        return rms_norm(weights, name, hidden, config.rms_norm_eps)

    def table() -> torch.Tensor:
        return weights.get("model.embed_tokens.weight", config.vocab_size, hidden)

    def start() -> Embed:
        rows = table()
        return lambda tokens, positions: torch.nn.functional.embedding(tokens, rows)

    def layer(number: int) -> Layer:
        name = f"model.layers.{number}"
        return Layer(
            attention(config, weights, f"{name}.self_attn", number, rope),
            mlp(config, weights, f"{name}.mlp", tile),
            norm(f"{name}.input_layernorm"),
            norm(f"{name}.post_attention_layernorm"),
        )

    def finish() -> Any:
        last, head = norm("model.norm"), output_head(weights, config, table())
        return lambda x: head(last(x))

    return Decoder(
        count=config.num_hidden_layers,
        hidden=hidden,
        heads=heads_of(config),
        vocabulary=config.vocab_size,
        context=context(config, config.max_position_embeddings),
        dtype=weights.dtype,
        start=start,
        layer=layer,
        finish=finish,
        ropes=(rope,),
    )

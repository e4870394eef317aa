"""Llama 2 and 3.x, Mistral, Qwen 2, 2.5 and 3, Mixtral: one body; configuration and tensor names tell them apart."""

from __future__ import annotations

from typing import Any

import torch

from sllm_runtime.worker.engine.ours.attention import Heads
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Layer
from sllm_runtime.worker.engine.ours.model.parts import Experts, Gated, Linear, Mlp, RmsNorm, activation
from sllm_runtime.worker.engine.ours.model.rope import Rope, context
from sllm_runtime.worker.engine.ours.model.weights import Weights


def heads_of(config: Any) -> Heads:
    """From num_attention_heads, num_key_value_heads and head_dim."""
    queries = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, getattr(config, "num_key_value_heads", None) or queries, width)


def window_of(config: Any, layer: int) -> int:
    """Sliding window of a layer; 0: none."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    return window if kinds is None or kinds[layer] == "sliding_attention" else 0


def attention(config: Any, weights: Weights, name: str, layer: int, rope: Rope) -> Attention:
    """Separate or fused projections, with qk-norm where the weights have one."""
    fused = f"{name}.qkv_proj"
    heads = heads_of(config)

    def norm(which: str) -> RmsNorm | None:
        found = weights.find(f"{name}.{which}_norm.weight")
        return None if found is None else RmsNorm(found, config.rms_norm_eps)

    names = [fused] if f"{fused}.weight" in weights else [f"{name}.{which}_proj" for which in "qkv"]
    return Attention(
        heads,
        Linear.named(weights, *names),
        Linear.named(weights, f"{name}.o_proj"),
        heads.width**-0.5,
        rope,
        norm("q"),
        norm("k"),
        window=window_of(config, layer),
    )


def mlp(config: Any, weights: Weights, name: str, tile: int) -> Mlp:
    """Gated; experts where the weights have some."""
    act = activation(config.hidden_act)
    if f"{name}.experts.gate_up_proj" in weights:
        up, down = weights.get(f"{name}.experts.gate_up_proj"), weights.get(f"{name}.experts.down_proj")
        experts = [Gated(Linear([up[i]]), Linear([down[i]]), act) for i in range(up.shape[0])]
        return Experts(Linear.named(weights, f"{name}.gate"), experts, config.num_experts_per_tok, tile)
    fused = f"{name}.gate_up_proj"
    names = [fused] if f"{fused}.weight" in weights else [f"{name}.gate_proj", f"{name}.up_proj"]
    return Gated(Linear.named(weights, *names), Linear.named(weights, f"{name}.down_proj"), act)


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM and
    Phi3ForCausalLM have them."""
    rope = Rope(config, heads_of(config).width)
    table = weights.get("model.embed_tokens.weight")

    def layer(number: int) -> Layer:
        name = f"model.layers.{number}"
        return Layer(
            attention(config, weights, f"{name}.self_attn", number, rope),
            mlp(config, weights, f"{name}.mlp", tile),
            RmsNorm(weights.get(f"{name}.input_layernorm.weight"), config.rms_norm_eps),
            RmsNorm(weights.get(f"{name}.post_attention_layernorm.weight"), config.rms_norm_eps),
        )

    def finish() -> Any:
        norm = RmsNorm(weights.get("model.norm.weight"), config.rms_norm_eps)
        head = Linear.head(weights, table)
        return lambda x: head(norm(x))

    return Decoder(
        count=config.num_hidden_layers,
        heads=heads_of(config),
        vocabulary=table.shape[0],
        context=context(config, config.max_position_embeddings),
        dtype=weights.dtype,
        embed=lambda tokens, positions: torch.nn.functional.embedding(tokens, table),
        layer=layer,
        finish=finish,
        ropes=(rope,),
    )

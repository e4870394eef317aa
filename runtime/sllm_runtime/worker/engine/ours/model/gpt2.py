"""GPT-2: learned positions, layer norms, matrices stored as (in, out)."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import embedding

from sllm_runtime.worker.engine.ours.attention import Heads
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Layer
from sllm_runtime.worker.engine.ours.model.parts import LayerNorm, Linear, Plain, activation
from sllm_runtime.worker.engine.ours.model.weights import Weights


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as GPT2LMHeadModel has them."""
    heads = Heads(config.n_head, config.n_head, config.n_embd // config.n_head)
    tokens_table = weights.get("transformer.wte.weight")
    places = weights.get("transformer.wpe.weight")
    scale = heads.width**-0.5 if config.scale_attn_weights else 1.0

    def linear(name: str) -> Linear:
        return Linear.transposed(weights.get(f"{name}.weight"), weights.get(f"{name}.bias"))

    def layer(number: int) -> Layer:
        name = f"transformer.h.{number}"
        by_depth = number + 1 if config.scale_attn_by_inverse_layer_idx else 1
        return Layer(
            Attention(heads, linear(f"{name}.attn.c_attn"), linear(f"{name}.attn.c_proj"), scale / by_depth),
            Plain(linear(f"{name}.mlp.c_fc"), linear(f"{name}.mlp.c_proj"), activation(config.activation_function)),
            LayerNorm.named(weights, f"{name}.ln_1", config.layer_norm_epsilon),
            LayerNorm.named(weights, f"{name}.ln_2", config.layer_norm_epsilon),
        )

    def finish() -> Any:
        norm = LayerNorm.named(weights, "transformer.ln_f", config.layer_norm_epsilon)
        head = Linear.head(weights, tokens_table)
        return lambda x: head(norm(x))

    return Decoder(
        count=config.n_layer,
        heads=heads,
        vocabulary=tokens_table.shape[0],
        context=config.n_positions,
        dtype=weights.dtype,
        embed=lambda tokens, positions: embedding(tokens, tokens_table) + embedding(positions, places),
        layer=layer,
        finish=finish,
    )

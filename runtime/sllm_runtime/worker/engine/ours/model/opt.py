"""OPT: learned positions from 2 on, projections around the layers in the 350 M one, whose norms stand last."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding

from sllm_runtime.worker.engine.ours.attention import Heads
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Layer
from sllm_runtime.worker.engine.ours.model.parts import LayerNorm, Linear, Plain, Rows, activation
from sllm_runtime.worker.engine.ours.model.weights import Weights

_FIRST = 2
_EPS = 1e-5


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as OPTForCausalLM has them."""
    count, top = config.num_attention_heads, "model.decoder"
    heads = Heads(count, count, config.hidden_size // count)
    table = weights.get(f"{top}.embed_tokens.weight")
    places = weights.get(f"{top}.embed_positions.weight")
    widened = f"{top}.project_in.weight" in weights

    def embed(tokens: torch.Tensor, positions: torch.Tensor) -> Rows:
        rows = embedding(tokens, table)
        if widened:
            rows = Linear.named(weights, f"{top}.project_in")(rows)
        return rows + embedding(positions + _FIRST, places)

    def layer(number: int) -> Layer:
        name = f"{top}.layers.{number}"
        out = Linear.named(weights, f"{name}.self_attn.out_proj")
        # The order of execution is k, v, q, and so is the checkpoint's; asked for as q, k, v it takes three products.
        qkv = Linear.named(weights, *(f"{name}.self_attn.{which}_proj" for which in "qkv"))
        up, down = Linear.named(weights, f"{name}.fc1"), Linear.named(weights, f"{name}.fc2")
        return Layer(
            Attention(heads, qkv, out, heads.width**-0.5),
            Plain(up, down, activation(config.activation_function)),
            LayerNorm.named(weights, f"{name}.self_attn_layer_norm", _EPS),
            LayerNorm.named(weights, f"{name}.final_layer_norm", _EPS),
            norm_last=not config.do_layer_norm_before,
        )

    def finish() -> Any:
        last = f"{top}.final_layer_norm"
        norm = LayerNorm.named(weights, last, _EPS) if f"{last}.weight" in weights else None
        narrow = Linear.named(weights, f"{top}.project_out") if f"{top}.project_out.weight" in weights else None
        head = Linear.head(weights, table)

        def logits(x: Rows) -> Rows:
            x = norm(x) if norm is not None else x
            return head(narrow(x) if narrow is not None else x)

        return logits

    return Decoder(
        count=config.num_hidden_layers,
        heads=heads,
        vocabulary=table.shape[0],
        context=config.max_position_embeddings,
        dtype=weights.dtype,
        embed=embed,
        layer=layer,
        finish=finish,
    )

"""GPT-2: learned positions, layer norms, matrices stored as (in, out)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding

from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.model.backend import Norm, Projection
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Embed, Layer
from sllm_runtime.worker.engine.ours.model.parts import Plain, activation, layer_norm, output_head, transposed
from sllm_runtime.worker.engine.ours.model.weights import Weights


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as GPT2LMHeadModel has them."""
    hidden = config.n_embd
    heads = Heads(config.n_head, config.n_head, hidden // config.n_head)
    inner = config.n_inner if config.n_inner is not None else 4 * hidden
    scale = heads.width**-0.5 if config.scale_attn_weights else 1.0

    def table() -> torch.Tensor:
        return weights.get("transformer.wte.weight", config.vocab_size, hidden)

    def start() -> Embed:
        rows, places = table(), weights.get("transformer.wpe.weight", config.n_positions, hidden)
        return lambda tokens, positions: embedding(tokens, rows) + embedding(positions, places)

    def linear(name: str, inputs: int, outputs: int) -> Projection:
        return transposed(weights, name, inputs, outputs)

    def norm(name: str) -> Norm:
        return layer_norm(weights, name, hidden, config.layer_norm_epsilon)

    def layer(number: int) -> Layer:
        name = f"transformer.h.{number}"
        by_depth = number + 1 if config.scale_attn_by_inverse_layer_idx else 1
        qkv, out = linear(f"{name}.attn.c_attn", hidden, 3 * hidden), linear(f"{name}.attn.c_proj", hidden, hidden)
        up, down = linear(f"{name}.mlp.c_fc", hidden, inner), linear(f"{name}.mlp.c_proj", inner, hidden)
        return Layer(
            Attention(heads, qkv, out, Look(scale / by_depth)),
            Plain(up, down, activation(config.activation_function)),
            norm(f"{name}.ln_1"),
            norm(f"{name}.ln_2"),
        )

    def finish() -> Any:
        last, head = norm("transformer.ln_f"), output_head(weights, config, table())
        return lambda x: head(last(x))

    return Decoder(
        count=config.n_layer,
        hidden=config.n_embd,
        heads=heads,
        vocabulary=config.vocab_size,
        context=config.n_positions,
        dtype=weights.dtype,
        start=start,
        layer=layer,
        finish=finish,
    )

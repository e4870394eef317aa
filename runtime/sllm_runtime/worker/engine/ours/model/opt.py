"""OPT: learned positions from 2 on, projections around the layers in the 350 M one, whose norms stand last."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.model.backend import Norm, Rows
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Embed, Layer
from sllm_runtime.worker.engine.ours.model.parts import Plain, activation, layer_norm, linear, output_head
from sllm_runtime.worker.engine.ours.model.weights import Weights

_FIRST = 2
_EPS = 1e-5


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as OPTForCausalLM has them. Raises ``UnsupportedModel`` for norms without weights."""
    if not config.layer_norm_elementwise_affine:
        raise UnsupportedModel("OPT whose norms have no weights is unknown to this engine")
    count, hidden, top = config.num_attention_heads, config.hidden_size, "model.decoder"
    heads = Heads(count, count, hidden // count)
    narrow, biased = config.word_embed_proj_dim, config.enable_bias

    def table() -> torch.Tensor:
        return weights.get(f"{top}.embed_tokens.weight", config.vocab_size, narrow)

    def start() -> Embed:
        rows = table()
        places = weights.get(f"{top}.embed_positions.weight", config.max_position_embeddings + _FIRST, hidden)
        widen = linear(weights, narrow, {f"{top}.project_in": hidden}) if narrow != hidden else None

        def embed(tokens: torch.Tensor, positions: torch.Tensor) -> Rows:
            found = embedding(tokens, rows)
            return (found if widen is None else widen(found)) + embedding(positions + _FIRST, places)

        return embed

    def norm(name: str) -> Norm:
        return layer_norm(weights, name, hidden, _EPS)

    def layer(number: int) -> Layer:
        name = f"{top}.layers.{number}"
        out = linear(weights, hidden, {f"{name}.self_attn.out_proj": hidden}, bias=biased)
        # The order of execution is k, v, q, and so is the checkpoint's; asked for as q, k, v it takes three products.
        qkv = {f"{name}.self_attn.{which}_proj": hidden for which in "qkv"}
        up = linear(weights, hidden, {f"{name}.fc1": config.ffn_dim}, bias=biased)
        down = linear(weights, config.ffn_dim, {f"{name}.fc2": hidden}, bias=biased)
        return Layer(
            Attention(heads, linear(weights, hidden, qkv, bias=biased), out, Look(heads.width**-0.5)),
            Plain(up, down, activation(config.activation_function)),
            norm(f"{name}.self_attn_layer_norm"),
            norm(f"{name}.final_layer_norm"),
            norm_last=not config.do_layer_norm_before,
        )

    def finish() -> Any:
        normed = config.do_layer_norm_before and not config._remove_final_layer_norm
        last = norm(f"{top}.final_layer_norm") if normed else None
        project = linear(weights, hidden, {f"{top}.project_out": narrow}) if narrow != hidden else None
        head = output_head(weights, config, table())

        def logits(x: Rows) -> Rows:
            x = last(x) if last is not None else x
            return head(project(x) if project is not None else x)

        return logits

    return Decoder(
        count=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        dtype=weights.dtype,
        start=start,
        layer=layer,
        finish=finish,
    )

"""Falcon 7b (one KV head, one norm) and 40b / 180b (KV groups, two norms); attention and MLP side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.attention import Heads
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Layer
from sllm_runtime.worker.engine.ours.model.parts import LayerNorm, Linear, Plain, activation
from sllm_runtime.worker.engine.ours.model.rope import Rope
from sllm_runtime.worker.engine.ours.model.weights import Weights


def _heads(config: Any) -> tuple[Heads, torch.Tensor | None]:
    """Heads, and where they stand: q of each group, then its k and v, unless there is one group only."""
    queries, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    old = 1 if config.multi_query else queries
    kv = config.num_kv_heads if config.new_decoder_architecture else old
    group = queries // kv
    at = torch.arange(kv * (group + 2)).view(kv, group + 2)
    order = torch.cat((at[:, :group].reshape(-1), at[:, group], at[:, group + 1]))
    return Heads(queries, kv, width), None if kv == 1 else order


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as FalconForCausalLM has them. Raises ``UnsupportedModel`` for ALiBi."""
    if config.alibi:
        raise UnsupportedModel("Falcon with ALiBi is unknown to this engine")
    heads, order = _heads(config)
    rope = Rope(config, heads.width)
    table = weights.get("transformer.word_embeddings.weight")

    def norm(name: str) -> LayerNorm | None:
        return LayerNorm.named(weights, name, config.layer_norm_epsilon) if f"{name}.weight" in weights else None

    def layer(number: int) -> Layer:
        name = f"transformer.h.{number}"
        up = Linear.named(weights, f"{name}.mlp.dense_h_to_4h")
        return Layer(
            Attention(
                heads,
                Linear.named(weights, f"{name}.self_attention.query_key_value"),
                Linear.named(weights, f"{name}.self_attention.dense"),
                heads.width**-0.5,
                rope,
                order=order,
            ),
            Plain(up, Linear.named(weights, f"{name}.mlp.dense_4h_to_h"), activation(config.activation)),
            norm(f"{name}.ln_attn") or norm(f"{name}.input_layernorm"),
            norm(f"{name}.ln_mlp") or norm(f"{name}.post_attention_layernorm"),
            parallel=config.new_decoder_architecture or config.parallel_attn,
        )

    def finish() -> Any:
        last = LayerNorm.named(weights, "transformer.ln_f", config.layer_norm_epsilon)
        head = Linear.head(weights, table)
        return lambda x: head(last(x))

    return Decoder(
        count=config.num_hidden_layers,
        heads=heads,
        vocabulary=table.shape[0],
        context=config.max_position_embeddings,
        dtype=weights.dtype,
        embed=lambda tokens, positions: embedding(tokens, table),
        layer=layer,
        finish=finish,
        ropes=(rope,),
    )

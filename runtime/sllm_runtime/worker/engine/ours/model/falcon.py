"""Falcon 7b (one KV head, one norm) and 40b / 180b (KV groups, two norms); attention and MLP side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.model.backend import Norm
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Embed, Layer
from sllm_runtime.worker.engine.ours.model.parts import Plain, activation, layer_norm, linear, output_head
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
    order = None if order is None else order.to(weights.backend.device)
    hidden, inner, biased = config.hidden_size, config.ffn_hidden_size, config.bias
    rope = Rope(config, heads.width)
    two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
    parallel = config.new_decoder_architecture or config.parallel_attn

    def table() -> torch.Tensor:
        return weights.get("transformer.word_embeddings.weight", config.vocab_size, hidden)

    def start() -> Embed:
        rows = table()
        return lambda tokens, positions: embedding(tokens, rows)

    def norm(name: str) -> Norm:
        return layer_norm(weights, name, hidden, config.layer_norm_epsilon)

    def before_mlp(name: str) -> Norm | None:
        if two_norms:
            return norm(f"{name}.ln_mlp")
        return None if parallel else norm(f"{name}.post_attention_layernorm")

    def layer(number: int) -> Layer:
        name = f"transformer.h.{number}"
        qkv = {f"{name}.self_attention.query_key_value": (heads.queries + 2 * heads.kv) * heads.width}
        up = linear(weights, hidden, {f"{name}.mlp.dense_h_to_4h": inner}, bias=biased)
        down = linear(weights, inner, {f"{name}.mlp.dense_4h_to_h": hidden}, bias=biased)
        return Layer(
            Attention(
                heads,
                linear(weights, hidden, qkv, bias=biased),
                linear(weights, hidden, {f"{name}.self_attention.dense": hidden}, bias=biased),
                Look(heads.width**-0.5),
                rope,
                order=order,
            ),
            Plain(up, down, activation(config.activation)),
            norm(f"{name}.ln_attn" if two_norms else f"{name}.input_layernorm"),
            before_mlp(name),
            parallel=parallel,
        )

    def finish() -> Any:
        last, head = norm("transformer.ln_f"), output_head(weights, config, table())
        return lambda x: head(last(x))

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
        ropes=(rope,),
    )

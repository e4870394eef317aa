"""Gemma 2 and 3 (text): norms around both halves, scaled embeddings, soft caps, windows on most layers."""

from __future__ import annotations

from typing import Any

import torch

from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Layer
from sllm_runtime.worker.engine.ours.model.llama import heads_of, window_of
from sllm_runtime.worker.engine.ours.model.parts import Gated, Linear, RmsNorm, Rows, activation
from sllm_runtime.worker.engine.ours.model.rope import Rope
from sllm_runtime.worker.engine.ours.model.weights import Weights


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as Gemma2ForCausalLM and Gemma3ForCausalLM have them."""
    heads = heads_of(config)
    table = weights.get("model.embed_tokens.weight")
    size = torch.tensor(config.hidden_size**0.5).to(weights.dtype)
    # Gemma 3 has frequencies of its own for layers with a window.
    kinds = set(config.layer_types) if "rope_theta" not in config.rope_parameters else {None}
    ropes = {kind: Rope(config, heads.width, kind) for kind in sorted(kinds, key=str)}

    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights.get(f"{name}.weight"), config.rms_norm_eps, plus=1.0)

    def attention(name: str, number: int) -> Attention:
        normed = f"{name}.q_norm.weight" in weights
        return Attention(
            heads,
            Linear.named(weights, *(f"{name}.{which}_proj" for which in "qkv")),
            Linear.named(weights, f"{name}.o_proj"),
            config.query_pre_attn_scalar**-0.5,
            ropes.get(config.layer_types[number]) or ropes[None],
            norm(f"{name}.q_norm") if normed else None,
            norm(f"{name}.k_norm") if normed else None,
            window=window_of(config, number),
            cap=config.attn_logit_softcapping or 0.0,
        )

    def layer(number: int) -> Layer:
        name = f"model.layers.{number}"
        up = Linear.named(weights, f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        down = Linear.named(weights, f"{name}.mlp.down_proj")
        return Layer(
            attention(f"{name}.self_attn", number),
            Gated(up, down, activation(config.hidden_activation)),
            norm(f"{name}.input_layernorm"),
            norm(f"{name}.pre_feedforward_layernorm"),
            norm(f"{name}.post_attention_layernorm"),
            norm(f"{name}.post_feedforward_layernorm"),
        )

    def finish() -> Any:
        last = norm("model.norm")
        head = Linear.head(weights, table)
        cap = config.final_logit_softcapping

        def logits(x: Rows) -> Rows:
            found = head(last(x))
            return found.div_(cap).tanh_().mul_(cap) if cap else found

        return logits

    return Decoder(
        count=config.num_hidden_layers,
        heads=heads,
        vocabulary=table.shape[0],
        context=config.max_position_embeddings,
        dtype=weights.dtype,
        embed=lambda tokens, positions: torch.nn.functional.embedding(tokens, table) * size,
        layer=layer,
        finish=finish,
        ropes=tuple(ropes.values()),
    )

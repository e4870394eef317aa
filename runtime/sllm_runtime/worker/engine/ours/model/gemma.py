"""Gemma 2 and 3 (text): norms around both halves, scaled embeddings, soft caps, windows on most layers."""

from __future__ import annotations

from typing import Any

import torch

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.attention import Look
from sllm_runtime.worker.engine.ours.model.backend import Norm, Rows
from sllm_runtime.worker.engine.ours.model.decoder import Attention, Decoder, Embed, Layer
from sllm_runtime.worker.engine.ours.model.llama import heads_of, window_of
from sllm_runtime.worker.engine.ours.model.parts import Gated, linear, output_head, rms_norm
from sllm_runtime.worker.engine.ours.model.rope import Rope
from sllm_runtime.worker.engine.ours.model.weights import Weights


def build(config: Any, weights: Weights, tile: int) -> Decoder:
    """Names as Gemma2ForCausalLM and Gemma3ForCausalLM have them. Raises ``UnsupportedModel`` for one that is no
    language model: its rows see those behind them."""
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel("Gemma with attention in both directions is unknown to this engine")
    heads, hidden = heads_of(config), config.hidden_size
    queries, kv, inner = heads.queries * heads.width, heads.kv * heads.width, config.intermediate_size
    # Gemma 3 has frequencies of its own for layers with a window.
    kinds = set(config.layer_types) if "rope_theta" not in config.rope_parameters else {None}
    ropes = {kind: Rope(config, heads.width, kind) for kind in sorted(kinds, key=str)}

    def table() -> torch.Tensor:
        return weights.get("model.embed_tokens.weight", config.vocab_size, hidden)

    def start() -> Embed:
        rows, size = table(), torch.tensor(hidden**0.5).to(weights.dtype)
        return lambda tokens, positions: torch.nn.functional.embedding(tokens, rows) * size

    def norm(name: str, width: int = hidden) -> Norm:
        return rms_norm(weights, name, width, config.rms_norm_eps, plus=1.0)

    def attention(name: str, number: int) -> Attention:
        normed, biased = config.model_type != "gemma2", config.attention_bias
        projections = {f"{name}.q_proj": queries, f"{name}.k_proj": kv, f"{name}.v_proj": kv}
        return Attention(
            heads,
            linear(weights, hidden, projections, bias=biased),
            linear(weights, queries, {f"{name}.o_proj": hidden}, bias=biased),
            Look(config.query_pre_attn_scalar**-0.5, window_of(config, number), config.attn_logit_softcapping or 0.0),
            ropes.get(config.layer_types[number]) or ropes[None],
            norm(f"{name}.q_norm", heads.width) if normed else None,
            norm(f"{name}.k_norm", heads.width) if normed else None,
        )

    def layer(number: int) -> Layer:
        name = f"model.layers.{number}"
        up = linear(weights, hidden, {f"{name}.mlp.gate_proj": inner, f"{name}.mlp.up_proj": inner})
        down = linear(weights, inner, {f"{name}.mlp.down_proj": hidden})
        return Layer(
            attention(f"{name}.self_attn", number),
            Gated(up, down, weights.backend.gate(config.hidden_activation)),
            norm(f"{name}.input_layernorm"),
            norm(f"{name}.pre_feedforward_layernorm"),
            norm(f"{name}.post_attention_layernorm"),
            norm(f"{name}.post_feedforward_layernorm"),
        )

    def finish() -> Any:
        last, head = norm("model.norm"), output_head(weights, config, table())
        cap = config.final_logit_softcapping

        def logits(x: Rows) -> Rows:
            found = head(last(x))
            return found.div_(cap).tanh_().mul_(cap) if cap else found

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
        ropes=tuple(ropes.values()),
    )

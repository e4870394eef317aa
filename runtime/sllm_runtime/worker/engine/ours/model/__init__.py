"""Families by the architecture that config.json names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.model import falcon, gemma, gpt2, llama, opt
from sllm_runtime.worker.engine.ours.model.backend import Backend
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.model.host import Host
from sllm_runtime.worker.engine.ours.model.weights import Weights

Build = Callable[[Any, Weights, int], Decoder]

FAMILIES: Final[Mapping[str, Build]] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": llama.build,
    "MixtralForCausalLM": llama.build,
    "Phi3ForCausalLM": llama.build,
    "Qwen2ForCausalLM": llama.build,
    "Qwen3ForCausalLM": llama.build,
    "Gemma2ForCausalLM": gemma.build,
    "Gemma3ForCausalLM": gemma.build,
    "GPT2LMHeadModel": gpt2.build,
    "OPTForCausalLM": opt.build,
    "FalconForCausalLM": falcon.build,
}


def build(
    architecture: str, config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, tile: int,
    backend: Backend | None = None,
) -> Decoder:  # fmt: skip
    """The model of a family. ``config``: transformers' own object; ``tensors``: by transformers' names; ``tile``: rows
    that experts are padded to; ``backend``: where ``tensors`` are, on the CPU unless it is given. Raises
    ``UnsupportedModel`` where another engine has to do it."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(f"{architecture} is unknown to this engine")
    weights = Weights(tensors, dtype, backend or Host())
    decoder = family(config, weights, tile)
    decoder.lora, decoder.backend = weights.lora, weights.backend
    for rope in decoder.ropes:
        rope.move(weights.backend.device)
    return decoder

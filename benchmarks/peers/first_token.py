"""``first_token.py ours|from_pretrained``: from nothing to a Llama's first token, greedy, after a prompt of 16 tokens.

What it answers as what it touched is the token's id, if all bytes are read (``read_all``).
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from loading import Loaded, serve
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PROMPT = list(range(1, 17))
if sys.argv[1] == "ours":
    import load_ours


def prepare(order: dict[str, Any]) -> Callable[[], LlamaForCausalLM]:
    device = order.get("device", "cpu")
    if sys.argv[1] == "ours":
        tensors = load_ours.prepare(order)
        return lambda: _bound(order["directory"], device, tensors()[0])
    dtype = torch.bfloat16
    return lambda: LlamaForCausalLM.from_pretrained(order["directory"], dtype=dtype, device_map=device)


def _bound(directory: str, device: str, tensors: Any) -> LlamaForCausalLM:
    """A module whose parameters are these tensors."""
    config = LlamaConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(dict(tensors), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    model.train(False)
    return model


def load(prepared: Callable[[], LlamaForCausalLM]) -> Loaded:
    model = prepared()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT], device=model.device)).logits
        token = logits[0, -1].argmax().reshape(1).to(torch.int64)
    return {}, [token]


serve(load, prepare)

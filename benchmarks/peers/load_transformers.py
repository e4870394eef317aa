"""transformers' from_pretrained, in the checkpoint's dtype."""

from typing import Any

import torch
from loading import Loaded, all_of, serve
from transformers import LlamaForCausalLM


def load(order: dict[str, Any]) -> Loaded:
    placed = {"device_map": order["device"]} if "device" in order else {}
    model = LlamaForCausalLM.from_pretrained(order["directory"], dtype=torch.bfloat16, **placed)
    return all_of(model.state_dict())


serve(load)

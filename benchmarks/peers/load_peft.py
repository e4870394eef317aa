"""``load_peft.py default|lean``: PEFT's own load of an adapter onto its base model, which is there before.

``lean`` is ``low_cpu_mem_usage=True``: what is read becomes the parameters, which are not made and filled before.
Neither makes float32 of what was saved. The base model has its real shapes, but one number for each tensor.
"""

import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from loading import Loaded, serve
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM


@cache
def base_of(directory: str) -> torch.nn.Module:
    """The base model as ``base.json`` describes it; all elements of a weight are the same memory. Made before the fork
    of a load, which is what changes it."""
    with open(directory + "/base.json") as file:
        config = LlamaConfig(**json.load(file))
    with torch.device("meta"):
        model: torch.nn.Module = LlamaForCausalLM(config)
    for module in model.modules():
        for name, known in list(module.named_parameters(recurse=False)):
            one = torch.zeros((), dtype=torch.bfloat16).expand(known.shape)
            setattr(module, name, torch.nn.Parameter(one, requires_grad=False))
    return model


def fill(base: torch.nn.Module, directory: str, tensors: Mapping[str, torch.Tensor]) -> Loaded:
    """PEFT's modules on the base model with these tensors as their parameters."""
    config = LoraConfig.from_pretrained(directory)
    config.inference_mode = True
    model = PeftModel(base, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    set_peft_model_state_dict(model, dict(tensors), low_cpu_mem_usage=True)
    return _tensors(model)


def before(order: dict[str, Any]) -> None:
    base_of(order["directory"])


def prepare(order: dict[str, Any]) -> tuple[torch.nn.Module, str]:
    return base_of(order["directory"]), order["directory"]


def load(prepared: tuple[torch.nn.Module, str]) -> Loaded:
    base, directory = prepared
    lean = sys.argv[1] == "lean"
    return _tensors(
        PeftModel.from_pretrained(
            base, directory, low_cpu_mem_usage=lean, autocast_adapter_dtype=False, torch_device="cpu"
        )
    )


def _tensors(model: PeftModel) -> Loaded:
    tensors = get_peft_model_state_dict(model)
    return tensors, list(tensors.values())


if __name__ == "__main__":
    serve(load, prepare, before)

"""Adapters for ``load``: random LoRA of the shapes that published models have, as PEFT writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.load_model import Checkpoint, size_of, write_tensors

BASE: Final = "random/llama"
FILE: Final = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterShape:
    """A LoRA of ``rank`` on every linear layer of a Llama. ``key_value``: the width of its keys and values."""

    layers: int
    hidden: int
    intermediate: int
    key_value: int
    rank: int

    def modules(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one decoder layer."""
        hidden, inner, narrow = self.hidden, self.intermediate, self.key_value
        return {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, narrow),
            "self_attn.v_proj": (hidden, narrow), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
        }  # fmt: skip

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """PEFT's names, and shapes: an A and a B for each module."""
        made: list[tuple[str, tuple[int, ...]]] = []
        for layer in range(self.layers):
            for module, (inputs, outputs) in self.modules().items():
                at = f"base_model.model.model.layers.{layer}.{module}.lora_"
                made += [(f"{at}A.weight", (self.rank, inputs)), (f"{at}B.weight", (outputs, self.rank))]
        return made

    @property
    def nbytes(self) -> int:
        return size_of(self.tensors())

    def base(self) -> dict[str, object]:
        """config.json of its base model."""
        heads = self.hidden // 128
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers, "num_attention_heads": heads,
            "num_key_value_heads": self.key_value // 128, "vocab_size": 32000, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def config(self) -> dict[str, object]:
        """adapter_config.json."""
        targets = sorted(name.rpartition(".")[2] for name in self.modules())
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": BASE, "r": self.rank,
            "lora_alpha": self.rank, "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
        }  # fmt: skip


SMALL: Final = AdapterShape(32, 4096, 11008, 4096, 20)
"""About 100 MB: rank 20 of a Llama 2 7B, 448 tensors."""
LARGE: Final = AdapterShape(80, 8192, 28672, 1024, 39)
"""About 1 GB: rank 39 of a Llama 2 70B, 1,120 tensors."""


def write_adapter(directory: Path, shape: AdapterShape) -> Checkpoint:
    """The adapter as PEFT saves one, and ``base.json``, from which its base model can be built."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(shape.config()))
    (directory / "base.json").write_text(json.dumps(shape.base()))
    return write_tensors(directory, FILE, shape.tensors())

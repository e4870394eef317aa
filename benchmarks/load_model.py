"""Checkpoints for ``load``: Llama-shaped random models in Hugging Face layout, and their digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

VOCABULARY: Final = 32000


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings. ``heads`` have 64 numbers each."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int = VOCABULARY

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes: nine a layer, and two."""
        hidden, intermediate = self.hidden, self.intermediate
        made: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (self.vocabulary, hidden))]
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            made += [(f"{at}self_attn.{name}_proj.weight", (hidden, hidden)) for name in "qkvo"]
            made += [(f"{at}mlp.{name}_proj.weight", (intermediate, hidden)) for name in ("gate", "up")]
            made += [(f"{at}mlp.down_proj.weight", (hidden, intermediate))]
            made += [(f"{at}{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention")]
        return [*made, ("model.norm.weight", (hidden,))]

    @property
    def nbytes(self) -> int:
        return size_of(self.tensors())

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64, "num_key_value_heads": self.hidden // 64,
            "vocab_size": self.vocabulary, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048, "hidden_act": "silu",
        }  # fmt: skip


ONE: Final = Shape(9, 2048, 5632)
"""About 1 GB in 83 tensors."""
QUICK: Final = Shape(2, 2048, 5632)
"""About 0.3 GB in 20 tensors, for quick runs."""
SEVEN_B: Final = Shape(32, 4096, 11008)
"""A 7 B model, 13.2 GB."""
TWO_AND_A_HALF: Final = Shape(111, 960, 2560)
"""About 2.5 GB in 1,001 tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """What was written. ``digest``: SHA-256 over names and bytes, in the order of the list in ``names``."""

    directory: Path
    names: Path
    nbytes: int
    tensors: int
    digest: str
    file: str = "model.safetensors"

    @property
    def weights(self) -> Path:
        return self.directory / self.file


def size_of(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of bf16 tensors."""
    return sum(2 * prod(shape) for _, shape in tensors)


def header_of(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> bytes:
    """The head of a safetensors file of bf16 tensors in this order, its length before it."""
    header, end = {}, 0
    for name, shape in tensors:
        size = prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(directory: Path, shape: Shape, seed: int = 1) -> Checkpoint:
    """Random finite numbers of that shape, written and synced."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    return write_tensors(directory, "model.safetensors", shape.tensors(), seed)


def write_tensors(
    directory: Path, file: str, tensors: Sequence[tuple[str, tuple[int, ...]]], seed: int = 1
) -> Checkpoint:
    """``file`` with tensors of random finite bf16 numbers, in this order, synced."""
    generator, digest, nbytes = np.random.default_rng(seed), hashlib.sha256(), 0
    with (directory / file).open("wb") as out:
        out.write(header_of(tensors))
        for name, dimensions in tensors:
            words = np.frombuffer(generator.bytes(prod(dimensions) * 2), np.uint16)
            data = (words & np.uint16(0xBFFF)).tobytes()  # an exponent that is never that of NaN
            out.write(data)
            digest.update(name.encode())
            digest.update(data)
            nbytes += len(data)
        out.flush()
        os.fsync(out.fileno())
    names = directory.parent / f"{directory.name}.names.json"
    names.write_text(json.dumps([name for name, _ in tensors]))
    return Checkpoint(directory, names, nbytes, len(tensors), digest.hexdigest(), file)

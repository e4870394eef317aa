"""Writes the synthetic model: many random bf16 tensors in Hugging Face layout, and what its digests must be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

ROWS: Final = 2048
COLUMNS: Final = 2048
TENSOR_BYTES: Final = ROWS * COLUMNS * 2


@dataclass(frozen=True)
class Synthetic:
    """``sampled`` and ``whole``: digests over every 64 KiB's first element, and over all."""

    directory: Path
    count: int
    sampled: int
    whole: int

    @property
    def nbytes(self) -> int:
        return self.count * TENSOR_BYTES


def write(directory: Path, nbytes: int, step: int, seed: int = 1) -> Synthetic:
    """About ``nbytes`` of tensors, synced to disk."""
    count = max(1, nbytes // TENSOR_BYTES)
    header, end = {}, 0
    for number in range(count):
        header[f"tensors.{number}"] = {
            "dtype": "BF16",
            "shape": [ROWS, COLUMNS],
            "data_offsets": [end, end + TENSOR_BYTES],
        }
        end += TENSOR_BYTES
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator, sampled, whole = np.random.default_rng(seed), 0, 0
    directory.mkdir(parents=True)
    config = {"model_type": "synthetic", "count": count, "rows": ROWS, "columns": COLUMNS, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(1, count + 1):
            values = np.frombuffer(generator.bytes(TENSOR_BYTES), np.int16)
            sampled += number * int(values[::step].sum(dtype=np.int64))
            whole += number * int(values.sum(dtype=np.int64))
            file.write(values.tobytes())
        file.flush()
    return Synthetic(directory, count, sampled, whole)

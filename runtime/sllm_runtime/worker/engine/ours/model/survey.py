"""What a model needs, learnt before any of its bytes is there: it is built once of tensors without data.

A tensor that the checkpoint lacks, or that has another shape, is found here; so is which tensors each layer reads, from
which follows how long a layer has to wait (``decoder.Arrival``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sllm_runtime.worker.engine.ours.model import build

Needs = Mapping[int, frozenset[str]]
"""Names by layer; -1: what stands before the layers, the count of layers: behind. As in ``Arrival.wait``."""


class _Noted(Mapping[str, torch.Tensor]):
    """Tensors without data (vectors: with any data), and who asked for which."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        self.asked.add(name)
        # A norm computes with its weight when it is built, and without data that is done in Python: half a millisecond
        # each. Vectors are small.
        return torch.empty(shape, dtype=self._dtype, device="cpu" if len(shape) == 1 else "meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def survey(
    architecture: str, config: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tile: int
) -> Needs:
    """Which tensors each part of the model reads. ``shapes`` of all that the checkpoint has, by name; the others are
    those of ``build``. Raises ``InvalidCheckpoint`` naming the first tensor that is missing or has another shape."""
    noted = _Noted(shapes, dtype)
    decoder = build(architecture, config, noted, dtype, tile)
    needs: dict[int, frozenset[str]] = {}

    def took(part: int) -> None:
        needs[part] = frozenset(noted.asked)
        noted.asked.clear()

    decoder.start()
    took(-1)
    for number in range(decoder.count):
        decoder.layer(number)
        took(number)
    decoder.finish()
    took(decoder.count)
    return needs

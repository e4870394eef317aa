"""Where K and V lie on a CPU: one tensor of pages for all layers of a stage, in float32.

float32 whatever the weights are: attention is computed in it, and loses no bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sllm_runtime.worker.engine.ours.attention import Floats
from sllm_runtime.worker.engine.ours.pages import PAGE


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position takes: ``layers`` of this stage, K and V of ``heads`` times ``width`` numbers each, of
    ``itemsize`` bytes."""

    layers: int
    heads: int
    width: int
    itemsize: int = 4

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return self.layers * 2 * self.heads * PAGE * self.width * self.itemsize


class KvStore:
    """``pages`` pages and one more, into which rows that pad a step write. Memory is not touched before use.

    A page's K is transposed: so scores of neighbouring places are computed together, lane by lane.
    """

    def __init__(self, shape: KvShape, pages: int) -> None:
        self.shape = shape
        self.pages = pages
        # calloc: torch.zeros writes every byte, which takes time and memory for pages that nobody may ever use.
        found: Floats = np.zeros((shape.layers, 2, pages + 1, shape.heads, PAGE * shape.width), np.float32)
        self.data = torch.from_numpy(found)
        """Shape (layers, K or V, pages + 1, heads, PAGE * width)."""
        self._addresses = [(k.ctypes.data, v.ctypes.data) for k, v in found]
        self._used: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes when every page has been used."""
        return self.data.numel() * 4

    def layer(self, number: int) -> tuple[int, int]:
        """Where K (pages + 1, heads, width, PAGE) and V (pages + 1, heads, PAGE, width) of a layer lie, counted in the
        stage."""
        return self._addresses[number]

    def clear(self, page: int) -> None:
        """Zero a page that changes hands: what a broken sequence left there could be NaN, and 0 x NaN is NaN. One that
        nobody had is zero, and is not touched."""
        if page in self._used:
            self.data[:, :, page].zero_()
        self._used.add(page)

    def read(self, page: int) -> torch.Tensor:
        """A copy of one page, shape (layers, 2, heads, PAGE * width), as this store has it."""
        return self.data[:, :, page].clone()

    def fill(self, page: int, content: torch.Tensor) -> None:
        """Put what ``read`` gave, on this engine or another of the same fingerprint. Raises ``ValueError``."""
        wanted = tuple(self.data[:, :, 0].shape)
        if tuple(content.shape) != wanted or content.dtype != torch.float32:
            raise ValueError(f"a page is float32 {wanted}, not {content.dtype} {tuple(content.shape)}")
        self._used.add(page)
        self.data[:, :, page].copy_(content)

"""Where K and V lie on a CPU: one tensor of pages for all layers of a stage, in float32.

float32 whatever the weights are: attention is computed in it, and a CPU multiplies small float32 matrices four times as
fast as small bfloat16 ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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


class Places(NamedTuple):
    """Where K and V of a step's rows go in a layer."""

    k: npt.NDArray[np.int64]
    """(rows * heads * width) numbers among all of K: one row of indexes is followed twice as fast as three."""
    v: npt.NDArray[np.int64]
    """(rows, heads) rows among all of V."""


class KvStore:
    """``pages`` pages and one more, into which rows that pad a step write. Memory is not touched before use.

    A page's K is transposed: so scores are sums over rows of it, which is faster than products of rows with rows.
    """

    def __init__(self, shape: KvShape, pages: int) -> None:
        self.shape = shape
        self.pages = pages
        # calloc: torch.zeros writes every byte, which takes time and memory for pages that nobody may ever use.
        found: Floats = np.zeros((shape.layers, 2, pages + 1, shape.heads, PAGE * shape.width), np.float32)
        self.data = torch.from_numpy(found)
        """Shape (layers, K or V, pages + 1, heads, PAGE * width)."""
        k = found[:, 0].reshape(shape.layers, pages + 1, shape.heads, 1, shape.width, PAGE)
        v = found[:, 1].reshape(shape.layers, pages + 1, shape.heads, 1, PAGE, shape.width)
        self._pairs = list(zip(k, v, strict=True))
        self._flat = [(k.reshape(-1), v.reshape(-1, shape.width)) for k, v in self._pairs]
        self._used: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes when every page has been used."""
        return self.data.numel() * 4

    def layer(self, number: int) -> tuple[Floats, Floats]:
        """K (pages + 1, heads, 1, width, PAGE) and V (pages + 1, heads, 1, PAGE, width) of a layer, counted in the
        stage."""
        return self._pairs[number]

    def write(self, number: int, places: Places, k: Floats, v: Floats) -> None:
        """Put ``k`` and ``v`` (rows, heads, width) of a layer where ``places`` says."""
        into_k, into_v = self._flat[number]
        into_k[places.k] = k.reshape(-1)
        into_v[places.v] = v

    def places(self, pages: Many[int], positions: Many[int]) -> Places:
        """For ``write``, of rows whose ``positions`` are in ``pages``."""
        heads, width = self.shape.heads, self.shape.width
        page, offset = np.array(pages, np.int64), np.array(positions, np.int64) % PAGE
        head = page[:, None] * heads + np.arange(heads)
        k = head[:, :, None] * (width * PAGE) + np.arange(width) * PAGE + offset[:, None, None]
        return Places(k.reshape(-1), head * PAGE + offset[:, None])

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

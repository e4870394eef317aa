"""Bfloat16 products by the kernel of our own (``kernels.products``), where the processor multiplies tiles (AMX) and one
thread computes.

What a call of the library costs beside its product is a third of a small matrix' time, and its results would have to be
turned and widened by other calls: this one reads rows and gives results as those beside it have them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.kernels.loaded import kernels
from sllm_runtime.worker.engine.ours.kernels.shapes import DEEP, TILE, scratch
from sllm_runtime.worker.engine.ours.model.backend import Rows

_DEEPEST: Final = 4096
"""Inputs up to which a step's rows stay in the cache while the matrix passes by: all of it does once."""


class Scratch:
    """What products write to beside their results, one after another."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)
        self._address = 0

    def of(self, rows: int, inputs: int) -> int:
        """Its address, for a product of so many."""
        count = scratch(rows, inputs)
        if count > len(self._numbers):
            self._numbers = torch.empty(count)
            self._address = self._numbers.data_ptr()
        return self._address


class Tiled:
    """A matrix of shape (outputs, inputs), dense and in bfloat16, wherever it lies."""

    def __init__(self, weight: torch.Tensor, room: Scratch) -> None:
        self._weight, self._room = weight, room
        self.outputs, self._inputs = weight.shape
        self._shapes = _tiles_of(min(self.outputs, TILE))

    @classmethod
    def of(cls, weight: torch.Tensor, room: Scratch) -> Tiled | None:
        """None for a matrix that the kernel does not take, or where there is none."""
        dense = weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] % 2 == 0
        if not (kernels().tiles and dense and weight.shape[1] <= _DEEPEST):
            return None
        return cls(weight, room)

    def __call__(self, x: Rows, out: Rows, at: int, residual: Rows | None) -> None:
        """``out[:, at : at + outputs]`` = ``x`` (rows, inputs) x the matrix, and those columns of ``residual``. Dense
        all of them and of bfloat16, but for one of ``x``, which is rounded to it, and ``out``: that may be float32."""
        found = kernels()
        if out.dtype == torch.float32:
            product = found.product_to_float32
        else:
            product = found.product if x.dtype == torch.bfloat16 else found.product_of_float32
        rows, across = out.shape
        product(
            x.data_ptr(), rows, self._inputs, self._weight.data_ptr(), self.outputs,
            None if residual is None else residual.data_ptr() + at * out.itemsize, residual is not None,
            out.data_ptr() + at * out.itemsize, across, self._shapes.data_ptr(), self._room.of(rows, self._inputs),
        )  # fmt: skip


@cache
def _tiles_of(outputs: int) -> torch.Tensor:
    """As LDTILECFG reads them: results and tiles of the matrix have as many rows as there are ``outputs``, at most
    TILE; tiles of rows one for each pair of inputs. All have rows of 64 bytes."""
    content = bytearray(64)
    content[0] = 1  # the palette
    for tile in range(8):
        content[16 + 2 * tile] = 2 * DEEP
        content[48 + tile] = outputs if tile < 6 else TILE
    return torch.frombuffer(content, dtype=torch.uint8)

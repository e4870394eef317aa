"""Products by kernels of our own, where one thread computes: in bfloat16 where the processor multiplies tiles (AMX,
``kernels.products``), in float32 where it has registers of 512 bits (``kernels.dots``).

What a call of a library costs beside its product is a third of a small matrix' time, and what it gives would have to be
turned, widened or added by other calls. These read rows and write results as those beside them have them, and fetch
weights before they need them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.kernels.loaded import kernels
from sllm_runtime.worker.engine.ours.kernels.shapes import DEEP, SIDE, TILE, scratch
from sllm_runtime.worker.engine.ours.model.backend import Rows

_DEEPEST: Final = {torch.bfloat16: 4096, torch.float32: 768}
"""Inputs up to which the rows stay in the cache while the matrix passes by: a library's product of many rows with a
deeper one is faster."""


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


class Compiled:
    """A dense matrix of shape (outputs, inputs), wherever it lies."""

    def __init__(self, weight: torch.Tensor, room: Scratch) -> None:
        self._weight, self._room = weight, room
        self.outputs, self._inputs = weight.shape
        self._tiled = weight.dtype == torch.bfloat16
        self._shapes = _tiles_of(min(self.outputs, TILE))

    @classmethod
    def of(cls, weight: torch.Tensor, room: Scratch) -> Compiled | None:
        """None for a matrix that the kernels do not take, or where there is none."""
        outputs, inputs = weight.shape
        if not weight.is_contiguous() or inputs > _DEEPEST.get(weight.dtype, 0):
            return None
        tiled = weight.dtype == torch.bfloat16
        taken = kernels().tiles and inputs % 2 == 0 if tiled else kernels().wide and outputs >= SIDE
        return cls(weight, room) if taken else None

    def __call__(self, x: Rows, out: Rows, at: int, residual: Rows | None) -> None:
        """``out[:, at : at + outputs]`` = ``x`` (rows, inputs) x the matrix, and those columns of ``residual``. Dense
        all of them and of its dtype; but for bfloat16 either ``x``, which is rounded to it, or ``out`` and ``residual``
        may be float32."""
        rows, across = out.shape
        product = (
            x.data_ptr(), rows, self._inputs, self._weight.data_ptr(), self.outputs,
            None if residual is None else residual.data_ptr() + at * out.itemsize, residual is not None,
            out.data_ptr() + at * out.itemsize, across,
        )  # fmt: skip
        found = kernels()
        if not self._tiled:
            found.dots(*product)
            return
        if out.dtype == torch.float32:
            compute = found.product_to_float32
        else:
            compute = found.product if x.dtype == torch.bfloat16 else found.product_of_float32
        compute(*product, self._shapes.data_ptr(), self._room.of(rows, self._inputs))


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

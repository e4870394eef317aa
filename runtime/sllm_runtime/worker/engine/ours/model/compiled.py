"""Products by kernels of our own, where one thread computes: in bfloat16 where the processor multiplies tiles (AMX,
``kernels.products``) or has nothing for it at all (``kernels.dots.halves``), in float32 where it has registers of 512
bits (``kernels.dots``).

What a call of a library costs beside its product is a third of a small matrix' time, and what it gives would have to be
turned, widened or added by other calls. These read rows and write results as those beside them have them, and fetch
weights before they need them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.kernels.loaded import Kernel, Kernels, kernels
from sllm_runtime.worker.engine.ours.kernels.shapes import DEEP, NEAR, SIDE, TILE, scratch
from sllm_runtime.worker.engine.ours.model.backend import Rows

_DEEPEST_TILES: Final = 4096
_DEEPEST_DOTS: Final = 768
"""Inputs up to which the rows stay in the cache while the matrix passes by: a library's product of many rows with a
deeper one is faster."""


class Scratch:
    """What products write to beside their results, one after another."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)
        self._address = 0

    def of(self, count: int) -> int:
        """Its address, for so many numbers of float32."""
        if count > len(self._numbers):
            self._numbers = torch.empty(count)
            self._address = self._numbers.data_ptr()
        return self._address


class Compiled:
    """A dense matrix of shape (outputs, inputs), wherever it lies."""

    def __init__(self, weight: torch.Tensor, room: Scratch) -> None:
        self._weight, self._room = weight, room
        self.outputs, self._inputs = weight.shape
        self._halves = weight.dtype == torch.bfloat16
        self._shapes = _tiles_of(min(self.outputs, TILE))

    @classmethod
    def of(cls, weight: torch.Tensor, room: Scratch) -> Compiled | None:
        """None for a matrix that the kernels do not take, or where there is none."""
        return cls(weight, room) if weight.is_contiguous() and _takes(kernels(), weight) else None

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
        if not self._halves:
            found.dots(*product)
        elif found.tiles:
            compute = _which(x, out, found.product, found.product_to_float32, found.product_of_float32)
            compute(*product, self._shapes.data_ptr(), self._room.of(scratch(rows, self._inputs)))
        else:
            compute = _which(x, out, found.halves, found.halves_to_float32, found.halves_of_float32)
            compute(*product, self._room.of(min(rows, NEAR) * self._inputs))


def _takes(found: Kernels, weight: torch.Tensor) -> bool:
    outputs, inputs = weight.shape
    if weight.dtype == torch.float32:
        return found.wide and outputs >= SIDE and inputs <= _DEEPEST_DOTS
    if weight.dtype != torch.bfloat16:
        return False
    if found.tiles:
        return inputs % 2 == 0 and inputs <= _DEEPEST_TILES
    return found.narrow and outputs >= SIDE


def _which(x: Rows, out: Rows, same: Kernel, to_float32: Kernel, of_float32: Kernel) -> Kernel:
    if out.dtype == torch.float32:
        return to_float32
    return same if x.dtype == torch.bfloat16 else of_float32


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

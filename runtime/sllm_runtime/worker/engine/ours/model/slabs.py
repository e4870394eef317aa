"""Float32 products of few rows with a slab of a matrix's outputs each, by numpy's BLAS.

OpenBLAS has kernels for small products with AVX-512: they read the weights where they lie, in less time than MKL's
product of one row or of four takes, and no more than its product of many; a row has the same bits whatever their sizes.
Products with one row or one output go another way, so there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from sllm_runtime.worker.engine.ours.attention import Floats
from sllm_runtime.worker.engine.ours.numerics import Numerics

_OUTPUTS: Final = 128
_LANES: Final = 16
_MOST: Final = 1_000_000
"""Multiplications of one product, beyond which OpenBLAS takes other kernels."""


@dataclass(slots=True)
class Products:
    """How the products of a model are computed in the current step."""

    slabs: bool = False

    def use(self, numerics: Numerics, dtype: torch.dtype) -> None:
        """As a level says, where slabs are of use: in float32, by one thread (of OpenBLAS' own there is one), with
        AVX-512."""
        self.slabs = numerics.slabs and dtype == torch.float32 and torch.get_num_threads() == 1 and _small_kernels()


@cache
def _small_kernels() -> bool:
    built: Any = np.show_config(mode="dicts")
    blas = built["Build Dependencies"]["blas"]["name"]
    return "openblas" in blas and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Slabs:
    """A matrix of shape (outputs, inputs), wherever it lies."""

    def __init__(self, weight: torch.Tensor, rows: int, outputs: int) -> None:
        matrix: Floats = weight.numpy()
        total, inputs = matrix.shape
        self._rows, self._outputs = rows, outputs
        whole = total - total % outputs
        self._whole = matrix[:whole].reshape(whole // outputs, 1, outputs, inputs).swapaxes(-1, -2)
        # What is left over is computed with the outputs before it: every slab has the same width.
        self._last = matrix[total - outputs :].T if whole < total else None

    @classmethod
    def of(cls, weight: torch.Tensor) -> Slabs | None:
        """None for a matrix whose products cannot be small."""
        total, inputs = weight.shape
        for rows in (8, 4, 2):
            outputs = min(total, _OUTPUTS, _MOST // (rows * inputs)) // _LANES * _LANES
            if outputs:
                return cls(weight, rows, outputs)
        return None

    def __call__(self, x: torch.Tensor, out: Floats) -> None:
        """``out`` (rows, outputs) = ``x`` (rows, inputs) x the matrix; an even number of rows."""
        rows: Floats = x.numpy()
        size = min(self._rows, len(rows))
        whole = len(rows) - len(rows) % size
        self._multiply(rows[:whole], out[:whole], size)
        if whole < len(rows):
            self._multiply(rows[whole:], out[whole:], len(rows) - whole)

    def _multiply(self, rows: Floats, out: Floats, size: int) -> None:
        tiles = rows.reshape(1, -1, size, rows.shape[1])
        count, outputs = len(self._whole), self._outputs
        into = out[:, : count * outputs].reshape(-1, size, count, outputs).transpose(2, 0, 1, 3)
        np.matmul(tiles, self._whole, out=into, order="C")  # a slab after the other: its weights are read once
        if self._last is not None:
            np.matmul(tiles[0], self._last, out=out[:, -outputs:].reshape(-1, size, outputs))

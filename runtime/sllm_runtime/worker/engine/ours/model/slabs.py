"""Float32 products of few rows with a slab of a matrix's outputs each, by numpy's BLAS.

OpenBLAS has kernels for small products with AVX-512: they read the weights where they lie, in less time than MKL's
product of one row or of four takes, and no more than its product of many; a row has the same bits whatever their sizes.
Products with one row or one output go another way, so there are none.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch

from sllm_runtime.worker.engine.ours.attention import Floats

_OUTPUTS: Final = 128
_TALL: Final = (16, 64)
"""Rows and outputs of a product of more rows than a slab of ``_OUTPUTS`` takes: there are other kernels beyond as many
results."""
_NARROW: Final = 256
"""Inputs up to which so many rows stay in the cache nearest to the processor."""
_LANES: Final = 16
_MOST: Final = 1_000_000
"""Multiplications of one product, beyond which OpenBLAS takes other kernels."""


@cache
def available() -> bool:
    """Whether OpenBLAS takes its kernels for small products here. It has none for some processors with AVX-512."""
    built: Any = np.show_config(mode="dicts")
    blas = built["Build Dependencies"]["blas"]["name"]
    return "openblas" in blas and torch.backends.cpu.get_cpu_capability() == "AVX512" and _alike()


def _alike() -> bool:
    """Whether a row has the same bits in small products of two and of four rows, which sum to 0 by exact arithmetic:
    what comes out is what the order of the sum left."""
    draw = np.random.default_rng(1)
    inputs = 1024
    order = draw.permutation(inputs)
    rows, weights = (draw.standard_normal((count, inputs // 2), np.float32) for count in (4, _OUTPUTS))
    x = np.concatenate((rows, rows), 1)[:, order]
    matrix = np.concatenate((weights, -weights), 1)[:, order]
    whole = np.matmul(x, matrix.T)  # half of _MOST
    return all(np.array_equal(np.matmul(x[at : at + 2], matrix.T), whole[at : at + 2]) for at in (0, 2))


class Slabs:
    """A matrix of shape (outputs, inputs), wherever it lies."""

    def __init__(self, weight: torch.Tensor, rows: int, outputs: int, tall: Slabs | None = None) -> None:
        """``tall``: takes what are more than ``rows`` rows."""
        matrix: Floats = weight.numpy()
        total, inputs = matrix.shape
        self._rows, self._outputs, self._tall = rows, outputs, tall
        whole = total - total % outputs
        self._whole = matrix[:whole].reshape(whole // outputs, outputs, inputs).swapaxes(-1, -2)
        # What is left over is computed with the outputs before it: every slab has the same width.
        self._last = matrix[total - outputs :].T if whole < total else None

    @classmethod
    def of(cls, weight: torch.Tensor) -> Slabs | None:
        """None for a matrix whose products cannot be small."""
        total, inputs = weight.shape
        for rows in (8, 4, 2):
            outputs = min(total, _OUTPUTS, _MOST // (rows * inputs)) // _LANES * _LANES
            if outputs:
                tall = cls(weight, *_TALL) if inputs <= _NARROW and total >= _TALL[1] else None
                return cls(weight, rows, outputs, tall)
        return None

    def __call__(self, rows: Floats, out: Floats) -> None:
        """``out`` (rows, outputs) = ``rows`` (rows, inputs) x the matrix; an even number of rows."""
        if len(rows) <= self._rows:
            self._multiply_few(rows, out)
            return
        if self._tall is not None:
            self._tall(rows, out)
            return
        whole = len(rows) - len(rows) % self._rows
        self._multiply(rows[:whole], out[:whole])
        if whole < len(rows):
            self._multiply_few(rows[whole:], out[whole:])

    def _multiply_few(self, rows: Floats, out: Floats) -> None:
        """Rows of one product."""
        count, outputs = len(self._whole), self._outputs
        np.matmul(rows, self._whole, out=out[:, : count * outputs].reshape(-1, count, outputs).swapaxes(0, 1))
        if self._last is not None:
            np.matmul(rows, self._last, out=out[:, -outputs:])

    def _multiply(self, rows: Floats, out: Floats) -> None:
        """A whole number of products."""
        tiles = rows.reshape(-1, self._rows, rows.shape[1])
        count, outputs = len(self._whole), self._outputs
        into = out[:, : count * outputs].reshape(-1, self._rows, count, outputs).transpose(2, 0, 1, 3)
        # A slab after the other: its weights are read once.
        np.matmul(tiles[None], self._whole[:, None], out=into, order="C")
        if self._last is not None:
            np.matmul(tiles, self._last, out=out[:, -outputs:].reshape(-1, self._rows, outputs))

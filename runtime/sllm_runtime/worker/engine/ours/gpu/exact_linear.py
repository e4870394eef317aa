"""A linear layer whose rows do not know of each other, as a Triton kernel.

A program computes one tile of the output and adds up its inputs from first to last: no split over the inputs, no
atomics. The tile follows from the weight alone, never from the number of rows, and neither does the compiled variant:
``rows`` is not specialised, pointers are always aligned alike. So an element of the output is the same chain of sums in
any batch. (After batch_invariant_ops of Thinking Machines and vLLM's batch-invariant mode.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from sllm_runtime.worker.engine.ours.gpu.exact_memory import aligned

_WIDE: Final = 8192
"""Outputs from which tiles are wider: fewer, they still keep all processors of a GPU busy."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: ``rows`` x ``outputs``, ``inputs`` at a time; ``stages`` of them are on their way."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tile_of(outputs: int, dtype: torch.dtype) -> Tile:
    """For any number of rows. Few rows are bound by reading the weight, so a tall tile that is mostly empty costs them
    little; narrow tiles of a small weight are many, and are read by many processors."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 4, 2)
    return Tile(64, 32 if outputs < _WIDE else 64 if outputs < 2 * _WIDE else 128, 64, 4, 4)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor, rows: tl.tensor,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, OUTPUT_STRIDE: tl.constexpr, INPUT_STRIDE: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """One tile. Neighbouring programs have the same outputs: the weight is read once for all rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = (row < rows)[:, None], (column < OUTPUTS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INPUTS, DEPTH):
        at = start + tl.arange(0, DEPTH)
        here = at < INPUTS
        left = tl.load(x + row[:, None] * INPUTS + at[None, :], mask=has_row & here[None, :], other=0.0)
        places = weight + column[None, :] * OUTPUT_STRIDE + at[:, None] * INPUT_STRIDE
        right = tl.load(places, mask=has_column & here[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    into = row[:, None] * OUTPUTS + column[None, :]
    if ADDED:
        total += tl.load(residual + into, mask=has_row & has_column, other=0.0).to(tl.float32)
    tl.store(out + into, total.to(out.dtype.element_ty), mask=has_row & has_column)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` (rows, inputs) times ``weight`` (outputs, inputs), which may be stored either way, plus ``bias`` (outputs),
    plus ``residual`` (rows, outputs): (rows, outputs). Summed in float32 and rounded once."""
    rows, (outputs, inputs) = len(x), weight.shape
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    tile = tile_of(outputs, x.dtype)
    x = aligned(x)
    linear_kernel[triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs)](
        x, weight, x if bias is None else bias, x if residual is None else aligned(residual), out, rows,
        INPUTS=inputs, OUTPUTS=outputs, OUTPUT_STRIDE=weight.stride(0), INPUT_STRIDE=weight.stride(1),
        BIASED=bias is not None, ADDED=residual is not None,
        ROWS=tile.rows, COLUMNS=tile.outputs, DEPTH=tile.inputs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out

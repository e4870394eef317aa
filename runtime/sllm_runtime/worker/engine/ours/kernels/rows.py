"""What treats each row by itself around products and attention. Activations are float32 or bfloat16 (pointers to
uint16); what is computed of them is float32."""

from __future__ import annotations

import math
from typing import Any

from sllm_runtime.worker.engine.ours.kernels.common import ONE, ZERO, exp
from sllm_runtime.worker.engine.ours.kernels.lanes import LANES, fma, lanes, read, rounded, total, write


def norm(x: Any, rows: Any, width: Any, scale: Any, eps: Any, out: Any) -> None:
    """``out`` = x / sqrt(sum(x^2) + eps) * scale of each row of ``x`` (rows, width), dense; ``scale`` (width)."""
    for row in range(rows):
        squares = lanes(ZERO)
        for at in range(0, width, LANES):
            numbers = read(x, row * width + at, width - at)
            squares = fma(numbers, numbers, squares)
        share = lanes(ONE / math.sqrt(total(squares) + eps))
        for at in range(0, width, LANES):
            numbers = read(x, row * width + at, width - at) * share
            write(out, row * width + at, width - at, numbers * read(scale, at, width - at))


def gate(both: Any, rows: Any, width: Any, out: Any) -> None:
    """``out`` = silu(gate) * up, of ``both`` (rows, gate and up, width each), dense. In bfloat16 silu is rounded before
    it is multiplied, as torch does it."""
    for row in range(rows):
        for at in range(0, width, LANES):
            left = width - at
            gates = read(both, 2 * row * width + at, left)
            gates = gates / (lanes(ONE) + exp(lanes(ZERO) - gates))
            ups = read(both, (2 * row + 1) * width + at, left)
            write(out, row * width + at, left, rounded(out, gates) * ups)

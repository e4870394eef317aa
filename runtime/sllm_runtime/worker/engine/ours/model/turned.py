"""Bfloat16 products as matrix x rows transposed, where the processor multiplies tiles (AMX).

oneDNN then reads the matrix where it lies; for rows x matrix it first copies all of it into the order of its tiles, at
each step. With many rows and inputs it adds the inputs in several parts, so that a row's last bits would depend on how
many others there are: products stay below that.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.model.backend import Rows

FEW: Final = 32
"""Rows that are added up in one part whatever the matrix."""
_SHALLOW: Final = 256
"""Inputs that are added up in one part whatever the rows."""
_MOST: Final = 2**16
"""Rows times inputs of a product of more rows."""


@cache
def available() -> bool:
    """Whether this processor multiplies tiles of bfloat16."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


class Turned:
    """A matrix of shape (outputs, inputs), wherever it lies."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight, self._columns = weight, weight.t()
        self._shallow = weight.shape[1] <= _SHALLOW
        self._most = max(FEW, _MOST // weight.shape[1] // FEW * FEW)

    def __call__(self, x: Rows) -> Rows:
        """The product (rows, outputs) with ``x`` (rows, inputs); it lies in memory as either has it."""
        if len(x) <= FEW:
            return torch.mm(self._weight, x.t()).t()
        if self._shallow:
            return torch.mm(x, self._columns)
        parts = [torch.mm(self._weight, x[at : at + self._most].t()) for at in range(0, len(x), self._most)]
        return torch.cat(parts, 1).t().contiguous()

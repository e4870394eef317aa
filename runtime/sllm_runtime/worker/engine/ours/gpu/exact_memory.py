"""What a kernel may take for granted of the memory of its rows."""

from __future__ import annotations

from typing import Final

import torch

_BYTES: Final = 16


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it that is dense and begins at a multiple of 16 bytes. Triton compiles another variant of a
    kernel, whose sums may have another order, where a pointer is not aligned: a slice of rows must not get it."""
    x = x.contiguous()
    return x if x.data_ptr() % _BYTES == 0 else x.clone()

"""What makes the bits of a row its own: independent of the other rows, of their number and of its place.

A matrix product gives a row other bits when its shape falls into another class of kernels: so the rows of every product
are padded to a multiple. Attention goes through a row's pages in order, for each row by itself (``kernels.attention``);
norms and activations go row by row. Which level is enough depends on the library, the CPU, the dtype and the threads:
``selftest`` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sllm_runtime.protocol.checkpoint import align


@dataclass(frozen=True, slots=True)
class Numerics:
    """A level. ``rows``: those of a linear layer are padded to a multiple of it; ``slabs``: linear layers may be
    products of few rows and a slab of the outputs each (``model.slabs``)."""

    name: str
    rows: int
    slabs: bool = False

    def padded(self, rows: int) -> int:
        """Rows that a step computes for ``rows`` that are wanted."""
        return align(rows, self.rows)


FAST: Final = Numerics("fast", 1)
"""Rows are not padded; a row's last bits depend on its batch."""
LEVELS: Final = (Numerics("exact-2", 2, slabs=True), Numerics("exact-4", 4), Numerics("exact-16", 16))
"""From cheap to strict: the first that the self-test proves is taken. The first holds where products of few rows have
kernels of their own that treat each row alike: in float32 OpenBLAS' with AVX-512, in bfloat16 oneDNN's."""
GPU_EXACT: Final = Numerics("gpu-exact", 1)
"""Nothing is padded: kernels whose tiles and splits are fixed (``gpu.exact``)."""
GPU_FAST: Final = Numerics("gpu-fast", 1)
"""What torch has."""
GPU_LEVELS: Final = (GPU_EXACT, GPU_FAST)
EXACT: Final = LEVELS[1]
"""Taken where none is proven. In float32 it does not hold with every processor's products."""

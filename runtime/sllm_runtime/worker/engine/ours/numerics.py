"""What makes the bits of a row its own: independent of the other rows, of their number and of its place.

A matrix product gives a row other bits when the number of rows falls into another class of kernels (one row, two or
three, four and more). So the rows of every product are padded to a multiple of a tile, attention is done page by page
with its partial sums added in order (``attention``), and norms and softmax go row by row. Which tile is enough depends
on the library, the CPU and the threads: ``selftest`` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sllm_runtime.protocol.checkpoint import align


@dataclass(frozen=True, slots=True)
class Numerics:
    """A level: rows of a linear layer and rows of a page's product are padded to these multiples."""

    name: str
    rows: int
    queries: int

    def padded(self, rows: int) -> int:
        """Rows that a step computes for ``rows`` that are wanted."""
        return align(rows, self.rows)


FAST: Final = Numerics("fast", 1, 1)
"""No padding; a row's last bits depend on its batch."""
LEVELS: Final = (Numerics("exact-4", 4, 4), Numerics("exact-16", 16, 16))
"""From cheap to strict: the first that the self-test proves is taken. bfloat16 needs no padding of its rows where K is
below 2,816, but is no faster without."""
EXACT: Final = LEVELS[0]
"""What held wherever it was tried."""

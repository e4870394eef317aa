"""What kernels and those who call them agree on: names, arguments, sizes."""

from __future__ import annotations

from typing import Final

BLOCK: Final = 16
"""Rows of one sequence that go through a page together."""
TILE: Final = 16
"""Rows of a tile, each of as many pairs of bfloat16 or single float32."""
DEEP: Final = 2 * TILE
"""Inputs of a tile."""
SIDE: Final = 4
"""Rows and outputs whose ``dots`` are computed together: outputs that a matrix has at least."""
COLUMNS: Final = 7 * TILE * TILE
"""Where a product's ``scratch`` has its rows."""
NEAR: Final = 16
"""Rows whose ``dots`` are computed while the matrix passes by once: they stay in a cache near the processor."""
KERNELS: Final = {
    "attend": "F I I I I I L L L I I F F F F I f f F F F",
    "norm": "X I I F f X",
    "gate": "X I I X",
    "dots": "F I I F I F I F I",
}
"""The arguments of each: pointers to float32 (F), bfloat16 (H), int64 (L), int64 (I), float32 (f). Those with X are
there twice, as ``name`` for float32 and as ``name_bfloat16``."""
PRODUCTS: Final = {
    "product": "H I I H I H I H I L F",
    "product_to_float32": "H I I H I F I F I L F",
    "product_of_float32": "F I I H I H I H I L F",
}
"""What ``product`` is where the processor has tiles of bfloat16: for rows and results of other dtypes."""


HALVES: Final = {
    "halves": "H I I H I H I H I F",
    "halves_to_float32": "H I I H I F I F I F",
    "halves_of_float32": "F I I H I H I H I F",
}
"""What ``halves`` is where the processor is narrow, likewise."""


def variants(tiles: bool, narrow: bool) -> dict[str, tuple[str, str]]:
    """Of each symbol: the kernel, and its arguments. ``tiles``, ``narrow``: see ``loaded.Target``."""
    found = {}
    for name, arguments in KERNELS.items():
        if "X" in arguments:
            found[f"{name}_bfloat16"] = name, arguments.replace("X", "H")
        found[name] = name, arguments.replace("X", "F")
    if tiles:
        found |= {symbol: ("product", arguments) for symbol, arguments in PRODUCTS.items()}
    if narrow:
        found |= {symbol: ("halves", arguments) for symbol, arguments in HALVES.items()}
    return found


def scratch(rows: int, inputs: int) -> int:
    """Numbers of float32 that a product writes to."""
    return COLUMNS + -(-rows // TILE) * -(-inputs // DEEP) * TILE * TILE

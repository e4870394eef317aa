"""What kernels and those who call them agree on: names, arguments, sizes."""

from __future__ import annotations

from typing import Final

BLOCK: Final = 16
"""Rows of one sequence that go through a page together."""
KERNELS: Final = {
    "attend": "F I I I I I L L L I I F F F F I f f F F F",
    "norm": "X I I F f X",
    "gate": "X I I X",
}
"""The arguments of each: pointers to float32 (F), bfloat16 (H), int64 (L), int64 (I), float32 (f). Those with X are
there twice, as ``name`` for float32 and as ``name_bfloat16``."""


def variants() -> dict[str, tuple[str, str]]:
    """Of each symbol: the kernel, and its arguments."""
    found = {}
    for name, arguments in KERNELS.items():
        if "X" in arguments:
            found[f"{name}_bfloat16"] = name, arguments.replace("X", "H")
        found[name] = name, arguments.replace("X", "F")
    return found

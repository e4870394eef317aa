"""How a table's cells lie on a terminal. What identifies is never cut: it is copied into the next command. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

GAP: Final = 2
WORD: Final = 16
"""Longer words of what describes may be broken."""
_IDENTIFYING: Final = frozenset(
    {"CALL", "DIGEST", "FUNCTION", "GATEWAY", "INSTANCE", "MODEL", "NAME", "NODE", "VERSION"}
)


def widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Of each column, its gap left out, on a terminal ``room`` wide. None: there is none for what must stay whole."""
    cells = list(zip(columns, *rows, strict=True))
    wanted = [max(1, *map(_width, column)) for column in cells]
    found = [min(_needed(column), most) for column, most in zip(cells, wanted, strict=True)]
    left = room - sum(found) - GAP * len(found)
    if left < 0:
        return None
    while left and (narrow := [index for index, width in enumerate(found) if width < wanted[index]]):
        for index in narrow:
            more = min(max(1, left // len(narrow)), wanted[index] - found[index], left)
            found[index] += more
            left -= more
    return found


def _needed(cells: Sequence[str]) -> int:
    """Of a column, its name first: all of what identifies; of the rest its words, and no ladder of short lines, up to
    ``WORD``."""
    widest = max(1, *map(_width, cells))
    if cells[0] in _IDENTIFYING:
        return widest
    return min(max(1, widest // 3, *(_width(word) for cell in cells for word in cell.split())), WORD)


def flowed(columns: Sequence[str], row: Sequence[str], room: int) -> list[str]:
    """One row as lines of ``COLUMN: cell``. One that is wider than ``room`` has its line, which the terminal wraps."""
    lines: list[str] = []
    for pair in (f"{column}: {cell}" if column else cell for column, cell in zip(columns, row, strict=True) if cell):
        if lines and _width(lines[-1]) + GAP + _width(pair) <= room:
            lines[-1] += " " * GAP + pair
        else:
            lines.append(" " * GAP + pair if lines else pair)
    return lines


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)

"""Sans-I/O parts of log capture: bytes to lines, and how many of them may pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LINE_BYTES: Final = 8 * 1024
"""A longer line is cut here, and its rest dropped."""


class LineCutter:
    """Bytes in, whole lines out. A line without end is given out once it is too long; the rest of it is dropped."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._skipping = False

    @property
    def skipping(self) -> bool:
        """Whether what comes is the rest of a line that was given out already."""
        return self._skipping

    def feed(self, data: bytes) -> list[str]:
        """Lines that are complete now, without their ends."""
        lines: list[str] = []
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._take(piece, lines)
            if not self._skipping:
                lines.append(self._text())
                self._rest.clear()
            self._skipping = False
        self._take(rest, lines)
        return lines

    def _take(self, piece: bytes, lines: list[str]) -> None:
        if self._skipping:
            return
        self._rest += piece[: self._limit + 1 - len(self._rest)]
        if len(self._rest) > self._limit:
            lines.append(self._text())
            self._rest.clear()
            self._skipping = True

    def _text(self) -> str:
        # One byte beyond the limit is kept to know that there is more; "…" says that the line was cut.
        cut = self._rest[: self._limit].decode(errors="replace").removesuffix("\r")
        return cut + "…" if len(self._rest) > self._limit else cut

    def end(self) -> list[str]:
        """The last line, if it has no end."""
        lines = [self._text()] if self._rest and not self._skipping else []
        self._rest.clear()
        return lines


def thinned(data: bytes, first: int, last: int) -> tuple[bytes, int]:
    """``data`` without what is between its ``first`` lines and its ``last`` ones, and how many lines that was: who
    writes more than may pass is to cost no more than their count. One line at least is kept at each end: another read
    has the beginning of the first one."""
    first, last = max(1, first), max(1, last)
    out = data.count(b"\n") - first - last
    if out <= 0:
        return data, 0
    *head, rest = data.split(b"\n", first)
    _, *tail = rest.rsplit(b"\n", last + 1)
    return b"\n".join((*head, *tail)), out


@dataclass
class TokenBucket:
    """``rate`` units a second, ``burst`` at once. The clock is handed in."""

    rate: float
    burst: float
    level: float = field(init=False)
    at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.level = self.burst

    def room(self, now: float) -> float:
        """How much may pass now."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.rate)
        self.at = max(self.at, now)
        return self.level

    def take(self, amount: float, now: float) -> bool:
        """Whether ``amount`` may pass now; then it is taken."""
        if self.room(now) < amount:
            return False
        self.level -= amount
        return True

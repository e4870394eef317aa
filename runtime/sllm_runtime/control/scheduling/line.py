"""A straight line through what was measured, the newest counting most. Immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FADE: Final = 0.95
"""What is left of a measurement's weight after each later one."""


@dataclass(frozen=True, slots=True)
class Line:
    """``seconds = slope * x + base`` by weighted least squares, from sums over what was seen."""

    slope: float
    base: float
    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def seconds(self, x: float) -> float:
        """At ``x``; never less than nothing."""
        return max(self.slope * x + self.base, 0.0)

    def after(self, x: float, y: float) -> Line:
        """With one more point. While all lie at one ``x`` only the base is moved: they say nothing of a slope."""
        n, sx, sy = FADE * self.n + 1.0, FADE * self.x + x, FADE * self.y + y
        xx, xy = FADE * self.xx + x * x, FADE * self.xy + x * y
        spread = n * xx - sx * sx
        slope = (n * xy - sx * sy) / spread if spread > 1e-9 * n * xx else self.slope
        slope = max(slope, 0.0)
        return Line(slope, (sy - slope * sx) / n, n, sx, sy, xx, xy)


NO_MOVES: Final = Line(slope=2e-4, base=0.1)
"""Of a model of which no call was ever moved: seconds a token and seconds, as of a small model on a CPU."""

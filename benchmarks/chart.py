"""Bar charts as SVG, drawn without a library: a page of docs shows them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

_WIDTH: Final = 720
_LABEL: Final = 210
_VALUE: Final = 90
_BAR: Final = 22
_GAP: Final = 12
_TOP: Final = 44
_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}.bar{fill:#2f6f9f}.limit{stroke:#b3541e}"
    "@media(prefers-color-scheme:dark){text{fill:#d0d7de}.bar{fill:#6cb2e0}.limit{stroke:#f0a070}}"
)


def bars(title: str, unit: str, values: Sequence[tuple[str, float]], limit: tuple[str, float] | None = None) -> str:
    """Horizontal bars from 0, one for each (label, value), top to bottom; ``limit`` is a line across them with its
    label. Raises ``ValueError`` without a positive value."""
    top = max([value for _, value in values] + ([limit[1]] if limit else []), default=0.0)
    if top <= 0:
        raise ValueError("a chart needs a value above 0")
    scale = (_WIDTH - _LABEL - _VALUE) / top
    height = _TOP + len(values) * (_BAR + _GAP) + (_BAR if limit else 0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="8" y="22">{escape(title)}, {escape(unit)}</text>',
    ]
    for number, (label, value) in enumerate(values):
        y, width = _TOP + number * (_BAR + _GAP), value * scale
        lines += [
            f'<text x="{_LABEL - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="bar" x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}"/>',
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 16}">{value:.3g}</text>',
        ]
    if limit:
        x, end = _LABEL + limit[1] * scale, height - _BAR
        lines += [
            f'<line class="limit" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{end}" stroke-dasharray="5 4"/>',
            f'<text x="{x:.1f}" y="{height - 6}" text-anchor="end">{escape(limit[0])} {limit[1]:.3g}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"

"""What records say that a curve says better: their charts, and where those are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.chart import bars

DIRECTORY: Final = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
_ABLATION: Final = "ablation"
_LIMIT: Final = "direct read, 2 MiB pages"


def _ablation(record: Mapping[str, Any]) -> str | None:
    """The parts of loaderd's pipeline, switched on one by one."""
    found = [
        (case["system"], case["median"]) for case in record["cases"] if case["case"] == _ABLATION if "median" in case
    ]
    limit = next((each for each in found if each[0] == _LIMIT), None)
    steps = [each for each in found if each != limit]
    if not steps:
        return None
    title = f"Cold disk to {record['settings'].get('ablation_device', 'memory')}: parts switched on one by one"
    return bars(title, "GB/s", steps, limit)


_CHARTS: Final[dict[str, dict[str, Callable[[Mapping[str, Any]], str | None]]]] = {"load": {_ABLATION: _ablation}}


def charts(record: Mapping[str, Any], machine: str) -> dict[str, str]:
    """The charts of a record that was made on ``machine``: SVG by file name."""
    made = {name: draw(record) for name, draw in _CHARTS.get(record["benchmark"], {}).items()}
    return {f"{record['benchmark']}-{name}-{machine}.svg": svg for name, svg in made.items() if svg is not None}


def write_charts(record: Mapping[str, Any], machine: str, directory: Path = DIRECTORY) -> list[Path]:
    """Write them; where they are."""
    written = []
    for name, svg in charts(record, machine).items():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(svg)
        written.append(directory / name)
    return written

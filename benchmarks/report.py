"""``python -m benchmarks.report``: docs/benchmarks.md from the committed records, missed aims included."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.charts import charts, write_charts
from benchmarks.runner import figure

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
TARGET: Final = ROOT / "docs" / "benchmarks.md"


def render(records: list[tuple[str, dict[str, Any]]]) -> str:
    """The page for ``(machine directory, record)`` pairs."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `python -m benchmarks.report` from `benchmarks/results/`; method: `benchmarks/README.md`.",
        "Ratios within one run are what counts; absolute times belong to the machine that is named.",
    ]
    for directory, record in records:
        lines += _section(directory, record)
    return "\n".join(lines) + "\n"


def _section(directory: str, record: dict[str, Any]) -> list[str]:
    machine = record["machine"]
    lines = [
        "",
        f"## {record['benchmark']} on {directory}{_file(record)}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{_disk(machine)}, "
        f"Linux {machine['kernel']}; "
        f"accelerators: {', '.join(machine['accelerators']) or 'none'}; "
        f"commit {record['commit']}, {record['started']}, {record['seconds']:.0f} s"
        f"{', quick' if record['settings'].get('quick') else ''}{_yardstick(record['settings'])}"
        f"{_abilities(record['settings'])}{_changed(record)}.",
        "",
        "| case | system | median | min | max | n | unit | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        numbers = " | ".join(figure(case.get(key)) for key in ("median", "min", "max"))
        notes = "; ".join(_line(part) for part in (case.get("not_run"), case.get("notes"), _extra(case)) if part)
        count = len(case.get("samples", []))
        lines.append(f"| {case['case']} | {case['system']} | {numbers} | {count} | {case['unit']} | {notes} |")
    for name in charts(record, directory):
        lines += ["", f"![{name}](benchmarks/{name})"]
    lines += ["", "| aim | wanted | value | met |", "|---|---|---|---|"]
    for aim in record["aims"]:
        wanted = f"≥ {aim['at_least']}" if "at_least" in aim else f"≤ {aim['at_most']}"
        lines.append(f"| {aim['aim']} | {wanted} | {figure(aim['value'])} | {_VERDICT[aim['met']]} |")
    return [*lines, "", record["remarks"].strip()] if record.get("remarks") else lines


def _file(record: dict[str, Any]) -> str:
    """Of several records of one benchmark, which: ``load_ssd.json``."""
    name = record.get("file", "")
    return f": {name}" if name not in ("", f"{record['benchmark']}.json") else ""


_VERDICT: Final = {True: "yes", False: "**no**", None: "not judged"}


def _yardstick(settings: dict[str, Any]) -> str:
    known = settings.get("yardstick_ms")
    return f"; yardstick {known[0]} ms before, {known[1]} ms after" if known else ""


def _disk(machine: dict[str, Any]) -> str:
    speed = machine.get("disk", {}).get("direct_read_gb_s")
    return f", direct reads {speed} GB/s" if speed else ""


def _changed(record: dict[str, Any]) -> str:
    after = record["settings"].get("commit_after")
    return f"; THE CHECKOUT HAS CHANGED MEANWHILE, to {after}" if after else ""


def _abilities(settings: dict[str, Any]) -> str:
    """What this machine's kernel and driver gave."""
    return "".join(f"; {name}: {_line(answer)}" for name, answer in settings.get("abilities", {}).items())


def _extra(case: dict[str, Any]) -> str:
    shown = {key: value for key, value in case.get("extra", {}).items() if isinstance(value, int | float | str)}
    shown |= {key: case[key] for key in ("cpu_s", "peak_rss_mib") if key in case}
    return ", ".join(f"{key} {value if isinstance(value, str) else figure(value)}" for key, value in shown.items())


def _line(text: str) -> str:
    """What a cell of the table can hold."""
    return " ".join(text.split()).replace("|", "\\|")[:300]


def remarks(record: Path) -> dict[str, str]:
    """A record's name, and what stands beside it in a text of the same name: why aims are missed, say."""
    text = record.with_suffix(".md")
    return {"file": record.name, **({"remarks": text.read_text()} if text.exists() else {})}


def main() -> int:
    """Write the page."""
    found = sorted(RESULTS.glob("*/*.json"))
    records = [(path.parent.name, json.loads(path.read_text()) | remarks(path)) for path in found]
    TARGET.write_text(render(records))
    for directory, record in records:
        write_charts(record, directory)
    sys.stderr.write(f"{TARGET.relative_to(ROOT)}: {len(found)} records\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

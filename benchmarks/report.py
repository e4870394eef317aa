"""``python -m benchmarks.report``: docs/benchmarks.md from the committed records, missed aims included.

A record is marked that is quick, was interrupted, is of a tree that was not committed, or of a commit after which its
benchmark was changed. An aim whose method was withdrawn (``withdrawn``) is not met any more, and says why; one that was
missed stays so.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks import withdrawn
from benchmarks.charts import charts, write_charts
from benchmarks.record import Aim
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
        *_glance(records),
    ]
    for directory, record in records:
        lines += _section(directory, record)
    return "\n".join(lines) + "\n"


def _glance(records: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """A line for each record, those of a benchmark beside each other and the newest first: which aims it missed."""
    lines = [
        "",
        "## At a glance",
        "",
        "Each record once, the newest of a benchmark first. A missed aim stands with what was measured and what was "
        "wanted; the rest of a record's aims were reached, but for those not judged (too few samples, or a method that "
        "was withdrawn since).",
        "",
        "| record | made | marked | aims reached | not judged | missed |",
        "|---|---|---|---|---|---|",
    ]
    newest = sorted(records, key=lambda each: each[1]["started"], reverse=True)
    for directory, record in sorted(newest, key=lambda each: each[1]["benchmark"]):
        verdicts = [(_verdict(record, aim), aim) for aim in record["aims"]]
        missed = [aim for verdict, aim in verdicts if verdict.startswith(_VERDICT[False])]
        reached = sum(verdict.startswith(_VERDICT[True]) for verdict, _ in verdicts)
        told = "; ".join(f"{aim['aim']}: **{figure(aim['value'])}** ({_wanted(aim)})" for aim in missed)
        title = _title(directory, record)
        lines.append(
            f"| [{title}](#{_anchor(title)}) | {record['started'][:10]} | {', '.join(_marks(record))} | {reached} "
            f"| {len(verdicts) - reached - len(missed) or ''} | {told} |"
        )
    return lines


def _title(directory: str, record: dict[str, Any]) -> str:
    return f"{record['benchmark']} on {directory}{_file(record)}"


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _section(directory: str, record: dict[str, Any]) -> list[str]:
    machine = record["machine"]
    lines = [
        "",
        f"## {_title(directory, record)}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{_disk(machine)}, "
        f"Linux {machine['kernel']}; "
        f"accelerators: {', '.join(machine['accelerators']) or 'none'}; "
        f"commit {record['commit']}, {record['started']}, {record['seconds']:.0f} s"
        f"{', quick' if record['settings'].get('quick') else ''}{_yardstick(record['settings'])}"
        f"{_abilities(record['settings'])}{_changed(record)}.",
        *(["", f"**{' '.join(marks.values())}**"] if (marks := _marks(record)) else []),
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
        lines.append(f"| {aim['aim']} | {_wanted(aim)} | {figure(aim['value'])} | {_verdict(record, aim)} |")
    return [*lines, "", record["remarks"].strip()] if record.get("remarks") else lines


def _file(record: dict[str, Any]) -> str:
    """Of several records of one benchmark, which: ``load_ssd.json``."""
    name = record.get("file", "")
    return f": {name}" if name not in ("", f"{record['benchmark']}.json") else ""


def _wanted(aim: dict[str, Any]) -> str:
    return Aim(aim["aim"], None, aim.get("at_least"), aim.get("at_most")).bound


_VERDICT: Final = {True: "yes", False: "**no**", None: "not judged"}


def _verdict(record: dict[str, Any], aim: dict[str, Any]) -> str:
    why = withdrawn.reason(record["benchmark"], aim["aim"], record["started"])
    verdict = "withdrawn" if why and aim["met"] else _VERDICT[aim["met"]]
    return f"{verdict}: {why}" if why else verdict


def _marks(record: dict[str, Any]) -> dict[str, str]:
    """Why its figures are not to be relied on: in a word, and in more; empty if they are."""
    settings, age = record["settings"], record.get("age", {})
    marks = {}
    if settings.get("quick"):
        marks["quick"] = "A quick run: it shows that the code runs, and judges nothing."
    if settings.get("interrupted"):
        marks["interrupted"] = "It was interrupted."
    if record["commit"].endswith("+"):
        marks["not committed"] = "Of a tree that was not committed: nobody can have it again."
    if changes := age.get("changes"):
        marks["old"] = f"Old: its benchmark was changed in {changes} of the {age['commits']} commits since."
    return marks


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


def age(record: dict[str, Any], root: Path = ROOT) -> dict[str, dict[str, int]]:
    """How many commits there are since a record's, and how many of them ``changes`` of its benchmark; nothing where git
    does not know it."""
    name = record["benchmark"]
    files = [
        f"benchmarks/{name}.py",
        f"benchmarks/{name}_*.py",
        *(f"benchmarks/{each}" for each in _ALSO.get(name, ())),
    ]
    counts = [_commits(root, record["commit"].rstrip("+"), among) for among in ([], files)]
    return {"age": {"commits": counts[0], "changes": counts[1]}} if None not in counts else {}


_ALSO: Final = {
    "gateway": ("generator.py", "streaming.py", "bare.py"),
    "migration": ("heard.py", "slow_store.py"),
    "chaos": ("heard.py", "nats_cluster.py"),
    "failover": ("heard.py", "chaos_client.py", "chaos_faults.py", "nats_cluster.py"),
    "estimator": ("beginning.py", "page_cache.py", "throttle.py"),
    "replay": ("beginning.py",),
    "cold_start": ("cold_*.py",),
}
"""Further files of a benchmark."""


def _commits(root: Path, since: str, files: list[str]) -> Any:
    command = ["git", "rev-list", "--count", f"{since}..HEAD", "--", *(f":(glob){file}" for file in files)]
    counted = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return int(counted.stdout) if counted.returncode == 0 else None


def main() -> int:
    """Write the page."""
    found = sorted(RESULTS.glob("*/*.json"))
    records = []
    for path in found:
        record = json.loads(path.read_text())
        records.append((path.parent.name, record | remarks(path) | age(record)))
    TARGET.write_text(render(records))
    for directory, record in records:
        write_charts(record, directory)
    sys.stderr.write(f"{TARGET.relative_to(ROOT)}: {len(found)} records\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

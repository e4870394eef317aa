"""The command line every benchmark shares, and how a run is shown and written."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.charts import write_charts
from benchmarks.programs import ProgramFailed, Usage
from benchmarks.record import Aim, Case, Record
from sllm_runtime.protocol.errors import SllmError

T = TypeVar("T")
FORESEEN: Final = (ProgramFailed, SllmError, OSError, subprocess.SubprocessError)
"""Errors whose text says what broke."""


def in_turn(systems: Sequence[T], number: int) -> Sequence[T]:
    """All of them, in round ``number``: each begins with another one, since each finds what the one before has left."""
    first = number % len(systems)
    return (*systems[first:], *systems[:first])


@dataclass
class Run:
    """What a benchmark's measuring functions get: settings, and where their cases go."""

    quick: bool
    cases: list[Case] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)
    """Cases of ours that broke. The others are measured all the same; the exit status is 1."""

    @property
    def rounds(self) -> int:
        """How often each system is measured, alternating."""
        return 3 if self.quick else 7

    @property
    def least(self) -> int:
        """Samples below which an aim is not judged."""
        return 7

    def case(self, case: str, system: str, unit: str = "ms") -> Case:
        """The case of that name, made at first use."""
        for known in self.cases:
            if (known.case, known.system) == (case, system):
                return known
        made = Case(case, system, unit)
        self.cases.append(made)
        return made

    @contextlib.contextmanager
    def attempt(self, case: str, unit: str = "ms") -> Iterator[None]:
        """What breaks inside is recorded as why our figures are missing, whatever it is; other cases are measured all
        the same. It is a missed aim as well: else an error would make the case's aims vanish."""
        self.note(f"case {case}")
        try:
            yield
        except Exception as error:
            self.broke(case, error, unit)

    def broke(self, case: str, error: Exception, unit: str = "ms") -> None:
        """Record that the case has ended with ``error``; of one that nobody has foreseen, say where it was."""
        self.failed.append(case)
        self.aims.append(Aim(f"{case}: errors that ended it", 1.0, at_most=0.0))
        said = str(error) if isinstance(error, FORESEEN) else f"{type(error).__name__}: {error}"
        self.case(case, "sllm", unit).not_run = f"failed: {said}"[:1000]
        self.note(f"{case} failed: {said}")
        if not isinstance(error, FORESEEN):
            sys.stderr.writelines(traceback.format_exception(error))

    @contextlib.contextmanager
    def spending(self, of: Callable[[], Usage], *cases: Case) -> Iterator[None]:
        """What is used meanwhile, by whom ``of`` asks, stands beside the times of ``cases``: CPU seconds, added up, and
        as peak of memory the most that was seen before or after."""
        before = of()
        try:
            yield
        finally:
            after = of()
            for case in cases:  # less than before where a process that nobody waited for has ended
                case.cpu_s = round((case.cpu_s or 0.0) + max(0.0, after.cpu_s - before.cpu_s), 3)
                case.peak_rss_mib = round(max(case.peak_rss_mib or 0.0, before.pss_mib, after.pss_mib))

    def note(self, text: str) -> None:
        """What goes on, on stderr."""
        sys.stderr.write(f"{time.monotonic() - self.began:6.1f} s  {text}\n")
        sys.stderr.flush()


Measure = Callable[[Run, Sequence[str]], None]
"""Measures the cases it is given, in order, into the run."""


def main(
    benchmark: str,
    cases: Sequence[str],
    measure: Measure,
    argv: Sequence[str] | None = None,
    numbers: Mapping[str, float] | None = None,
) -> int:
    """Parse, measure, show. Exit status 0 also where an aim is missed, 1 where a case broke, 130 if it was interrupted:
    what was measured until then is recorded all the same. ``numbers``: further options of this benchmark with their
    defaults, which stand in ``Run.settings``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}")
    parser.add_argument("--json", metavar="FILE|-", help="write the record (- : to stdout)")
    parser.add_argument("--quick", action="store_true", help="fewer samples, same code, under three minutes")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument(
        "--only", metavar="CASE", choices=list(cases), action="append", help="run one case (repeatable)"
    )
    for name, default in (numbers or {}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default:g}")
    options = parser.parse_args(argv)
    if options.list:
        sys.stdout.write("\n".join(cases) + "\n")
        return 0
    chosen = {name: getattr(options, name) for name in numbers or {}}
    run = Run(options.quick, settings={"quick": options.quick, **chosen})
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    signal.signal(signal.SIGTERM, _interrupt)
    before, commit, disk = machine.yardstick(), machine.commit(), machine.disk(Path(tempfile.gettempdir()))
    interrupted = False
    try:
        measure(run, [name for name in cases if options.only is None or name in options.only])
    except Exception as error:
        run.broke(benchmark, error)
    except BaseException:
        interrupted = run.settings["interrupted"] = True
        run.note("interrupted; everything is stopped")
    seconds = time.monotonic() - run.began
    run.settings["yardstick_ms"] = [before, machine.yardstick()]
    if (after := machine.commit()) != commit:  # what was measured is nothing that can be checked out
        run.settings["commit_after"] = after
        run.note(f"the checkout has changed meanwhile, from {commit} to {after}")
    made_on = machine.describe() | {"disk": disk}
    record = Record(benchmark, commit, started, seconds, made_on, run.settings, run.cases, run.aims)
    if options.json == "-":
        sys.stdout.write(json.dumps(record.document()) + "\n")
    elif options.json:
        record.write(Path(options.json))
    else:
        show(record)
        sys.stderr.write("no record written; --json FILE\n")
        if not options.quick and not interrupted:
            for path in write_charts(record.document(), machine.name()):
                sys.stderr.write(f"chart: {path}\n")
    return 130 if interrupted else 1 if run.failed else 0


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def show(record: Record) -> None:
    """Tables for people."""
    console = Console()
    table = Table(title=f"{record.benchmark} ({record.machine['cpu']}, {record.machine['cores']} cores)")
    for column in ("case", "system", "median", "min", "max", "n", "unit", "notes"):
        right = column in ("median", "min", "max", "n")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "notes")
    for case in record.cases:
        made = case.document()
        numbers = [figure(made.get(key)) for key in ("median", "min", "max")]
        table.add_row(case.case, case.system, *numbers, str(len(case.samples)), case.unit, _short(case))
    console.print(table)
    for aim in record.aims:
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: "not judged"}[aim.met]
        console.print(f"{aim.aim}: {figure(aim.value)} ({aim.bound}) {verdict}")


def figure(value: float | None) -> str:
    """Four digits that count, and no powers of ten."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _short(case: Case) -> str:
    """One line of what the record says in full."""
    text = " ".join((case.not_run or case.notes).split())
    stages = ", ".join(f"{key} {figure(value)}" for key, value in case.extra.items() if isinstance(value, int | float))
    return "; ".join(part for part in (text[:100], stages) if part)

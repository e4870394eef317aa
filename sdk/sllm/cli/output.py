"""How things are shown: tables and progress for people on a terminal, JSON for programs, notes on stderr."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

from sllm.cli import layout
from sllm_runtime.protocol.errors import SllmError

if TYPE_CHECKING:
    from rich.console import Console

    from sllm_runtime.protocol.http import ProgressView

_COMMANDING: Final = (
    *range(0x20),  # C0
    *range(0x7F, 0xA0),  # DEL and C1
    *(0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # which way letters run
    *(0x2028, 0x2029),  # ends of lines and paragraphs
)
_ONE_LINE: Final = {code: chr(code).encode("unicode_escape").decode() for code in _COMMANDING}
_JSON: Final = {code: f"\\u{code:04x}" for code in _COMMANDING if code >= 0x7F}
"""JSON escapes the others itself."""
_NUMBER: Final = re.compile(r"\d[\d.,]*")
_LINES: Final = {code: shown for code, shown in _ONE_LINE.items() if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """Text of others with nothing that commands a terminal: only lines and tabs stay, all else is an escape."""
    return text.translate(_LINES)


def one_line(text: str) -> str:
    """``printable``, where another line would be taken for one of ours."""
    return text.translate(_ONE_LINE)


def value(document: Any) -> None:
    """One JSON document on stdout."""
    raw(_json(document, sys.stdout))


def _json(document: Any, stream: TextIO) -> str:
    """In letters that ``stream`` has: it would write others as escapes that are none of JSON's (``streams``). Nor with
    any that command a terminal: a program reads the same."""
    ascii_only = codecs.lookup(stream.encoding or "utf-8").name != "utf-8"
    return json.dumps(document, ensure_ascii=ascii_only).translate(_JSON)


def text(line: str) -> None:
    """A result for people, on stdout, ``printable``."""
    raw(printable(line))


def raw(text: str, end: str = "\n") -> None:
    """A result as it is: what a function answers and writes, and what is escaped already."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def clock(at: float) -> str:
    """A time of day for people, with its date unless that is today's."""
    then = time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M:%S", then)


def note(line: str) -> None:
    """Everything that is no result, on stderr, ``printable``."""
    _note(printable(line))


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """A table on stdout, or ``empty`` on stderr. Plain and unwrapped where stdout is no terminal; where a terminal has
    no room for what must stay whole (``layout``), each row has lines of its own."""
    cells = [[one_line(" ".join(str(cell).split())) for cell in row] for row in rows]
    if not cells:
        note(empty)
        return
    if not sys.stdout.isatty():
        for row in (columns, *cells):
            text("\t".join(row))
        return
    from rich.table import Table
    from rich.text import Text

    console = _console(stderr=False)
    widths = layout.widths(columns, cells, console.width)
    if widths is None:
        for row in cells:
            text("\n".join(layout.flowed(columns, row, console.width)))
        return
    drawn = Table(box=None, header_style="bold", padding=(0, layout.GAP, 0, 0), pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        drawn.add_column(column, width=width, overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))  # no markup: cells hold what users wrote
    console.print(drawn)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, no_color="NO_COLOR" in os.environ or None)


def error(problem: SllmError, *, as_json: bool) -> None:
    """An error on stderr, with the body it has on the wire when ``as_json``."""
    if as_json:
        body = problem.body()
        fields = {"code": body.code, "message": body.message, "retryable": body.retryable}
        fields |= {key: found for key in ("field", "stage", "detail") if (found := getattr(body, key)) is not None}
        _note(_json({"error": fields}, sys.stderr))
        return
    stage = f" ({problem.stage})" if problem.stage else ""
    _note(f"{_red('error')}: {printable(f'{problem.message}{stage}  [{problem.code}]')}")


def usage(problem: Any, *, as_json: bool) -> None:
    """Wrong usage (typer's ``UsageError``), with the way to the right one."""
    message = problem.format_message()
    context = getattr(problem, "ctx", None)
    if as_json:
        _note(_json({"error": {"code": "usage", "message": message, "retryable": False}}, sys.stderr))
    elif message.startswith("Usage:"):  # a group named without a verb: its help is the answer
        note(message)
    elif message:
        command = context.command_path if context else "sllm"
        _note(f"{_red('error')}: {printable(message)}  (see `{command} --help`)")


def coloured(word: str, code: str) -> str:
    """``word`` in an ANSI colour, where stdout is a terminal that wants colours."""
    return f"\x1b[{code}m{word}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else word


def _red(word: str) -> str:
    return f"\x1b[31m{word}\x1b[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else word


class Progress:
    """Shows stages with bytes and rate on a terminal; elsewhere one line a stage, and one for each message within it
    that says more than other numbers."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title = one_line(title)
        self._quiet = quiet
        self._stage = self._said = ""
        self._since, self._from = 0.0, 0
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, view: ProgressView) -> None:
        """Show ``view``."""
        from sllm_runtime.protocol.quantities import show_bytes

        if self._quiet:
            return
        label = one_line(f"{self._title}: {view.message or view.stage}")
        if self._bar is None:
            said = _NUMBER.sub("", view.message)
            if view.stage != self._stage or (said and said != self._said):
                self._said = said
                note(label + (f" ({show_bytes(view.total)})" if view.total and view.unit == "B" else ""))
        else:
            size = f"{show_bytes(view.done)}/{show_bytes(view.total)}" if view.total and view.unit == "B" else ""
            size += self._rate(view) if size else ""
            self._bar.update(self._task, description=label, completed=view.done, total=view.total or None, size=size)
        self._stage = view.stage

    def _rate(self, view: ProgressView) -> str:
        """Bytes a second since this stage began; empty where nothing came yet."""
        from sllm_runtime.protocol.quantities import show_bytes

        now = time.monotonic()
        if view.stage != self._stage or view.done < self._from:
            self._since, self._from = now, view.done
        seconds = now - self._since
        return f", {show_bytes((view.done - self._from) / seconds)}/s" if view.done > self._from and seconds else ""

    def start(self) -> None:
        """Take the terminal's last line, if there is a terminal."""
        if self._quiet or self._bar is not None or not sys.stderr.isatty():
            return
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[size]}", markup=False),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=_console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._title, total=None, size="")
        self._bar.start()

    def stop(self) -> None:
        """Give the terminal back. Repeatable."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Progress]:
    """A progress display for one long operation; silent for programs."""
    shown = Progress(title, quiet=quiet)
    shown.start()
    try:
        yield shown
    finally:
        shown.stop()

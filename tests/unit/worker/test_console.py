"""What user code prints, from wherever it does."""

from __future__ import annotations

import threading

from sllm_runtime.worker.console import LineWriter
from tests.fixtures.waiting import GIVE_UP_S

LINES = 3000
"""Enough for some hundred garbage collections, of which the first one is met within a hundred lines."""


class Gone:
    """In a cycle, so that a garbage collection is what finalises it, and prints as it goes."""

    def __init__(self, writer: LineWriter) -> None:
        self._self, self._writer = self, writer

    def __del__(self) -> None:
        self._writer.write("gone")
        self._writer.write("\n")


def test_a_finaliser_prints_wherever_it_comes() -> None:
    """Also within another print of its own thread: nobody waits for itself, and no line is lost."""
    lines: list[str] = []
    writer = LineWriter("stdout", 1, lambda number, stream, line: lines.append(line))

    def prints() -> None:
        for number in range(LINES):
            Gone(writer)
            writer.write(f"line {number}\nbegun ")
            writer.write("and ended\n")

    thread = threading.Thread(target=prints, daemon=True)
    thread.start()
    thread.join(GIVE_UP_S)
    assert not thread.is_alive(), f"it stands after {len(lines)} lines"
    text = "\n".join(lines)
    assert text.count("gone") > 0
    assert all(text.count(f"line {number}\n") == 1 for number in range(LINES))
    assert text.count("begun") == text.count("and ended") == LINES

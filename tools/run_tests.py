"""``make test``: the tests in several runs of pytest side by side, with the arguments given.

Each run has its own TMPDIR, reaper and eye on what is left behind; they share the test files (``tests/share.py``).
Their lines come as they are complete; failures and summaries when all have ended. Exit status: pytest's.
``SLLM_TEST_RUNS``: how many, 1 to 3; else three where there is memory for them, and two where there is not.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[1]
NO_TESTS: Final = 5
HANDED_ON: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
RUNS: Final = "SLLM_TEST_RUNS"
EACH_BYTES: Final = 3 << 30
"""What a run may take with the platforms that its tests start."""
FEWEST: Final = 2
"""Where memory is short, or not told. One alone would leave half of two processors idle."""
MEMINFO: Final = Path("/proc/meminfo")
ENDS: Final = ("front", "back", "front")
"""Where each takes its files from. In front stand tests of whole platforms, which wait as much as they work."""
_SECTION: Final = re.compile(rb"(?:\x1b\[[\d;]*m)*=+ (?!test session starts)")
_ENDED: Final = re.compile(rb"\d+ \w+.* in [\d.]+s\b")
_COUNTS: Final = re.compile(rb"(\d+) (passed|failed|error|skipped)")


@dataclass
class Run:
    """One pytest process, and what it has said that is not yet shown."""

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    partial: bytes = b""
    held: list[bytes] = field(default_factory=list)
    counts: bytes = b""
    """pytest's last words; what a child of a session says when it ends may follow them."""

    def read(self) -> bool:
        """Show the lines that have come, or hold them once its reports have begun; False at its end."""
        data = os.read(self.out.fileno(), 1 << 16)
        *lines, self.partial = (self.partial + (data or b"\n")).split(b"\n")
        for line in lines:
            self.counts = line if _ENDED.search(line) else self.counts
            if self.held or _SECTION.match(line):
                self.held.append(line)
            elif line:
                show(line)
        return bool(data)


def show(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def start(share: str, arguments: list[str]) -> Run:
    """Begin one run, which takes test files as ``share`` says."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.share", "-p", "no:cacheprovider", *arguments]
    if sys.stdout.isatty():
        command.insert(3, "--color=yes")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"SLLM_TEST_SHARE": share},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    return Run(process, process.stdout)


def available() -> int:
    """Bytes of memory that programs may still take; 0 where the system does not tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def usual(memory: int) -> str:
    """How many runs where nobody says it, by the bytes of memory that are available."""
    return str(max(FEWEST, min(len(ENDS), memory // EACH_BYTES)))


def ends(asked: str) -> tuple[str, ...]:
    """Where each of so many runs takes its files from. Raises ``ValueError``."""
    if asked not in map(str, range(1, len(ENDS) + 1)):
        raise ValueError(f"{RUNS}={asked}: 1 to {len(ENDS)} runs are possible")
    return ENDS[: int(asked)]


def follow(runs: list[Run]) -> None:
    """Until all have ended."""
    with selectors.DefaultSelector() as selector:
        for run in runs:
            selector.register(run.out, selectors.EVENT_READ, run)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.out.close()


def total(runs: list[Run]) -> bytes:
    """The counts of all runs together."""
    counts: dict[bytes, int] = {}
    for run in runs:
        for number, word in _COUNTS.findall(run.counts):
            counts[word] = counts.get(word, 0) + int(number)
    return b", ".join(b"%d %s" % (number, word) for word, number in counts.items()) or b"no tests ran"


def main(arguments: list[str]) -> int:
    runs: list[Run] = []
    wanted = ends(os.environ.get(RUNS) or usual(available()))

    def hand_on(number: int, _: FrameType | None) -> None:
        for run in runs:
            run.process.send_signal(number)

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the runs as well
    with tempfile.TemporaryDirectory(prefix="sllm-share-") as claims:
        for end in wanted:
            runs.append(start(f"{claims}:{end}", arguments))
        follow(runs)
        codes = [run.process.wait() for run in runs]
    for line in (line for run in runs for line in run.held):
        show(line)
    show(b"all runs: " + total(runs))
    return next((code for code in codes if code not in (0, NO_TESTS)), min(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

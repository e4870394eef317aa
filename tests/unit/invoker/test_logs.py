"""The files that functions' lines go to."""

import asyncio
import fcntl
import json
import os
import sys
import termios
from pathlib import Path

import msgspec
import pytest

from sllm_invoker import exits, logs
from sllm_invoker.lines import LINE_BYTES
from sllm_invoker.logs import BURST_LINES, TAIL_LINES, InstanceLog, LogSink, PipeReader, Writer
from sllm_invoker.sandbox import Exit
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol.events import LogRecord
from tests.fixtures.waiting import until


def record(function: str, text: str) -> LogRecord:
    return LogRecord(at=1.0, function=function, version=1, instance="i", node="n1", stream="stdout", text=text)


async def nobody(_: LogRecord) -> None:
    """Publishes nothing."""


def test_few_files_are_open_however_many_functions_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "OPEN_FILES", 3)
    before = len(os.listdir("/proc/self/fd"))
    sink = LogSink(tmp_path / "logs", nobody)
    for turn in range(2):
        for number in range(20):
            sink.add(record("often", f"{turn} {number}"))
            sink.add(record(f"f{number}", f"turn {turn}"))
            assert len(os.listdir("/proc/self/fd")) <= before + 3
    sink.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert texts(tmp_path / "logs" / "often.jsonl") == [f"{turn} {number}" for turn in range(2) for number in range(20)]
    for number in range(20):
        assert texts(tmp_path / "logs" / f"f{number}.jsonl") == ["turn 0", "turn 1"]


async def test_what_waits_for_a_bus_that_is_away_is_bounded_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[LogRecord] = []

    async def publish(line: LogRecord) -> None:
        published.append(line)

    monkeypatch.setattr(logs, "MAX_WAITING_BYTES", 10_000)
    sink = LogSink(tmp_path, publish)
    for _ in range(2):
        for _ in range(30):
            sink.add(record("f", "x" * 1000))
        assert len(sink._waiting) == 10
        running = asyncio.create_task(sink.run())
        await until(lambda: not sink._waiting, what="they are published")
        await end((running,))
    assert len(published) == 20
    sink.close()


def texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


class Kept(LogSink):
    """In memory, and in no file."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), nobody)
        self.records: list[LogRecord] = []

    def add(self, record: LogRecord) -> None:
        self.records.append(record)


class Counting(InstanceLog):
    """Counts the lines that it is given to look at."""

    looked = 0

    def line(self, stream: str, text: str, *, level: str = "info", call: str | None = None) -> None:
        self.looked += 1
        super().line(stream, text, level=level, call=call)


async def test_lines_that_cannot_pass_cost_their_count_alone() -> None:
    """A pipe full of empty lines, again and again: each that is looked at is time of every stream of the node."""
    sink = Kept()
    log = Counting(Writer("f", 1, "i", "n1"), sink, lambda: 0.0, lambda: 1.0)
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    reader = PipeReader(ours, log, "stderr")
    written = 0
    for _ in range(3):
        written += os.write(theirs, b"\n" * 60_000)
        await until(lambda: unread(ours) == 0)
    written += os.write(theirs, b"\n" * 59_998 + b"last\n\n")  # what a worker has written that was killed
    written -= len("last")
    os.close(theirs)
    reader.stop()
    os.close(ours)
    log.close()
    assert len(sink.records) == BURST_LINES + 1
    assert sum(record.dropped for record in sink.records) == written - BURST_LINES
    assert list(log.tail) == [*[""] * (TAIL_LINES - 2), "last", ""]
    assert log.looked < 2 * BURST_LINES


def test_what_a_call_was_told_that_ended_is_no_last_word_of_its_instance() -> None:
    """One call runs out of memory, and its caller hears that; an hour later the worker dies in another one."""
    log = InstanceLog(Writer("f", 1, "i", "n1"), Kept(), lambda: 0.0, lambda: 1.0)
    log.line("stderr", "Traceback\n  File x\nMemoryError", level="error", call="call-1")
    log.line("stderr", "by the function itself")
    end = Exit(7)
    assert exits.lack_of_memory(end, list(log.tail), False, 2**28) is exits.Lack.NO
    assert list(log.tail) == ["by the function itself"]


def test_a_traceback_counts_as_a_line_more_for_each_eight_kibibytes() -> None:
    """Else a function that raises all the while has sixteen times the bytes of one that prints."""
    sink = Kept()
    log = InstanceLog(Writer("f", 1, "i", "n1"), sink, lambda: 0.0, lambda: 1.0)
    for _ in range(2000):
        log.line("stderr", "x" * 128 * 1024)
    assert len(sink.records) == 2000 // 17


async def test_the_rest_of_a_long_line_costs_few_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped, however many lines may pass."""
    sink, turns = Kept(), list[int]()
    read = PipeReader._read

    def counted(reader: PipeReader) -> int:
        turns.append(1)
        return read(reader)

    monkeypatch.setattr(PipeReader, "_read", counted)
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    reader = PipeReader(ours, InstanceLog(Writer("f", 1, "i", "n1"), sink, lambda: 0.0, lambda: 1.0), "stdout")
    os.write(theirs, b"x" * 2 * LINE_BYTES)
    await until(lambda: unread(ours) == 0)
    turns.clear()
    for _ in range(20):
        os.write(theirs, b"x" * 60_000)
        await until(lambda: unread(ours) == 0)
    assert len(turns) <= 40
    os.write(theirs, b"x\nnext\n")
    os.close(theirs)
    reader.stop()
    os.close(ours)
    assert [len(record.text) for record in sink.records] == [LINE_BYTES + 1, len("next")]


def unread(pipe: int) -> int:
    """Bytes in ``pipe``."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_file_that_cannot_be_written_is_said_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not each line, with its text, on the disk that is full."""
    sink = LogSink(tmp_path, nobody)
    before = len(os.listdir("/proc/self/fd"))
    full = tmp_path / "f.jsonl"
    full.symlink_to("/dev/full")
    for second in range(2 * 60):
        sink.add(msgspec.structs.replace(record("f", "a line"), at=float(second)))
        sink.add(msgspec.structs.replace(record("other", str(second)), at=float(second)))
    assert caplog.text.count("log of function f cannot be written: [Errno 28]") == 2
    assert capfd.readouterr().err == ""
    full.unlink()
    sink.add(record("f", "there is room again"))
    sink.close()
    assert texts(full) == ["there is room again"]
    assert len(texts(tmp_path / "other.jsonl")) == 2 * 60
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_line_behind_those_that_a_bus_that_is_away_cost_says_how_many_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To who follows the stream: in the node's own log it is seen by nobody who has the function."""
    published: list[LogRecord] = []

    async def publish(line: LogRecord) -> None:
        published.append(line)

    monkeypatch.setattr(logs, "MAX_WAITING", 10)
    sink = LogSink(tmp_path, publish)
    for number in range(13):
        sink.add(record("f", f"{number}"))
    sink.add(record("g", "of another function, lost too"))
    running = asyncio.create_task(sink.run())
    await until(lambda: len(published) == 10, what="the bus is back")
    for function in ("f", "g", "f"):
        sink.add(record(function, "after"))
    await until(lambda: len(published) == 13)
    await end((running,))
    sink.close()
    assert [(each.function, each.dropped) for each in published[10:]] == [("f", 3), ("g", 1), ("f", 0)]
    assert texts(tmp_path / "f.jsonl") == [*(f"{number}" for number in range(13)), "after", "after"]

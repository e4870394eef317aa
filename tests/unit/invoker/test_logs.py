"""The files that functions' lines go to."""

import json
import os
from pathlib import Path

import pytest

from sllm_invoker import logs
from sllm_invoker.logs import LogSink
from sllm_runtime.protocol.events import LogRecord


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


def texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]

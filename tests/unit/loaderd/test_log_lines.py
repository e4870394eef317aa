"""Log lines of the daemon are those of every other one (docs/platform.md, ``telemetry``; docs/gateway.md, traces)."""

import json
import logging
import os
from pathlib import Path

import pytest

from sllm_runtime.platform import trace
from tests.fixtures.loaderd import loaderd, programs, session, small_checkpoint

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def _lines(directory: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    checkpoint, _ = small_checkpoint(directory / "model")
    with programs():
        async with loaderd(directory) as daemon:
            with trace.within(TRACE):
                info = await daemon.control.register(str(checkpoint))
                async with session(daemon, info.model):
                    pass
    return capfd.readouterr().err.splitlines()


async def test_lines_that_are_of_a_start_have_the_id_of_its_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (line,) = [line for line in await _lines(tmp_path, capfd) if "may load" in line]
    assert "trace=4bf92f3577b34da6a3ce929d0e0e4736" in line


async def test_lines_are_json_where_that_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "SLLM_LOG_JSON", "1")
    found = [json.loads(line) for line in await _lines(tmp_path, capfd)]
    assert {(line["component"], line["identity"]) for line in found} == {("loaderd", "test")}


async def test_no_more_is_said_than_what_the_level_asks_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "SLLM_LOG_LEVEL", logging.getLevelName(logging.ERROR))
    assert await _lines(tmp_path, capfd) == []

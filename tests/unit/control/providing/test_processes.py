"""Nodes that are processes, on a disk that is full."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sllm_runtime.control.providing.processes import Processes
from sllm_runtime.control.providing.provider import Shape
from sllm_runtime.platform import spawned
from sllm_runtime.platform.nats_server import write_private
from sllm_runtime.protocol.errors import SllmError
from tests.fixtures.waiting import until


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Of which each only sleeps."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    made = Processes(tmp_path / "data" / "pool", Shape(cpu=1.0, memory=2**30), 0, 1, dict(os.environ))
    yield made
    for child in made._children:
        child.kill()
        child.wait()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    real, is_full = write_private, [False]

    def write(path: Path, text: str) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, text)

    monkeypatch.setattr(spawned, "write_private", write)
    return is_full


def running(made: Processes) -> int:
    return sum(child.poll() is None for child in made._children)


async def test_a_node_that_cannot_be_recorded_does_not_run(processes: Processes, full: list[bool]) -> None:
    """Nobody would count it, remove it, or end it with the platform; and the next one has its name, and its data."""
    full[0] = True
    with pytest.raises((OSError, SllmError)):
        await processes.set_desired(1)
    assert running(processes) == (await processes.capacity()).desired == 0
    full[0] = False
    await processes.set_desired(1)
    assert running(processes) == (await processes.capacity()).desired == 1


async def test_nodes_end_with_the_platform_on_a_full_disk(
    processes: Processes, full: list[bool], tmp_path: Path
) -> None:
    await processes.set_desired(1)
    (each,) = spawned.spawned(tmp_path / "data" / "pool").values()
    await until(lambda: psutil.Process(each.pid).name() == "sleep", what="it runs")
    full[0] = True
    await spawned.end_all(tmp_path / "data" / "pool", 20.0)
    await until(lambda: not running(processes), what="it has ended")


def test_what_the_operator_hides_is_hidden_on_these_nodes_too(tmp_path: Path) -> None:
    """``SLLM_PRIVATE``, as on every node of ``sllm up``."""
    given = {"SLLM_PRIVATE": '["/keys"]'}
    made = Processes(tmp_path / "pool", Shape(cpu=1.0, memory=2**30), 0, 1, given)
    assert "/keys" in json.loads(made._environment_of("p1")["SLLM_PRIVATE"])

"""A process that is held at one speed of its disk, and let go."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.steady_disk import CONTROLLER, device, missing, throttled

RATE = 600 * 10**6


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    if reason := missing(tmp_path):
        pytest.skip(reason)
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def group(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if "blkio" in line.split(":")[1].split(","))


def test_a_process_has_only_so_much_of_its_disk_meanwhile(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    before = group(child.pid)
    with throttled(child.pid, tmp_path, RATE):
        inside = CONTROLLER / group(child.pid).lstrip("/")
        assert inside.name == f"sllm-steady-{os.getpid()}"
        assert (inside / "blkio.throttle.read_bps_device").read_text() == f"{device(tmp_path)} {RATE}\n"
    assert group(child.pid) == before
    assert not inside.exists()


def test_nothing_is_left_of_it_when_the_process_ends(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    with throttled(child.pid, tmp_path, RATE):
        inside = CONTROLLER / group(child.pid).lstrip("/")
        child.kill()
        child.wait()
    assert not inside.exists()


def test_where_it_cannot_be_done_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.steady_disk.CONTROLLER", tmp_path)
    assert "blkio" in missing(tmp_path)

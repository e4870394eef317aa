"""Loaderds that are forked: they are told of as programs are, and have no descriptor that a program would not have."""

import contextlib
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.fixtures.loaderd import loaderd, programs
from tests.fixtures.loaderd_nursery import Forked, Nursery
from tests.fixtures.waiting import GIVE_UP_S, until


def test_how_it_ended_is_told(nursery: Nursery, tmp_path: Path) -> None:
    ready, theirs = os.pipe()
    arguments = ["--node", "x", "--data", str(tmp_path), "--socket", str(tmp_path / "s"), "--pool-bytes", "-1"]
    with open(ready, "rb") as pipe:
        process = nursery.start(arguments, os.environ, theirs)
        os.close(theirs)
        assert pipe.read() == b"", "it never was"
    assert process.wait(GIVE_UP_S) == process.poll() == 2
    process.kill()  # nobody


async def test_one_that_is_killed(tmp_path: Path) -> None:
    async with loaderd(tmp_path) as daemon:
        assert isinstance(daemon.process, Forked)
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(0)
        daemon.process.kill()
        assert daemon.process.wait(GIVE_UP_S) == -signal.SIGKILL


async def test_it_has_the_descriptors_of_a_program(tmp_path: Path) -> None:
    async with loaderd(tmp_path / "one") as one, loaderd(tmp_path / "two") as two:
        with programs():
            async with loaderd(tmp_path / "three") as three:
                pids = [daemon.process.pid for daemon in (one, two, three)]
                # Each opens some a little after it serves: what it faults in beforehand.
                await until(lambda: len(set(map(kinds, pids))) == 1, what=lambda: str([*map(kinds, pids)]))


def kinds(pid: int) -> tuple[tuple[str, int], ...]:
    """What it has open, of files by their names alone."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(link))
    names = (Path(link).name if link.startswith("/") else link.partition(":")[0] for link in links)
    return tuple(sorted(Counter(names).items()))

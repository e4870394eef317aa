"""A directory that does not outlive its users, also when they are killed."""

import subprocess
import sys
from pathlib import Path

from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.scratch import scratch
from tests.fixtures.deployed import descendants, wait, wait_gone
from tests.fixtures.waiting import GIVE_UP_S

USER = """
import subprocess, sys
from sllm_runtime.platform.scratch import scratch
with scratch("x-") as made:
    (made.path / "file").touch()
    child = subprocess.Popen(["sleep", "600"], pass_fds=(made.held,), stdout=subprocess.DEVNULL)
    print(made.path, child.pid, flush=True)
    sys.stdin.read()
    child.kill()
    child.wait()
"""


def user() -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: "subprocess.Popen[str]") -> tuple[Path, int]:
    """The directory, and the process that inherited its descriptor."""
    assert process.stdout is not None
    path, child = process.stdout.readline().split()
    return Path(path), int(child)


def test_it_goes_with_its_block() -> None:
    with scratch("x-") as made:
        (made.path / "folder").mkdir()
        assert made.path.stat().st_mode & 0o777 == 0o700
    assert not made.path.exists()
    with user() as process:
        path, _ = told(process)
        assert (path / "file").exists()
        process.communicate()
        assert not path.exists()


def test_killed_it_goes_when_the_last_heir_has_ended() -> None:
    with user() as process:
        path, child = told(process)
        family = descendants(process.pid)
        assert len(family) == 2
        process.kill()
        process.wait(GIVE_UP_S)
        assert start_time(child) is not None
        assert (path / "file").exists(), "the child goes on"
        subprocess.run(["kill", "-9", str(child)], check=True)
        wait(lambda: not path.exists(), "the directory is gone")
        wait_gone(family)

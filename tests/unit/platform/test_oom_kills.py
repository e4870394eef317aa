"""The kernel's count of what it killed for memory, of both versions of control groups and of the machine."""

from pathlib import Path

import pytest

from sllm_runtime.platform import oom_kills

EVENTS = "low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(("name", "text"), [("memory.events", EVENTS), ("memory/memory.oom_control", CONTROL)])
def test_what_was_killed_in_a_container_is_read_in_it(tmp_path: Path, name: str, text: str) -> None:
    assert oom_kills.of_group(tmp_path) is None
    write(tmp_path / name, text)
    assert oom_kills.of_group(tmp_path) == 2


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/system.slice/a.service\n", "system.slice/a.service/memory.events", EVENTS),
        ("5:pids:/p\n4:memory:/a/b\n0::/\n", "memory/a/b/memory.oom_control", CONTROL),
        ("4:cpu,memory:/a\n", "memory/a/memory.oom_control", CONTROL),
        ("0::/\n", "memory.events", EVENTS),  # a namespace of control groups
    ],
)
def test_the_own_group_is_asked_before_the_machine(tmp_path: Path, own: str, file: str, text: str) -> None:
    groups, machine = write(tmp_path / "own", own), write(tmp_path / "vmstat", "nr_free_pages 5\noom_kill 9\n")
    assert oom_kills.nearest(tmp_path, groups, machine) == 9
    write(tmp_path / file, text)
    assert oom_kills.nearest(tmp_path, groups, machine) == 2


def test_a_kernel_that_tells_nothing_has_killed_nobody(tmp_path: Path) -> None:
    assert oom_kills.nearest(tmp_path, tmp_path / "own", tmp_path / "vmstat") == 0
    assert oom_kills.nearest(tmp_path, write(tmp_path / "own", "4:memory:/a\n"), write(tmp_path / "v", "x 1\n")) == 0


def test_this_kernel_is_understood() -> None:
    assert oom_kills.nearest() >= 0

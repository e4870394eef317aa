"""Process 1 of a container, with a socket for an invoker and no container: what it says, and whom it outlives."""

import signal
from pathlib import Path

import pytest

from sllm_runtime.worker import container

KILLED, EXITED_3 = signal.SIGKILL.value, 3 << 8


@pytest.mark.parametrize(
    ("status", "kills", "code", "number", "memory"),
    [(0, 0, 0, 0, False), (EXITED_3, 1, 3, 0, False), (KILLED, 0, 0, 9, False), (KILLED, 1, 0, 9, True)],
)
def test_how_a_worker_ended_is_reported(status: int, kills: int, code: int, number: int, memory: bool) -> None:
    told = container.report("sb-1", status, kills)
    assert (told.sandbox, told.code, told.signal, told.out_of_memory) == ("sb-1", code, number, memory)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n"),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_what_the_kernel_killed_is_read_of_both_versions_of_control_groups(
    tmp_path: Path, name: str, text: str
) -> None:
    assert container.oom_kills(tmp_path) == 0
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert container.oom_kills(tmp_path) == 2

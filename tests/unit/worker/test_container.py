"""Process 1 of a container, with a socket for an invoker and no container: what it says, and whom it outlives."""

import signal

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

"""Deaths in words."""

import signal

import pytest

from sllm_invoker import exits
from sllm_invoker.sandbox import Exit
from sllm_runtime.protocol.errors import InstanceLost, OutOfMemory, StartFailed

KILLED = Exit(0, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "tail", "kernel", "memory"),
    [
        (KILLED, [], True, True),
        (KILLED, [], False, False),
        (Exit(0, signal.SIGKILL, asked=True), [], True, False),
        (Exit(0, signal.SIGABRT), ["terminate called after throwing an instance of 'std::bad_alloc'"], False, True),
        (Exit(1), ["  File x", "MemoryError"], False, True),
        (Exit(1), ["ValueError: no such luck"], True, False),
        (Exit(0), ["MemoryError was caught"], False, False),
        (Exit(None), [], False, False),
    ],
)
def test_lack_of_memory_is_told_from_other_deaths(end: Exit, tail: list[str], kernel: bool, memory: bool) -> None:
    assert exits.for_lack_of_memory(end, tail, kernel) is memory
    error = exits.start_error("i-1", "import", end, tail, kernel, 2**30)
    assert type(error) is (OutOfMemory if memory else StartFailed)
    assert error.stage == "import"
    assert str(end) in error.message
    assert all(line in error.message for line in tail)
    lost = exits.lost_error("i-1", end, tail, kernel, 2**30)
    assert type(lost) is InstanceLost
    assert ("memory (limit 1.0 GiB)" in lost.message) is memory


@pytest.mark.parametrize("was", [True, False])
def test_a_container_knows_of_itself_whether_it_lacked_memory(was: bool) -> None:
    end = Exit(0, signal.SIGKILL, out_of_memory=was)
    assert exits.for_lack_of_memory(end, [], killed_for_memory=not was) is was


def test_how_it_ended_is_said() -> None:
    assert [str(end) for end in (Exit(3), Exit(0, 11), Exit(None), Exit(0, 200))] == [
        "exit code 3",
        "signal 11 (SIGSEGV)",
        "an unknown cause",
        "signal 200 (unknown)",
    ]


def test_the_kernel_counts_what_it_killed() -> None:
    assert exits.oom_kills() >= 0

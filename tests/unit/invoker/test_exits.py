"""Deaths in words."""

import signal

import pytest

from sllm_invoker import exits
from sllm_invoker.exits import Lack
from sllm_invoker.sandbox import Exit
from sllm_runtime.protocol.errors import InstanceLost, OutOfMemory, StartFailed

LIMIT = 2**30
KILLED = Exit(0, signal.SIGKILL)
FULL = Exit(0, signal.SIGKILL, peak=LIMIT)
ALLOC = "terminate called after throwing an instance of 'std::bad_alloc'"


@pytest.mark.parametrize(
    ("end", "tail", "kernel", "lack"),
    [
        # A process that was killed while the kernel killed somebody: itself, if it had what it may have.
        (KILLED, [], False, Lack.NO),
        (KILLED, [], True, Lack.PERHAPS),
        (Exit(0, signal.SIGKILL, peak=LIMIT // 2), [], True, Lack.PERHAPS),
        (FULL, [], True, Lack.YES),
        (FULL, [], False, Lack.NO),
        (FULL, ["MemoryError"], False, Lack.NO),  # an earlier line, of something that was caught
        (Exit(0, signal.SIGKILL, asked=True, peak=LIMIT), [], True, Lack.NO),
        # One that ended in another way was killed by nobody.
        (Exit(0, signal.SIGSEGV, peak=LIMIT), [], True, Lack.NO),
        (Exit(1, peak=LIMIT), ["ValueError: no such luck"], True, Lack.NO),
        (Exit(None), [], True, Lack.NO),
        # A container knows, whatever the machine's kernel has done elsewhere.
        (Exit(0, signal.SIGKILL, out_of_memory=True), [], False, Lack.YES),
        (Exit(0, signal.SIGKILL, asked=True, out_of_memory=True), [], False, Lack.YES),
        (Exit(0, signal.SIGKILL, out_of_memory=False, peak=LIMIT), [], True, Lack.NO),
        (Exit(1, out_of_memory=False), ["MemoryError"], True, Lack.YES),
        # Its own words.
        (Exit(0, signal.SIGABRT), [ALLOC], False, Lack.YES),
        (Exit(1), ["  File x", "MemoryError"], False, Lack.YES),
        (Exit(0), ["MemoryError was caught"], False, Lack.NO),
    ],
)
def test_lack_of_memory_is_told_from_other_deaths(end: Exit, tail: list[str], kernel: bool, lack: Lack) -> None:
    assert exits.lack_of_memory(end, tail, kernel, LIMIT) is lack
    error = exits.start_error("i-1", "import", end, tail, kernel, LIMIT)
    assert type(error) is (OutOfMemory if lack is Lack.YES else StartFailed)
    assert error.stage == "import"
    assert str(end) in error.message
    assert all(line in error.message for line in tail)
    lost = exits.lost_error("i-1", end, tail, kernel, LIMIT)
    assert type(lost) is InstanceLost
    for message in (error.message, lost.message):
        assert ("ran out of memory" in message) is (lack is Lack.YES)
        assert ("for lack of memory, perhaps this one" in message) is (lack is Lack.PERHAPS)
    assert ("memory (limit 1.0 GiB)" in lost.message) is (lack is Lack.YES)
    assert ("Raise `memory`" in lost.message) is (lack is Lack.YES), "the same call needs as much again"


def test_how_it_ended_is_said() -> None:
    assert [str(end) for end in (Exit(3), Exit(0, 11), Exit(None), Exit(0, 200))] == [
        "exit code 3",
        "signal 11 (SIGSEGV)",
        "an unknown cause",
        "signal 200 (unknown)",
    ]

"""What those who wait for an instance are told when it does not get on."""

import os
import signal
import subprocess
import sys

import pytest

from sllm_invoker import verdicts
from sllm_invoker.sandbox import Exit
from sllm_invoker.verdicts import Verdict
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.invoker import order

ORDER = order(memory=64 * 2**20, startup_timeout=7.0)
NEVER_READY = verdicts.start_timeout(ORDER, "import", "", False)
SHORT_AT_START = verdicts.start_timeout(ORDER, "import", "", True)
SILENT, SHORT = (verdicts.silent(ORDER, short) for short in (False, True))


@pytest.mark.parametrize(
    ("verdict", "state", "code", "words"),
    [
        (NEVER_READY, "FAILED", "start_timeout", ["not ready within 7 s", "it hangs in stage import"]),
        (SHORT_AT_START, "FAILED", "out_of_memory", ["in stage import (limit 64.0 MiB)", "not ready within 7 s"]),
        (SILENT, "LOST", "instance_lost", ["no sign of life for 5 s and was killed; call again"]),
        (SHORT, "LOST", "instance_lost", ["ran out of memory (limit 64.0 MiB)", "no sign of life for 5 s"]),
    ],
)
def test_who_has_used_up_its_memory_is_told_so(verdict: Verdict, state: str, code: str, words: list[str]) -> None:
    assert verdict.state is InstanceState[state]
    assert verdict.calls is verdict.error
    assert verdict.error is not None
    assert verdict.error.code == code
    assert verdict.error.stage == ("import" if state == "FAILED" else None)
    assert all(each in verdict.error.message for each in words)
    assert ("Raise `memory` of the function" in verdict.error.message) is (verdict in (SHORT, SHORT_AT_START))


@pytest.mark.parametrize(
    ("end", "for_memory", "code"),
    [
        (Exit(None, orphaned=True), False, "instance_lost"),
        (Exit(None, orphaned=True), True, "start_failed"),
        (Exit(None), False, "start_failed"),
        (Exit(0, 9), False, "start_failed"),
    ],
)
def test_a_start_whose_fork_server_ended_says_nothing_of_its_function(end: Exit, for_memory: bool, code: str) -> None:
    """Unless the kernel has just killed for memory: it may have been what this start took."""
    verdict = verdicts.died_at_start(ORDER, "import", end, [], for_memory)
    assert verdict.error is not None
    assert (verdict.state, verdict.error.code, verdict.error.stage) == (InstanceState.FAILED, code, "import")


def test_an_instance_that_went_with_its_fork_server_is_told_so_and_that_the_kernel_has_killed_for_memory() -> None:
    """As a start is: whoever reads "an unknown cause" looks in his function for what the node lacks."""
    verdict = verdicts.died(ORDER, Exit(None, orphaned=True), [], for_memory=True)
    assert verdict.error is not None
    assert (verdict.state, verdict.error.code) == (InstanceState.LOST, "instance_lost")
    assert "fork server ended" in verdict.error.message
    assert "for lack of memory" in verdict.error.message
    quiet = verdicts.died(ORDER, Exit(None, orphaned=True), [], for_memory=False)
    assert quiet.error is not None
    assert "memory" not in quiet.error.message


def peak_of_one_that_reads(nbytes: int) -> int:
    """Bytes that the kernel says a process had at its most which has read so many of somebody else's memory file."""
    fd = os.memfd_create("weights")
    os.ftruncate(fd, nbytes)
    code = f"import mmap; m = mmap.mmap({fd}, {nbytes}, prot=mmap.PROT_READ); sum(m[::4096])"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], pass_fds=(fd,))
    os.close(fd)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = status
    return used.ru_maxrss * 1024


def test_weights_that_it_shares_are_no_memory_that_it_has_used_up() -> None:
    """Whom the kernel takes when a neighbour has used up the machine's memory is the one with most pages."""
    weights, memory = 10 * 2**30, 2**30
    model = ModelRecord(digest="sha256:0", uri="/m", nbytes=weights, partitions=(weights,))
    asked = order(memory=memory, model=model)
    assert peak_of_one_that_reads(2**26) > 2**26, "the kernel counts the pages of a memory file"
    innocent = Exit(0, signal.SIGKILL, peak=weights + memory // 4)
    guilty = Exit(0, signal.SIGKILL, peak=weights + memory)
    lost, start = verdicts.died(asked, innocent, [], True), verdicts.died_at_start(asked, "setup", innocent, [], True)
    for verdict in (lost, start):
        assert verdict.error is not None
        assert "ran out of memory" not in verdict.error.message
        assert "perhaps this one" in verdict.error.message
    assert start.error is not None
    assert start.error.code == "start_failed"
    whose = verdicts.died_at_start(asked, "setup", guilty, [], True).error
    assert whose is not None
    assert whose.code == "out_of_memory"

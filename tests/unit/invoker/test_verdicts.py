"""What those who wait for an instance are told when it does not get on."""

import pytest

from sllm_invoker import verdicts
from sllm_invoker.sandbox import Exit
from sllm_invoker.verdicts import Verdict
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

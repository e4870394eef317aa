"""When a request is sent again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm.retry import NEVER, Retry
from sllm_runtime.protocol.errors import BY_CODE, NEVER_RAN, InstanceLost, InternalError, QueueFull


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_a_call_is_sent_again_only_where_it_never_ran(code: str) -> None:
    problem = BY_CODE[code]("x")
    assert (Retry().wait(1, problem, repeatable=False) is not None) == (code in NEVER_RAN)
    assert (Retry().wait(1, problem, repeatable=True) is not None) == problem.retryable


def test_what_never_ran_is_known_to_be_retryable() -> None:
    assert all(BY_CODE[code].retryable for code in NEVER_RAN)


def test_a_lost_instance_may_have_done_the_work() -> None:
    assert Retry().wait(1, InstanceLost("x"), repeatable=False) is None


@given(st.integers(1, 20), st.floats(0, 1))
def test_waits_grow_up_to_the_cap(attempt: int, chance: float) -> None:
    policy = Retry(attempts=99, base_s=0.1, cap_s=5.0, rand=lambda: chance)
    wait = policy.wait(attempt, QueueFull("x"), repeatable=False)
    assert wait is not None
    assert 0.05 <= wait <= 5.0


def test_retry_after_is_kept_and_a_long_one_is_the_callers_to_decide() -> None:
    policy = Retry(rand=lambda: 0.0)
    assert policy.wait(1, QueueFull("x", retry_after_s=2.0), repeatable=False) == 2.0
    assert policy.wait(1, QueueFull("x", retry_after_s=60.0), repeatable=False) is None


def test_it_ends() -> None:
    assert Retry(attempts=3).wait(3, QueueFull("x"), repeatable=True) is None
    assert NEVER.wait(1, QueueFull("x"), repeatable=True) is None
    assert Retry().wait(1, InternalError("x"), repeatable=True) is None

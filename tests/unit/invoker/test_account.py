"""What an instance tells of itself."""

from __future__ import annotations

import pytest

from sllm_invoker.account import Account
from sllm_runtime.protocol.limits import MAX_PROOF, PROOF_S
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.worker import Ready
from tests.fixtures.invoker import order


@pytest.mark.parametrize(
    ("proof", "after_s", "told"),
    [
        ("found", 0.0, "found"),
        ("found", PROOF_S - 0.1, "found"),
        ("found", PROOF_S, ""),
        ("x" * (MAX_PROOF + 1), 0.0, ""),
        ("", 0.0, ""),
    ],
)
def test_a_proof_is_told_for_a_while(proof: str, after_s: float, told: str) -> None:
    account = Account(order("i1"))
    account.ready(Ready(proof=proof), 100.0)
    assert account.status(InstanceState.READY, None, 100.0 + after_s).proof == told

"""What another call ended with, while this function starts: here and deployed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sllm.cli.load import one as find
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.worker.calls import described
from sllm_runtime.worker.local import run_local
from tests.unit.worker.harness import Worker, bundle_of, manifest

SAYS = """
import os
from sllm import model_function
from sllm_runtime.protocol.errors import ErrorBody

@model_function
class Fn:
    def setup(self) -> None:
        raise ErrorBody(code="out_of_memory", message="the function ran out of memory during setup (RuntimeError: "
            "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "17179869184 bytes); raise memory=... in @model_function").to_error()

    def __call__(self) -> int:
        return 1
"""

AWAY = SAYS.replace('"out_of_memory"', '"unavailable"')


def test_anothers_lack_of_memory_is_not_this_ones(worker: Worker, tmp_path: Path) -> None:
    error = worker.fail(manifest("user:Fn", "class"), bundle_of({"user.py": SAYS}), workdir=tmp_path)
    assert error.code == "start_failed", error.message


def test_what_setup_raises_here_is_what_it_raised(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(AWAY)
    with pytest.raises(Unavailable):
        run_local(find(f"{tmp_path / 'user.py'}::Fn"), {})


WRAPS = SAYS.replace("def setup(self) -> None:\n        raise", "def __call__(self) -> int:\n        other =").replace(
    """.to_error()

    def __call__(self) -> int:
        return 1
""",
    """.to_error()
        try:
            raise other
        except Exception as error:
            raise RuntimeError(f"embedding failed: {error}") from error
""",
)


def test_anothers_lack_of_memory_is_not_this_ones_in_a_call(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest("user:Fn", "class"), bundle_of({"user.py": WRAPS}), workdir=tmp_path)
    message = worker.run({}).error.message
    assert message.startswith("RuntimeError: embedding failed")
    assert message.count("raise memory=") == 1, "what the other one said"


def test_who_speaks_of_memory_does_not_lack_it() -> None:
    assert "raise memory=" not in described(ValueError("no machine fits: not enough memory slots")).message


NO_ROOM = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"


@pytest.mark.parametrize(
    "begins",
    [
        "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript:\n",
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n",
    ],
)
def test_torchs_lack_of_memory_is_known_where_torch_hands_it_on(begins: str) -> None:
    assert "raise memory=" in described(RuntimeError(begins + NO_ROOM)).message
    assert "raise memory=" not in described(RuntimeError(f"embedding failed: {begins}{NO_ROOM}")).message

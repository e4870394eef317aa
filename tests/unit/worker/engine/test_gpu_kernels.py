"""The exact kernels: on any machine in Triton's interpreter, on a GPU themselves. The checks are a program of their own
(``tests.fixtures.gpu_kernels``), since Triton reads whether it interprets when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PATIENCE_S = 280
CHECKS = [
    "a_linear_layer_is_the_sum",
    "a_row_of_a_linear_layer_is_its_own",
    "an_adapter_is_the_sum_and_its_rows_are_their_own",
    "norms_are_those_of_float64",
    "a_row_of_a_norm_is_its_own",
    "keys_and_values_go_where_their_slots_say",
    "attention_is_that_of_float64",
    "a_row_of_attention_is_its_own",
    "what_a_window_hides_is_not_looked_at",
    "no_rows_are_no_work",
]
QUICK = ["keys_and_values_go_where_their_slots_say", "a_row_of_a_norm_is_its_own", "no_rows_are_no_work"]
everywhere = pytest.mark.parametrize("check", CHECKS)


@cache
def _found(device: str, *checks: str) -> dict[str, str | None]:
    """What each check found (all, unless some are named), by name; None: nothing."""
    own = {"TRITON_INTERPRET": "1" if device == "cpu" else "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if device == "cpu":  # numpy multiplies, on some processors by kernels in which a row has not its own bits
        own["OPENBLAS_CORETYPE"] = "Prescott"
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.gpu_kernels", device, *checks],
        cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("check", QUICK)
def test_some_interpreted(check: str) -> None:
    wrong = _found("cpu", *QUICK)[check]
    assert wrong is None, wrong


@pytest.mark.slow
def test_every_check_is_run() -> None:
    assert list(_found("cpu")) == CHECKS


@pytest.mark.slow
@everywhere
def test_interpreted(check: str) -> None:
    wrong = _found("cpu")[check]
    assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shared"), [(80, 166_912), (90, 232_448)])
def test_each_is_compiled_once_for_any_rows(arch: int, shared: int, tmp_path: Path) -> None:
    """Another variant could have its sums in another order. ``shared``: bytes that a block of such a GPU may have."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.gpu_variants", str(arch)],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 15
    for name, dtype, variants, needed, tf32 in made:
        assert variants == 1, (name, dtype)
        assert needed <= shared, (name, dtype)
        assert not tf32, (name, dtype)


def test_what_triton_finds_out_in_each_process_can_be_found_out_before_a_fork() -> None:
    """And no CUDA with it, of which nothing outlives one."""
    code = (
        "from triton.runtime.cache import triton_key\n"
        "import torch\n"
        "from sllm_runtime.worker.engine.ours.gpu.exact import KERNELS, prime\n"
        "assert not triton_key.cache_info().currsize and not any(kernel.hash for kernel in KERNELS)\n"
        "prime()\n"
        "assert triton_key.cache_info().currsize and all(kernel.hash for kernel in KERNELS)\n"
        "assert not torch.cuda.is_initialized()\n"
        "import os; assert len(os.listdir('/proc/self/task')) == 1, 'a fork copies one thread'\n"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@everywhere
def test_on_a_gpu(check: str) -> None:
    wrong = _found("cuda")[check]
    assert wrong is None, wrong

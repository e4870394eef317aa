"""Models of ours over the exact kernels, in Triton's interpreter (a process of its own: see ``test_gpu_kernels``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PATIENCE_S = 840
SIZES = [("llama", 7), ("gemma 2", 131), ("falcon 40b", 9), ("mixtral", 9), ("gpt 2", 9), ("qwen 3", 9)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "count"), SIZES)
def test_logits_are_those_of_the_cpu_however_a_text_is_cut(family: str, count: int) -> None:
    # The interpreter multiplies by numpy, whose kernels for AVX2 add up in another order for another number of rows.
    blas = {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    own = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **blas}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.gpu_engine", family, str(count)],
        cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["off"] <= 1e-4
    assert found["equal"]

"""Products by tiles are those of exact arithmetic, rounded once; for any shape, and in its own place alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.worker.engine.ours.kernels.loaded import kernels
from sllm_runtime.worker.engine.ours.model.tiled import Scratch, Tiled

pytestmark = pytest.mark.skipif(not kernels().tiles, reason="this processor has no tiles of bfloat16")

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
DTYPES = [(BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)]
"""Of rows and of results."""
sizes = st.integers(1, 70)


def whole(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Small whole numbers: their products and sums are exact in float32."""
    return torch.randint(-8, 9, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()


def tiled(weight: torch.Tensor) -> Tiled:
    room = Scratch()
    found = Tiled.of(weight.to(BFLOAT16), room)
    assert found is not None
    return found


@given(rows=sizes, outputs=sizes, half=sizes, dtypes=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_any_shape(rows: int, outputs: int, half: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int) -> None:
    x, weight = whole(rows, 2 * half, seed), whole(outputs, 2 * half, seed + 1)
    out = torch.full((rows + 2, outputs + 5), 7.0, dtype=dtypes[1])
    product = tiled(weight)
    product(x.to(dtypes[0]), out[1:-1], 3, None)
    assert torch.equal(out[1:-1, 3:-2], (x @ weight.t()).to(dtypes[1]))
    out[1:-1, 3:-2] = 7
    assert bool((out == 7).all()), "somebody else's place was written to"
    residual = whole(rows + 2, outputs + 5, seed + 2).to(dtypes[1])
    product(x.to(dtypes[0]), out[1:-1], 3, residual[1:-1])
    rounded = (x @ weight.t()).to(dtypes[1]).float()
    assert torch.equal(out[1:-1, 3:-2], (residual[1:-1, 3:-2].float() + rounded).to(dtypes[1]))


@given(rows=sizes, at=sizes, half=sizes)
def test_a_broken_row_breaks_no_other(rows: int, at: int, half: int) -> None:
    x, weight = whole(rows, 2 * half, 1).to(BFLOAT16), whole(20, 2 * half, 2)
    x[at % rows, half] = float("nan")
    out = torch.empty(rows, 20)
    tiled(weight)(x, out, 0, None)
    broken = out.isnan()
    assert bool(broken[at % rows].all())
    assert int(broken.any(1).sum()) == 1


def test_rows_in_float32_are_rounded_to_the_nearest() -> None:
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    x[0, :3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.3e38])
    product = tiled(torch.eye(96))
    found, wanted = (torch.empty(40, 96, dtype=BFLOAT16) for _ in range(2))
    product(x, found, 0, None)
    product(x.to(BFLOAT16), wanted, 0, None)
    assert torch.equal(found, wanted)


def test_what_is_not_taken() -> None:
    room, weight = Scratch(), torch.zeros(64, 64, dtype=BFLOAT16)
    assert Tiled.of(weight, room) is not None
    for each in (
        weight[:, 1:],
        weight.t()[:, ::2],
        weight.float(),
        weight[:, :33].contiguous(),
        weight.new_zeros(2, 5000),
    ):
        assert Tiled.of(each, room) is None

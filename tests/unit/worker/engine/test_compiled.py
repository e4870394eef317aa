"""Products by kernels of our own are those of exact arithmetic, rounded once; for any shape, each row by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.worker.engine.ours.kernels.loaded import kernels
from sllm_runtime.worker.engine.ours.kernels.shapes import SIDE
from sllm_runtime.worker.engine.ours.model import compiled as module
from sllm_runtime.worker.engine.ours.model.compiled import Compiled, Scratch
from sllm_runtime.worker.engine.ours.model.products import Products
from sllm_runtime.worker.engine.ours.numerics import FAST

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
HALVES = kernels().tiles or kernels().narrow
DTYPES = [(BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)] if HALVES else []
"""Of rows and of results, the matrix in bfloat16."""
KINDS = [(BFLOAT16, *each) for each in DTYPES] + ([(FLOAT32, FLOAT32, FLOAT32)] if kernels().wide else [])
"""Of the matrix, of rows, of results."""
MATRICES = list(dict.fromkeys(kind[0] for kind in KINDS))
sizes = st.integers(1, 70)


def whole(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Small whole numbers: their products and sums are exact in float32."""
    return torch.randint(-8, 9, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()


def compiled(weight: torch.Tensor) -> Compiled:
    found = Compiled.of(weight, Scratch())
    assert found is not None
    return found


@given(rows=sizes, outputs=st.integers(SIDE, 70), half=sizes, kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_any_shape(
    rows: int, outputs: int, half: int, kind: tuple[torch.dtype, torch.dtype, torch.dtype], seed: int
) -> None:
    """Also: nothing is written beside the product's own place."""
    x, weight = whole(rows, 2 * half, seed), whole(outputs, 2 * half, seed + 1)
    wanted = (x @ weight.t()).to(kind[2])
    out = torch.full((rows + 2, outputs + 5), 7.0, dtype=kind[2])
    product = compiled(weight.to(kind[0]))
    product(x.to(kind[1]), out[1:-1], 3, None)
    assert torch.equal(out[1:-1, 3:-2], wanted)
    residual = whole(rows + 2, outputs + 5, seed + 2).to(kind[2])
    product(x.to(kind[1]), out[1:-1], 3, residual[1:-1])
    assert torch.equal(out[1:-1, 3:-2], residual[1:-1, 3:-2] + wanted)
    out[1:-1, 3:-2] = 7
    assert bool((out == 7).all())


@pytest.mark.parametrize("dtype", MATRICES, ids=str)
@given(rows=sizes, outputs=st.integers(SIDE, 40), inputs=st.integers(1, 400), at=sizes)
def test_a_row_is_the_same_by_itself(dtype: torch.dtype, rows: int, outputs: int, inputs: int, at: int) -> None:
    """Whatever stands beside it: a row that is not a number breaks none."""
    inputs, at = inputs + inputs % 2, at % rows
    generator = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randn(count, inputs, generator=generator).to(dtype) for count in (rows, outputs))
    product, found, alone = compiled(weight), torch.empty(rows, outputs), torch.empty(1, outputs)
    product(x, found, 0, None)
    for row in range(rows):
        product(x[row : row + 1], alone, 0, None)
        assert torch.equal(alone[0], found[row])
    x[at, inputs // 2] = float("nan")
    product(x, again := torch.empty(rows, outputs), 0, None)
    assert bool(again[at].isnan().all())
    assert torch.equal(again[torch.arange(rows) != at], found[torch.arange(rows) != at])


@pytest.mark.skipif(not kernels().tiles, reason="this processor has no tiles of bfloat16")
def test_few_outputs_by_tiles() -> None:
    """Fewer than a tile has, which the others' are not."""
    for outputs in (1, 3, 15, 16, 17):
        x, weight = whole(5, 40, outputs), whole(outputs, 40, outputs)
        product, out = compiled(weight.to(BFLOAT16)), torch.empty(5, outputs)
        product(x.to(BFLOAT16), out, 0, None)
        assert torch.equal(out, x @ weight.t())


@pytest.mark.skipif(not HALVES, reason="this processor's products of bfloat16 are a library's")
def test_rows_in_float32_are_rounded_to_the_nearest() -> None:
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    x[0, :3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.3e38])
    product = compiled(torch.eye(96).to(BFLOAT16))
    found, wanted = (torch.empty(40, 96, dtype=BFLOAT16) for _ in range(2))
    product(x, found, 0, None)
    product(x.to(BFLOAT16), wanted, 0, None)
    assert torch.equal(found, wanted)
    assert torch.equal(found, x.to(BFLOAT16))


@pytest.mark.parametrize("dtype", MATRICES, ids=str)
def test_what_is_not_taken(dtype: torch.dtype) -> None:
    room, weight = Scratch(), torch.zeros(64, 64, dtype=dtype)
    assert Compiled.of(weight, room) is not None
    for each in (weight[:, 1:], weight.t()[:, ::2], weight.double(), weight.new_zeros(2, 5000)):
        assert Compiled.of(each, room) is None
    odd, few = weight[:, :33].contiguous(), weight[: SIDE - 1]
    tiled = dtype == BFLOAT16 and kernels().tiles
    assert (Compiled.of(odd, room) is None) is tiled
    assert (Compiled.of(few, room) is None) is not tiled


def test_where_the_processor_or_the_system_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = SimpleNamespace(tiles=False, wide=False, narrow=False)
    monkeypatch.setattr(module, "kernels", lambda: lacking)
    for dtype in (BFLOAT16, FLOAT32):
        assert Compiled.of(torch.zeros(64, 64, dtype=dtype), Scratch()) is None


def test_a_model_has_them_where_one_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products()
    for threads, own in ((1, True), (2, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        products.use(FAST, FLOAT32)
        assert products.compiled is own

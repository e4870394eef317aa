"""A row of a product has the same bits whatever the other rows, how many there are, and how the row lies in memory."""

from __future__ import annotations

import pytest
import torch

from sllm_runtime.worker.engine.ours.model import slabs, turned
from sllm_runtime.worker.engine.ours.model.backend import Rows
from sllm_runtime.worker.engine.ours.model.host import HostLinear
from sllm_runtime.worker.engine.ours.model.products import Products
from sllm_runtime.worker.engine.ours.numerics import LEVELS, Numerics

ROWS = (2, 4, 8, 10, 16, 18, 30, 32, 34, 48, 64, 66, 96, 128, 138, 256)
SHAPES = [(512, 256), (96, 256), (256, 704), (64, 1024), (512, 1024), (512, 2048), (64, 3000), (512, 5632), (64, 11008)]
"""(outputs, inputs)"""


def cancelling(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a matrix whose products sum to 0 by exact arithmetic: what comes out is what the order of the sum left,
    so another order gives other numbers nearly everywhere, and not one in 10,000 as with any numbers."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    matrix, x = (torch.randn(count, inputs // 2, generator=generator) for count in (outputs, rows))
    order = torch.randperm(inputs, generator=generator)
    matrix, x = torch.cat((matrix, -matrix), 1)[:, order], torch.cat((x, x), 1)[:, order]
    return x.to(dtype).contiguous(), matrix.to(dtype).contiguous()


def level(dtype: torch.dtype) -> Numerics:
    """The cheapest that is to hold here: the first one does in float32 where OpenBLAS has kernels for small products,
    and for small matrices, which ours take. (Which one does is found by ``selftest``.)"""
    return LEVELS[0] if dtype is torch.bfloat16 or slabs.available() else LEVELS[1]


def product(matrix: torch.Tensor, dtype: torch.dtype) -> HostLinear:
    products = Products()
    products.use(level(dtype), dtype)
    return HostLinear(products, [matrix], None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_is_the_same_among_any_number(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, matrix = cancelling(max(ROWS), outputs, inputs, dtype)
    linear = product(matrix, dtype)
    least = 2 if linear._own else level(dtype).rows
    with torch.inference_mode():
        few: Rows = torch.cat([linear(x[at : at + least]) for at in range(0, len(x), least)])
        parts = [linear.added(x[at : at + least], few[at : at + least]) for at in range(0, len(x), least)]
        added: Rows = torch.cat(parts)
        if linear._own or level(dtype) is LEVELS[0]:  # elsewhere torch adds while it multiplies
            assert torch.equal(added, few + few)
        for count in (each for each in ROWS if each % least == 0):
            assert torch.equal(linear(x[:count]), few[:count]), count
            if dtype is torch.bfloat16 and turned.available():  # what a turned product gives lies as its matrix does
                assert torch.equal(linear(x[:count].t().contiguous().t()), few[:count]), count
            assert torch.equal(linear.added(x[:count], few[:count]), added[:count]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_matrices_apart_give_what_they_give_side_by_side(dtype: torch.dtype) -> None:
    x, matrix = cancelling(40, 96, 256, dtype)
    products = Products()
    products.use(LEVELS[0], dtype)
    bias = torch.arange(96).to(dtype)
    with torch.inference_mode():
        apart = HostLinear(products, [matrix[:32].clone(), matrix[32:].clone()], bias, None)
        whole = product(matrix, dtype)
        for count in (2, 40):
            assert torch.equal(apart(x[:count]), whole(x[:count]) + bias)

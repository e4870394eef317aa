"""Adapters on an accelerator: rows of one step go through different ones, and none of them sees another.

A product with an adapter is two of the level's own products in float32, of the rows that go through it. In exact mode a
row's bits then depend on that row and its adapter alone, as everywhere; how many rows share the adapter, and which
others are in the step, changes nothing. That is shown for the shapes of each adapter when it is taken.
"""

from __future__ import annotations

from typing import Final

import torch

from sllm_runtime.worker.engine.ours.adapter import TILE, Adapter, LowRank
from sllm_runtime.worker.engine.ours.gpu.ops import Ops, Tensor

_MOVES: Final = (1, 5, 31)
_PARTS: Final = (slice(0, 1), slice(3, 8), slice(1, TILE))


def through(ops: Ops, half: LowRank, rows: Tensor, tile: int) -> Tensor:
    """What ``half`` makes of float32 ``rows``; by themselves, where ``tile`` is 1."""
    if tile > 1 or len(rows) == 1:
        return ops.linear(ops.linear(rows, half.a.t()), half.b.t())
    return torch.cat([through(ops, half, rows[at : at + 1], tile) for at in range(len(rows))])


def alike(ops: Ops, adapter: Adapter, device: torch.device) -> bool:
    """Whether a row has the same bits at any place, beside any others and with any number of them."""
    return all(_same_wherever(ops, half, device) for half in adapter.of_each_shape())


def _same_wherever(ops: Ops, half: LowRank, device: torch.device) -> bool:
    x = torch.randn(TILE, half.a.shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    whole = through(ops, half, x, TILE)
    moved = all(torch.equal(through(ops, half, x.roll(by, 0), TILE), whole.roll(by, 0)) for by in _MOVES)
    fewer = all(torch.equal(through(ops, half, x[rows], TILE), whole[rows]) for rows in _PARTS)
    return moved and fewer and torch.equal(through(ops, half, x.repeat(3, 1), TILE), whole.repeat(3, 1))

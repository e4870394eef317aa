"""Attention of decode rows of many sequences at once, whatever pages each has.

The pages are multiplied as one batch, in physical order where the pages in use lie close together, so that K and V are
not copied. A page that several sequences share is multiplied once with the queries of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sllm_runtime.worker.engine.ours.attention import Floats, Heads, Look, bent, mask_of, tiles
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows meet pages; indexes into flat rows. ``n`` pages, ``m`` queries for each page and KV head."""

    n: int
    m: int
    span: int
    """Pages of the longest row."""
    pages: slice | npt.NDArray[np.int64]
    to_pages: torch.Tensor
    """(n * kv * m) row of qkv (rows * (queries + 2 * kv)) that stands there."""
    to_rows: torch.Tensor
    """(rows * heads * span) row of the pages' scores that belongs there."""
    back: torch.Tensor
    """(n * kv * m) row of the probabilities (rows * heads * span) that stands there."""
    parts: torch.Tensor
    """(span * rows * heads) row of the pages' parts, the last one (zeros) where a row has no such page."""


def plan(tables: Sequence[Sequence[int]], heads: Heads, numerics: Numerics) -> Plan:
    """For the first rows of a step, whose pages are ``tables``."""
    rows, span = len(tables), max(map(len, tables))
    table = np.array([[*each, *[each[-1]] * (span - len(each))] for each in tables], dtype=np.int64)
    valid = np.arange(span) < np.array([[len(each)] for each in tables])
    used, _ = np.unique(table, return_counts=True)  # without counts it imports numpy.ma: 18 ms of a cold first token
    low, n = int(used[0]), int(used[-1] - used[0]) + 1
    dense = n <= 2 * len(used) + 2
    local = table - low if dense else np.searchsorted(used, table)
    n = n if dense else len(used)
    slot = np.where(valid, _ranks(local, valid, n), 0)
    slot = np.where(valid, slot, slot[np.arange(rows)[:, None], valid.sum(1, keepdims=True) - 1])
    group, kv = heads.group, heads.kv
    m = numerics.tiled((int(slot.max()) + 1) * group)
    # Axes: row, page of the row, KV head, query head of its group.
    at = (local[:, :, None, None] * kv + np.arange(kv)[:, None]) * m + slot[:, :, None, None] * group + np.arange(group)
    head = np.arange(kv)[:, None] * group + np.arange(group)
    row = np.arange(rows)[:, None, None, None]
    source = np.broadcast_to(row * (heads.queries + 2 * kv) + head, at.shape)
    result = np.broadcast_to(row * heads.queries + head, at.shape) * span
    page = np.arange(span)[None, :, None, None]
    to_pages = np.zeros(n * kv * m, dtype=np.int64)
    back = np.zeros(n * kv * m, dtype=np.int64)
    to_pages[at[valid]] = source[valid]
    back[at[valid]] = (result + page)[valid]
    parts = np.where(valid[:, :, None, None], at, n * kv * m).transpose(1, 0, 2, 3)
    return Plan(
        n, m, span,
        slice(low, low + n) if dense else used,
        torch.from_numpy(to_pages),
        torch.from_numpy(np.ascontiguousarray(at.transpose(0, 2, 3, 1)).reshape(-1)),
        torch.from_numpy(back),
        torch.from_numpy(np.ascontiguousarray(parts).reshape(-1)),
    )  # fmt: skip


def _ranks(local: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_], n: int) -> npt.NDArray[np.int64]:
    """For each (row, page): how many rows before it have the same page."""
    hot = np.zeros((local.shape[0], n), dtype=np.int64)
    np.put_along_axis(hot, local, 1, axis=1)
    before = np.cumsum(hot, axis=0) - hot
    return np.where(valid, np.take_along_axis(before, local, axis=1), 0)


class RowsOfMany:
    """The first rows of a step, at ``positions`` (rows)."""

    def __init__(self, made: Plan, heads: Heads, numerics: Numerics, positions: torch.Tensor) -> None:
        self._plan, self._heads, self._tile, self._positions = made, heads, numerics.tile, positions
        self._masks: dict[int, torch.Tensor] = {}
        scores: Floats = np.empty((made.n, heads.kv, made.m, PAGE), np.float32)
        parts: Floats = np.empty((made.n * heads.kv * made.m + 1, heads.width), np.float32)
        parts[-1] = 0
        self._scores = tiles(scores, self._tile)
        self._scored = torch.from_numpy(scores).view(-1, PAGE)
        self._parts = tiles(parts[:-1].reshape(made.n, heads.kv, made.m, heads.width), self._tile)
        self._all = torch.from_numpy(parts)

    def attend(self, qkv: torch.Tensor, k: Floats, v: Floats, look: Look, seen: torch.Tensor) -> None:
        """See ``Group.attend``."""
        here, heads = self._plan, self._heads
        queries = qkv.view(-1, heads.width).index_select(0, here.to_pages).mul_(look.scale)
        np.matmul(self._by_page(queries), k[here.pages], out=self._scores)
        scores = self._scored.index_select(0, here.to_rows).view(-1, heads.queries, here.span * PAGE)
        weights = torch.softmax(bent(scores, look.cap).add_(self._mask(look.window)), -1)
        weights = weights.view(-1, PAGE).index_select(0, here.back)
        np.matmul(self._by_page(weights), v[here.pages], out=self._parts)
        total, *more = self._all.index_select(0, here.parts).view(here.span, len(self._positions), -1).unbind()
        for part in more:
            total += part
        seen[: len(self._positions)].copy_(total)

    def _by_page(self, rows: torch.Tensor) -> Floats:
        here, heads = self._plan, self._heads
        return tiles(rows.numpy().reshape(here.n, heads.kv, here.m, -1), self._tile)

    def _mask(self, window: int) -> torch.Tensor:
        """0 where a row may look, -inf elsewhere."""
        found = self._masks.get(window)
        if found is None:
            found = self._masks[window] = mask_of(self._positions, 0, self._plan.span * PAGE, window)
        return found

"""Attention of decode rows of many sequences at once, whatever pages each has.

The pages are multiplied as one batch, in physical order where the pages in use lie close together, so that K and V are
not copied. A page that several sequences share is multiplied once with the queries of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sllm_runtime.worker.engine.ours.attention import Floats, Heads, Look, bent, filled, mask_of, tiles
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE

Indexes = npt.NDArray[np.int64]
_RUNS: Final = 4
"""A product more takes as long as what it may save of two pages."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows meet pages; indexes into flat rows. ``n`` pages, ``m`` queries for each page and KV head."""

    n: int
    m: int
    span: int
    """Pages of the longest row."""
    pages: slice | Indexes
    to_pages: Indexes
    """(n * kv * m) row of qkv (rows * (queries + 2 * kv)) that stands there."""
    to_rows: Indexes
    """(rows * heads * span) row of the pages' scores that belongs there."""
    back: Indexes
    """(n * kv * m) row of the probabilities (rows * heads * span) that stands there."""
    parts: Indexes
    """(span * rows * heads) row of the pages' parts, the last one (zeros) where a row has no such page."""
    last: Indexes
    """(rows) page, of the ``n``, that a row ends in."""
    whole: Indexes
    """Pages, of the ``n``, that a row goes on behind."""


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
        to_pages,
        np.ascontiguousarray(at.transpose(0, 2, 3, 1)).reshape(-1),
        back,
        np.ascontiguousarray(parts).reshape(-1),
        local[:, -1],
        local[:, :-1][valid[:, 1:]],
    )  # fmt: skip


def runs(places: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Of pages side by side of which as many ``places`` (pages) are in use: the first, the one behind them, how many
    places. Pages of which none is are left out; all are one run where they change too often for it to pay."""
    borders = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(places)]
    if len(borders) - 1 > _RUNS:
        return [(0, len(places), int(places.max()))]
    return [(low, high, int(places[low])) for low, high in pairwise(borders) if places[low]]


def _ranks(local: Indexes, valid: npt.NDArray[np.bool_], n: int) -> Indexes:
    """For each (row, page): how many rows before it have the same page."""
    hot = np.zeros((local.shape[0], n), dtype=np.int64)
    np.put_along_axis(hot, local, 1, axis=1)
    before = np.cumsum(hot, axis=0) - hot
    return np.where(valid, np.take_along_axis(before, local, axis=1), 0)


class RowsOfMany:
    """The first ``rows`` rows of steps whose page tables are alike. Rows of indexes are followed by numpy, into buffers
    that layers and steps share: it takes half the time of torch's ``index_select``."""

    def __init__(self, made: Plan, rows: int, heads: Heads, numerics: Numerics) -> None:
        self._plan, self._heads = made, heads
        self._positions = torch.empty(0, dtype=torch.int64)
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        by_page, by_row = len(made.to_pages), len(made.to_rows)
        self._queries = _numbers(by_page, heads.width)
        # Zeros: places that no product has written are masked, and must not be NaN.
        self._by_page: Floats = np.zeros((by_page, PAGE), np.float32)
        self._by_row, self._weights = _numbers(by_row, PAGE), _numbers(by_row, PAGE)
        self._parts, self._seen = _numbers(by_page + 1, heads.width), _numbers(len(made.parts), heads.width)
        self._parts[-1] = 0
        shape = (made.n, heads.kv, made.m, -1)
        self._query_tiles, self._page_tiles, self._part_tiles = (
            tiles(each.reshape(shape), numerics.tile) for each in (self._queries, self._by_page, self._parts[:-1])
        )
        of_row = (-1, heads.queries, made.span * PAGE)
        self._scored, self._weighted = (torch.from_numpy(each).view(of_row) for each in (self._by_row, self._weights))
        self._first, *self._more = self._seen.reshape(made.span, rows, -1)
        self._runs = [(0, made.n, PAGE)]

    def begin(self, positions: torch.Tensor) -> RowsOfMany:
        """The rows of the next step are at ``positions`` (rows)."""
        self._positions = positions
        self._masks.clear()
        places = np.zeros(self._plan.n, np.int64)
        np.maximum.at(places, self._plan.last, [filled(position) for position in positions.tolist()])
        places[self._plan.whole] = PAGE
        self._runs = runs(places)
        return self

    def attend(self, qkv: torch.Tensor, k: Floats, v: Floats, look: Look, seen: torch.Tensor) -> None:
        """See ``Group.attend``."""
        here = self._plan
        _gather(qkv.numpy().reshape(-1, self._heads.width), here.to_pages, self._queries)
        self._queries *= np.float32(look.scale)
        k, v = k[here.pages], v[here.pages]
        for low, high, places in self._runs:
            np.matmul(
                self._query_tiles[low:high], k[low:high, ..., :places], out=self._page_tiles[low:high, ..., :places]
            )
        _gather(self._by_page, here.to_rows, self._by_row)
        bent(self._scored, look.cap)
        if (mask := self._mask(look.window)) is not None:
            mask[0].add_(mask[1])
        torch.softmax(self._scored, -1, out=self._weighted)
        _gather(self._weights, here.back, self._by_page)
        for low, high, places in self._runs:
            np.matmul(
                self._page_tiles[low:high, ..., :places], v[low:high, ..., :places, :], out=self._part_tiles[low:high]
            )
        into: Floats = seen.numpy()[: len(self._first)]
        if not self._more:
            _gather(self._parts, here.parts, into.reshape(-1, self._heads.width))
            return
        _gather(self._parts, here.parts, self._seen)
        np.add(self._first, self._more[0], out=into)
        for part in self._more[1:]:
            into += part

    def _mask(self, window: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scores that not every row may see, and what is added to them: 0 where a row may look, -inf elsewhere."""
        if window not in self._masks:
            places = self._plan.span * PAGE
            first = 0 if window else int(self._positions.min()) + 1
            added = mask_of(self._positions, first, places - first, window)
            self._masks[window] = (self._scored[..., first:], added) if first < places else None
        return self._masks[window]


def _numbers(rows: int, width: int) -> Floats:
    return np.empty((rows, width), np.float32)


def _gather(rows: Floats, at: Indexes, into: Floats) -> None:
    rows.take(at, 0, into, "clip")  # without clip it goes through a buffer; all indexes are there

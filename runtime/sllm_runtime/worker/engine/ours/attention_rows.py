"""Attention of neighbouring rows of one sequence: a chunk of its prefill, or one decode row.

All have one page table, so every page is multiplied with all queries where it lies, and the product is written where
the row's scores belong.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sllm_runtime.worker.engine.ours.attention import Floats, Heads, Look, bent, filled, mask_of, tiles
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE, pages_for

_SCORES: Final = 2**19
"""Numbers of a block's scores that still lie in a processor's own cache, more or less."""
_LEAST: Final = 8


def blocks(start: int, count: int, queries: int) -> list[tuple[int, int]]:
    """Positions and counts of the blocks that ``count`` rows from position ``start`` are computed in: a block's scores
    stay small, and its rows skip the pages behind them."""
    found = []
    end = start + count
    while start < end:
        most = max(_LEAST, _SCORES // (queries * PAGE * pages_for(start + 1)))
        found.append((start, min(most, end - start)))
        start += most
    return found


def _runs(table: Many[int]) -> list[tuple[int, int, int]]:
    """Of pages that lie side by side: the first page, its place in the table, how many."""
    found: list[tuple[int, int, int]] = []
    for at, page in enumerate(table):
        if found and page == sum(found[-1][::2]):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((page, at, 1))
    return found


def _columns(matrix: Floats, at: int, count: int, places: int) -> Floats:
    """Those of ``count`` pages with so many ``places`` each: (pages, kv, queries, places)."""
    kv, queries, _ = matrix.shape
    columns = matrix[:, :, at * PAGE : at * PAGE + count * places]
    return columns.reshape(kv, queries, count, places).transpose(2, 0, 1, 3)


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages side by side, the first ``places`` of each, and where their products are: tiles of (pages, kv, queries,
    places or width)."""

    pages: slice
    places: int
    scores: Floats
    weights: Floats
    parts: Floats


class RowsOfOne:
    """``count`` rows from row ``first`` of a step on, at positions from ``start`` on; ``table``: its pages."""

    def __init__(self, first: int, start: int, count: int, table: Many[int], heads: Heads, numerics: Numerics) -> None:
        self._rows = slice(first, first + count)
        self._start, self._heads = start, heads
        span, kv, wanted = len(table), heads.kv, count * heads.group
        most, tile = numerics.tiled(wanted), numerics.tile
        shape = (kv, count, heads.group, -1)
        last = filled(start + count - 1)
        places = (span - 1) * PAGE + last
        queries: Floats = np.zeros((kv, most, heads.width), np.float32)
        # Of the scores and of the weights that they become, by KV head: (kv, queries, places).
        scores, weights = (np.empty((kv, most, places), np.float32) for _ in range(2))
        parts: Floats = np.empty((span, kv, most, heads.width), np.float32)
        runs = [(*run, PAGE) for run in _runs(table if last == PAGE else table[:-1])]
        if last < PAGE:
            runs.append((table[-1], span - 1, 1, last))
        self._runs = [
            _Run(
                slice(page, page + count),
                each,
                tiles(_columns(scores, at, count, each), tile),
                tiles(_columns(weights, at, count, each), tile),
                tiles(parts[at : at + count], tile),
            )
            for page, at, count, each in runs
        ]
        self._queries = tiles(queries, tile)
        # (kv, rows, group, width) and what these rows see in the same order.
        self._asked = queries[:, :wanted].reshape(shape)
        self._scores, self._weights = torch.from_numpy(scores), torch.from_numpy(weights)
        self._scored = self._scores[:, :wanted].view(shape)
        self._total, *self._more = parts
        self._seen = self._total[:, :wanted].reshape(shape).transpose(1, 0, 2, 3)
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}

    def attend(self, qkv: torch.Tensor, k: Floats, v: Floats, look: Look, seen: torch.Tensor) -> None:
        """See ``Group.attend``."""
        heads, rows = self._heads, self._rows
        shape = (-1, heads.kv, heads.group, heads.width)
        asked: Floats = qkv.numpy()[rows, : heads.queries].reshape(shape)
        np.multiply(asked.transpose(1, 0, 2, 3), np.float32(look.scale), out=self._asked)
        for run in self._runs:
            np.matmul(self._queries, k[run.pages, ..., : run.places], out=run.scores)
        bent(self._scores, look.cap)
        if (mask := self._mask(look.window)) is not None:
            mask[0].add_(mask[1])
        torch.softmax(self._scores, -1, out=self._weights)
        for run in self._runs:
            np.matmul(run.weights, v[run.pages, ..., : run.places, :], out=run.parts)
        for part in self._more:
            self._total += part
        seen.numpy()[rows].reshape(shape)[:] = self._seen

    def _mask(self, window: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scores that not every row may see, and what is added to them."""
        if window not in self._masks:
            places, first = self._scored.shape[-1], 0 if window else self._start + 1
            positions = torch.arange(self._start, self._start + self._scored.shape[1])
            added = mask_of(positions, first, places - first, window)
            self._masks[window] = (self._scored[..., first:], added) if first < places else None
        return self._masks[window]

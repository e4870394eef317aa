"""One step as tensors: all rows of all chunks in one ragged matrix, decode rows and prefill rows alike."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from sllm_runtime.worker.engine.ours.attention import Group, Heads, Plan, plan
from sllm_runtime.worker.engine.ours.kv import KvStore
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """``rows`` rows, of which the last ones may be padding."""

    tokens: torch.Tensor
    """(rows) ids, int64."""
    positions: torch.Tensor
    """(rows) int64."""
    places: torch.Tensor
    """(rows * 2 * kv heads) where K and V go; see ``KvStore.places``."""
    groups: tuple[Group, ...]
    wanted: torch.Tensor
    """Rows that a token is chosen from, padded like the rows."""
    samples: tuple[Sequence, ...]
    """Whose they are."""
    kv: KvStore

    @property
    def rows(self) -> int:
        """Rows of every activation."""
        return self.tokens.shape[0]


class Batches:
    """Makes steps. The plan of the decode rows is kept while no page table changes."""

    def __init__(self, kv: KvStore, heads: Heads, numerics: Numerics) -> None:
        self.numerics = numerics
        self._kv = kv
        self._heads = heads
        self._kept: tuple[tuple[tuple[int, ...], ...], int, Plan] | None = None

    def make(self, chunks: Many[Chunk]) -> Batch:
        """The step for ``chunks``, decodes (single positions) first."""
        ordered = sorted(chunks, key=lambda chunk: chunk.count > 1)
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        for chunk in ordered:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            tokens += sequence.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            pages += [sequence.pages[position // PAGE] for position in range(chunk.start, end)]
        count = len(tokens)
        pad = self.numerics.padded(count) - count
        tokens += [0] * pad
        pages += [self._kv.pages] * pad
        where = torch.tensor(positions + [0] * pad)
        return Batch(
            torch.tensor(tokens),
            where,
            self._kv.places(torch.tensor(pages), where % PAGE),
            self._groups(ordered, where, pad),
            self._wanted(ordered),
            tuple(chunk.sequence for chunk in ordered if chunk.samples),
            self._kv,
        )

    def _groups(self, ordered: Many[Chunk], positions: torch.Tensor, pad: int) -> tuple[Group, ...]:
        single = [chunk for chunk in ordered if chunk.count == 1]
        longer = ordered[len(single) :]
        groups = []
        if single:
            tables = tuple(tuple(chunk.sequence.pages[: chunk.start // PAGE + 1]) for chunk in single)
            groups.append(self._group(self._decode(tables, 0 if longer else pad), positions[: len(single)]))
        row = len(single)
        for chunk in longer:
            table = chunk.sequence.pages[: (chunk.start + chunk.count - 1) // PAGE + 1]
            tail = pad if chunk is longer[-1] else 0
            made = plan([table] * chunk.count, self._heads, self.numerics.queries, row, tail)
            groups.append(self._group(made, positions[row : row + chunk.count]))
            row += chunk.count
        return tuple(groups)

    def _group(self, made: Plan, positions: torch.Tensor) -> Group:
        return Group.of(made, self._heads, positions)

    def _decode(self, tables: tuple[tuple[int, ...], ...], pad: int) -> Plan:
        if self._kept is None or self._kept[:2] != (tables, pad):
            self._kept = (tables, pad, plan(tables, self._heads, self.numerics.queries, 0, pad))
        return self._kept[2]

    def _wanted(self, ordered: Many[Chunk]) -> torch.Tensor:
        rows, at = [], 0
        for chunk in ordered:
            at += chunk.count
            if chunk.samples:
                rows.append(at - 1)
        return torch.tensor(rows + [0] * (self.numerics.padded(len(rows)) - len(rows)), dtype=torch.int64)

"""One step as tensors: all rows of all chunks in one ragged matrix, decode rows and prefill rows alike."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from sllm_runtime.worker.engine.ours.attention import Group, Heads, Look
from sllm_runtime.worker.engine.ours.attention_batch import RowsOfMany, plan
from sllm_runtime.worker.engine.ours.attention_rows import RowsOfOne, blocks
from sllm_runtime.worker.engine.ours.kv import KvStore, Places
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE, pages_for


class View(Protocol):
    """How the rows of a step see what is in their pages."""

    def see(self, layer: int, qkv: torch.Tensor, look: Look) -> torch.Tensor:
        """What each row sees (rows, queries * width) in the stage's ``layer``, after its K and V are in the cache.
        ``qkv``: float32 (rows, queries + 2 * kv, width), normed and turned. Good until the next layer's."""


@dataclass(frozen=True, slots=True)
class Paged:
    """A ``View`` of ``kv``. ``places``: where K and V go; ``seen``: float32, zeros where a row is padding."""

    kv: KvStore
    heads: Heads
    places: Places
    groups: tuple[Group, ...]
    seen: torch.Tensor

    def see(self, layer: int, qkv: torch.Tensor, look: Look) -> torch.Tensor:
        """See ``View.see``."""
        queries, both = self.heads.queries, self.heads.queries + self.heads.kv
        numbers = qkv.numpy()
        self.kv.write(layer, self.places, numbers[:, queries:both], numbers[:, both:])
        keys, values = self.kv.layer(layer)
        for group in self.groups:
            group.attend(qkv, keys, values, look, self.seen)
        return self.seen


@dataclass(frozen=True, slots=True)
class Batch:
    """``rows`` rows, of which the last ones may be padding."""

    tokens: torch.Tensor
    """(rows) ids, int64; fewer where the rows come from another stage."""
    positions: torch.Tensor
    """(rows) int64."""
    view: View
    """What the rows see."""
    wanted: torch.Tensor
    """Rows that a token is chosen from, padded like the rows."""
    numerics: Numerics

    @property
    def rows(self) -> int:
        """Rows of every activation."""
        return self.positions.shape[0]


class Part(Protocol):
    """What a step computes of one sequence: a ``Chunk``, or what another process said of one."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def samples(self) -> bool: ...

    @property
    def tokens(self) -> Many[int]:
        """Of its positions."""

    @property
    def pages(self) -> Many[int]:
        """From position 0 on."""


AnyPart = TypeVar("AnyPart", bound=Part)


def decodes_first(parts: Many[AnyPart]) -> list[AnyPart]:
    """In the order in which a step has their rows."""
    return sorted(parts, key=lambda part: part.count > 1)


class Batches:
    """Makes steps, each computed before the next is made. The plan of the decode rows, and the buffers that their
    attention has, are kept while no page table changes."""

    def __init__(self, kv: KvStore, heads: Heads, numerics: Numerics) -> None:
        self.numerics = numerics
        self._kv = kv
        self._heads = heads
        self._kept: tuple[tuple[tuple[int, ...], ...], RowsOfMany] | None = None

    def make(self, chunks: Many[Part]) -> Batch:
        """The step for ``chunks``, decodes (single positions) first."""
        ordered = decodes_first(chunks)
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        for chunk in ordered:
            where = range(chunk.start, chunk.start + chunk.count)
            tokens += chunk.tokens
            positions += where
            pages += [chunk.pages[position // PAGE] for position in where]
        count = len(positions)
        pad = self.numerics.padded(count) - count
        tokens += [0] * pad
        pages += [self._kv.pages] * pad
        positions += [0] * pad
        at = torch.tensor(positions)
        view = Paged(
            self._kv,
            self._heads,
            self._kv.places(pages, positions),
            self._groups(ordered, at),
            torch.zeros(count + pad, self._heads.queries * self._heads.width),
        )
        return Batch(torch.tensor(tokens), at, view, self._wanted(ordered), self.numerics)

    def _groups(self, ordered: Many[Part], positions: torch.Tensor) -> tuple[Group, ...]:
        single = [chunk for chunk in ordered if chunk.count == 1]
        groups: list[Group] = []
        if len(single) > 1:
            tables = tuple(tuple(chunk.pages[: chunk.start // PAGE + 1]) for chunk in single)
            groups.append(self._of_many(tables).begin(positions[: len(single)]))
        row = len(groups and single)
        for chunk in ordered[row:]:
            for start, count in blocks(chunk.start, chunk.count, self._heads.queries):
                table = chunk.pages[: pages_for(start + count)]
                groups.append(RowsOfOne(row, start, count, table, self._heads, self.numerics))
                row += count
        return tuple(groups)

    def _of_many(self, tables: tuple[tuple[int, ...], ...]) -> RowsOfMany:
        if self._kept is None or self._kept[0] != tables:
            made = plan(tables, self._heads, self.numerics)
            self._kept = (tables, RowsOfMany(made, len(tables), self._heads, self.numerics))
        return self._kept[1]

    def _wanted(self, ordered: Many[Part]) -> torch.Tensor:
        rows, at = [], 0
        for chunk in ordered:
            at += chunk.count
            if chunk.samples:
                rows.append(at - 1)
        return torch.tensor(rows + [0] * (self.numerics.padded(len(rows)) - len(rows)), dtype=torch.int64)

"""One step as tensors: all rows of all chunks in one ragged matrix, decode rows and prefill rows alike."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch

from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.kernels.loaded import kernels
from sllm_runtime.worker.engine.ours.kernels.shapes import BLOCK
from sllm_runtime.worker.engine.ours.kv import KvStore
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE, pages_for


class Turn(NamedTuple):
    """How heads are turned by their rows' positions: x cos + y sin, where y is x with its halves swapped, for the first
    ``2 * half`` numbers x of a head. ``cos`` and ``sin``: (rows, 1, width), the first half of sin negated; float32."""

    half: int
    cos: torch.Tensor
    sin: torch.Tensor


class View(Protocol):
    """How the rows of a step see what is in their pages."""

    def see(self, layer: int, qkv: torch.Tensor, look: Look, turn: Turn | None) -> torch.Tensor:
        """What each row sees (rows, queries * width) in the stage's ``layer``, after q and k are turned and its K and V
        are in the cache. ``qkv``: dense float32 (rows, queries + 2 * kv, width), which may be written to. Good until
        the next layer's."""


@dataclass(frozen=True, slots=True)
class Paged:
    """A ``View`` of ``kv``: ``count`` rows and those that pad them, each ``of`` (rows) one of the page ``tables``
    (sequences, longest), at ``positions`` (rows); all int64. ``seen``: float32, zeros where a row is padding."""

    kv: KvStore
    heads: Heads
    count: int
    of: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    seen: torch.Tensor
    scratch: Scratch

    def see(self, layer: int, qkv: torch.Tensor, look: Look, turn: Turn | None) -> torch.Tensor:
        """See ``View.see``."""
        heads, k_v = self.heads, self.kv.layer(layer)
        turned = (turn.half, turn.cos.data_ptr(), turn.sin.data_ptr()) if turn is not None else (0, None, None)
        kernels().attend(
            qkv.data_ptr(), len(qkv), self.count, heads.queries, heads.kv, heads.width, self.of.data_ptr(),
            self.positions.data_ptr(), self.tables.data_ptr(), self.tables.shape[1], *turned, *k_v, look.window,
            look.scale, look.cap, self.seen.data_ptr(), self.scratch.state.data_ptr(), self.scratch.scores.data_ptr(),
        )  # fmt: skip
        return self.seen


class Scratch:
    """What attention writes to beside its result, step after step."""

    def __init__(self, heads: Heads) -> None:
        self.state = torch.empty(BLOCK, heads.queries, 2)
        self.scores = torch.empty(PAGE)


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
    """Makes steps, each computed before the next is made."""

    def __init__(self, kv: KvStore, heads: Heads, numerics: Numerics) -> None:
        self.numerics = numerics
        self._kv = kv
        self._heads = heads
        self._scratch = Scratch(heads)

    def make(self, chunks: Many[Part]) -> Batch:
        """The step for ``chunks``, decodes (single positions) first."""
        ordered = decodes_first(chunks)
        tokens: list[int] = []
        positions: list[int] = []
        of: list[int] = []
        tables: list[list[int]] = []
        span = max(pages_for(chunk.start + chunk.count) for chunk in ordered)
        for number, chunk in enumerate(ordered):
            tokens += chunk.tokens
            positions += range(chunk.start, chunk.start + chunk.count)
            of += [number] * chunk.count
            pages = list(chunk.pages[:span])
            tables.append(pages + [self._kv.pages] * (span - len(pages)))
        count = len(positions)
        rows = self.numerics.padded(count)
        if rows > count:
            tokens += [0] * (rows - count)
            positions += [0] * (rows - count)
            of += [len(tables)] * (rows - count)
            tables.append([self._kv.pages] * span)
        at = torch.tensor(positions)
        view = Paged(
            self._kv,
            self._heads,
            count,
            torch.tensor(of),
            at,
            torch.tensor(tables),
            torch.zeros(rows, self._heads.queries * self._heads.width),
            self._scratch,
        )
        return Batch(torch.tensor(tokens), at, view, self._wanted(ordered), self.numerics)

    def _wanted(self, ordered: Many[Part]) -> torch.Tensor:
        rows, at = [], 0
        for chunk in ordered:
            at += chunk.count
            if chunk.samples:
                rows.append(at - 1)
        return torch.tensor(rows + [0] * (self.numerics.padded(len(rows)) - len(rows)), dtype=torch.int64)

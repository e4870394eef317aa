"""The numbers of one step in one buffer: one copy brings them to a device, and a captured step finds them in place."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sllm_runtime.worker.engine.ours.batch import Part
from sllm_runtime.worker.engine.ours.pages import PAGE, pages_for


class Fields(NamedTuple):
    """Views of a step's buffer."""

    tokens: torch.Tensor
    """(rows) int64, as all up to ``wanted``."""
    positions: torch.Tensor
    slots: torch.Tensor
    """Where K and V go: page * PAGE + offset."""
    wanted: torch.Tensor
    """(wanted) rows that a token is chosen from."""
    of: torch.Tensor
    """(rows) int32: whose table."""
    tables: torch.Tensor
    """(sequences, pages) int32."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of each. ``pages``: the longest table's."""

    rows: int
    sequences: int
    pages: int
    wanted: int

    @property
    def words(self) -> int:
        """Length of the buffer, int64."""
        return 3 * self.rows + self.wanted + (self.rows + self.sequences * self.pages + 1) // 2

    def fields(self, buffer: torch.Tensor) -> Fields:
        """Views of ``buffer``, int64 (words), on any device."""
        tokens, positions, slots = buffer[: 3 * self.rows].view(3, self.rows)
        wanted = buffer[3 * self.rows :][: self.wanted]
        small = buffer[3 * self.rows + self.wanted :].view(torch.int32)
        tables = small[self.rows : self.rows + self.sequences * self.pages].view(self.sequences, self.pages)
        return Fields(tokens, positions, slots, wanted, small[: self.rows], tables)


def layout_of(parts: Many[Part]) -> Layout:
    """As large as a step of ``parts`` is."""
    return Layout(
        sum(part.count for part in parts),
        len(parts),
        max(pages_for(part.start + part.count) for part in parts),
        sum(part.samples for part in parts),
    )


def fill(into: Fields, parts: Many[Part], spare: int) -> None:
    """Write a step of ``parts``, decodes first, into views of CPU memory. Rows and sequences beyond them are padding:
    they write into the page ``spare`` and see its first place alone, so that nothing of a sequence reaches them."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    of: list[int] = []
    rows, most = into.tokens.shape[0], into.tables.shape[1]
    tables: list[list[int]] = []
    for number, part in enumerate(parts):
        where = range(part.start, part.start + part.count)
        table = list(part.pages[: pages_for(part.start + part.count)])
        tokens += part.tokens
        positions += where
        slots += [table[place // PAGE] * PAGE + place % PAGE for place in where]
        of += [number] * part.count
        tables.append(table + [spare] * (most - len(table)))
        if part.samples:
            wanted.append(len(positions) - 1)
    pad = rows - len(positions)
    _put(into.tokens, tokens + [0] * (rows - len(tokens)))  # a stage behind the head is told none
    _put(into.positions, positions + [0] * pad)
    _put(into.slots, slots + [spare * PAGE] * pad)
    _put(into.of, of + [len(parts)] * pad)
    _put(into.wanted, wanted + [0] * (into.wanted.shape[0] - len(wanted)))
    into.tables.fill_(spare)
    _put(into.tables[: len(parts)], tables)


def _put(into: torch.Tensor, numbers: list[int] | list[list[int]]) -> None:
    into.numpy()[:] = numbers

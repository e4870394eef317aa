"""Which parts of the loading pipeline are on. All of them are, but in the ablation of ServerlessLLM's figure 7."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from sllm_loaderd.reader import ChunkSource, together
from sllm_loaderd.store import StoredModel


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``bulk``: whole chunks are read, not tensor by tensor. ``direct``: past the page cache. ``threads`` per disk.

    ``pinned``: chunks are registered with the devices. ``overlap``: a chunk goes to its device at once. ``integrity``:
    each chunk's digest is compared while it passes.
    """

    bulk: bool = True
    direct: bool = True
    threads: int = 4
    pinned: bool = True
    overlap: bool = True
    integrity: bool = True

    def open_sources(self, model: StoredModel, rank: int) -> list[ChunkSource]:
        """Where the partition's bytes come from, best first; the caller closes them. Blocking; raises typed errors."""
        sources = model.open_sources(rank, direct=self.direct)
        if self.bulk:
            return sources
        borders = sorted({t.offset for t in model.index.tensors if t.rank == rank})
        return [_ByTensor(source, borders) for source in sources]


class _ByTensor:
    """A source that is read in as many pieces as there are tensors."""

    def __init__(self, source: ChunkSource, borders: list[int]) -> None:
        self._source = source
        self._borders = borders
        self.path = source.path
        self.name = source.name
        self.close = source.close

    def read(self, view: memoryview, offset: int) -> str:
        end = offset + len(view)
        first, last = bisect.bisect_right(self._borders, offset), bisect.bisect_left(self._borders, end)
        edges = [offset, *self._borders[first:last], end]
        pieces = itertools.pairwise(edges)
        return together([self._source.read(view[start - offset : stop - offset], start) for start, stop in pieces])

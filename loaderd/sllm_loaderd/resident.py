"""One partition in memory, and which partitions would make room for others: records and pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.load_job import LoadJob
from sllm_loaderd.reader import ChunkSource
from sllm_loaderd.store import StoredModel
from sllm_loaderd.task import ReadChunk
from sllm_loaderd.write_back import WriteBack

Key = tuple[str, int]
"""(model digest, rank)"""


@dataclass(eq=False, slots=True)
class Resident:
    """One partition in memory or on its way."""

    key: Key
    model: StoredModel
    used_at: float
    chunks: dict[int, Chunk] = field(default_factory=dict)
    tasks: dict[int, ReadChunk] = field(default_factory=dict)
    """Chunks that are not there yet."""
    jobs: list[LoadJob] = field(default_factory=list)
    sources: list[ChunkSource] = field(default_factory=list)
    """Where its bytes come from, best first; open only while something is read."""
    doubted: set[str] = field(default_factory=set)
    """Paths on which a source of it has failed."""
    copying: Counter[int] = field(default_factory=Counter)
    """Chunks that are being copied to devices."""
    feeding: int = 0
    """Devices that are fed from it: its sources stay open meanwhile."""
    write_back: WriteBack | None = None

    def there(self, number: int) -> bool:
        """Whether a chunk's bytes are in memory and checked."""
        return number in self.chunks and number not in self.tasks

    def nbytes_of(self, number: int) -> int:
        """Bytes of a chunk that belong to the partition."""
        chunk_bytes = self.model.index.chunk_bytes
        return min(chunk_bytes, self.nbytes - number * chunk_bytes)

    @property
    def memory(self) -> int:
        """Bytes of its chunks."""
        return sum(chunk.size for chunk in self.chunks.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the partition."""
        return self.model.index.partitions[self.key[1]].nbytes

    @property
    def holders(self) -> set[str]:
        """Sandboxes that were given chunks of it and live."""
        return set().union(*(chunk.holders for chunk in self.chunks.values()))

    @property
    def loading(self) -> bool:
        """Whether something is read into it or copied from it, or somebody waits for that."""
        return bool(self.tasks or self.jobs or self.copying or self.feeding)

    @property
    def writing(self) -> bool:
        """Whether a chunk of it is being written to the SSD tier just now."""
        return self.write_back is not None and self.write_back.running

    @property
    def evictable(self) -> bool:
        """Whether nobody would miss it: a copy to the SSD tier that waits is given up, one under way is not."""
        return not (self.loading or self.holders or self.writing)

    def wanted(self) -> set[int]:
        """Chunks that somebody waits for."""
        return {number for job in self.jobs for number in job.lacking}


def victims(residents: Iterable[Resident], shortage: int, spare: Collection[str]) -> tuple[list[Resident], int]:
    """Whom to evict, least recently used first, to free ``shortage`` bytes, and how many are short even so.

    Models in ``spare`` stay.
    """
    chosen = []
    for resident in sorted(residents, key=lambda resident: resident.used_at):
        if shortage <= 0:
            break
        if resident.key[0] not in spare and resident.evictable:
            chosen.append(resident)
            shortage -= resident.memory
    return chosen, max(shortage, 0)


def why_kept(resident: Resident, pinned: Collection[str]) -> str:
    """Why a partition is not evicted, in a word."""
    if resident.key[0] in pinned:
        return "pinned"
    if resident.loading:
        return "loading"
    return f"held by {len(resident.holders)}" if resident.holders else "being written to the SSD tier"

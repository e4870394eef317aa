"""One load as its connection has it: where the bytes will be, and the ways to begin, change and end it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.device_resident import DeviceResident
from sllm_loaderd.device_stage import DeviceStage
from sllm_loaderd.devices import Allocation
from sllm_loaderd.load_job import LoadJob, expand
from sllm_loaderd.residency import Residency
from sllm_loaderd.resident import Resident
from sllm_loaderd.store import StoredModel


@dataclass(frozen=True, eq=False, slots=True)
class MemoryLoad:
    """A load whose end is the chunks themselves. Nothing is told before ``start``."""

    model: StoredModel
    rank: int
    job: LoadJob
    residency: Residency
    resident: Resident

    @property
    def numbers(self) -> tuple[int, ...]:
        """The chunks asked for, in the order in which they are wanted."""
        return self.job.chunks

    @property
    def chunks(self) -> list[Chunk]:
        """Their memory, in the same order."""
        return [self.resident.chunks[number] for number in self.job.chunks]

    def start(self) -> None:
        """Tell what is there, then the rest as it comes."""
        self.residency.start(self.resident, self.job)

    def reorder(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Blocks of these ranges first. Raises ``InvalidCheckpoint`` for what is not there."""
        self.residency.reorder(self.resident, self.job, _blocks(self.model, self.rank, ranges))

    def cancel(self) -> None:
        """Nobody waits any more. Repeatable."""
        self.residency.cancel(self.resident, self.job)


@dataclass(frozen=True, eq=False, slots=True)
class DeviceLoad:
    """A load whose end is the memory of a device. Nothing is told before ``start``."""

    model: StoredModel
    rank: int
    job: LoadJob
    stage: DeviceStage
    part: DeviceResident

    @property
    def allocation(self) -> Allocation:
        """The partition's memory."""
        return self.part.allocation

    def start(self) -> None:
        """Tell what is there, then the rest as it comes."""
        self.stage.start(self.part, self.job)

    def reorder(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Blocks of these ranges first. Raises ``InvalidCheckpoint`` for what is not there."""
        self.stage.reorder(self.part, self.job, _blocks(self.model, self.rank, ranges))

    def cancel(self) -> None:
        """Nobody waits any more. Repeatable."""
        self.stage.cancel(self.part, self.job)


Loading = MemoryLoad | DeviceLoad


def _blocks(model: StoredModel, rank: int, ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return expand(ranges, len(model.block_chunks[rank]))

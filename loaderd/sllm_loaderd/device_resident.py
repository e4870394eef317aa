"""One partition in the memory of one device, and the task that brings a chunk there."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.devices import Allocation, Device
from sllm_loaderd.load_job import LoadJob
from sllm_loaderd.resident import Resident
from sllm_loaderd.store import StoredModel
from sllm_loaderd.task import Task
from sllm_runtime.protocol.errors import SllmError


class CopyChunk(Task):
    """One chunk from DRAM to its place in a device's memory."""

    def __init__(
        self,
        number: int,
        nbytes: int,
        chunk: Chunk,
        place: tuple[Device, Allocation, int],
        done: Callable[[Task, SllmError | None], None],
        pin: Callable[[Chunk], None],
    ) -> None:
        device, self._allocation, self._offset = place
        self._pin = pin
        super().__init__(number, nbytes, (device.path,), done)
        self._chunk = chunk

    def run(self, path: str) -> None:
        self._pin(self._chunk)
        with self._chunk.view[: self.nbytes] as view:
            self._allocation.write(self._offset, view)


@dataclass(eq=False, slots=True)
class DeviceResident:
    """One partition in the memory of one device, or on its way there."""

    resident: Resident
    device: Device
    allocation: Allocation
    used_at: float
    there: set[int] = field(default_factory=set)
    pending: list[int] = field(default_factory=list)
    """Chunks that DRAM was not asked for yet, in the order in which they are wanted."""
    feeds: list[LoadJob] = field(default_factory=list)
    """What DRAM was asked for."""
    landed: list[int] = field(default_factory=list)
    """Chunks in DRAM that wait for the others, where stages do not overlap."""
    copies: dict[int, CopyChunk] = field(default_factory=dict)
    jobs: list[LoadJob] = field(default_factory=list)
    holders: set[str] = field(default_factory=set)
    id: int = field(default_factory=lambda: secrets.randbits(62))
    """Names its memory, also to the next loaderd."""
    feeding: bool = False
    in_parts: bool = False
    leaving: bool = False

    @property
    def model(self) -> StoredModel:
        return self.resident.model

    @property
    def idle(self) -> bool:
        """Whether nobody has it or waits for it and nothing is on its way."""
        return not (self.holders or self.jobs or self.copies or self.feeds)

    def coming(self) -> set[int]:
        """Chunks that are there or were asked for."""
        asked = {number for feed in self.feeds for number in feed.lacking}
        return {*self.there, *self.copies, *self.pending, *self.landed, *asked}

    def open_to(self, holder: str) -> bool:
        """Whether ``holder`` may have it: what one sandbox may have written another one never gets."""
        return not self.leaving and (self.allocation.shareable or self.holders <= {holder})

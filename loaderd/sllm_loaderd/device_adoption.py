"""Device memory that outlived the loaderd which filled it: it serves again where nobody else could write to it.

Other memory is counted, so that the device is not promised twice, until the sandboxes that have it are dead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from sllm_loaderd.device_resident import DeviceResident
from sllm_loaderd.device_stage import DeviceStage
from sllm_loaderd.devices import Allocation, Device
from sllm_loaderd.files import chunk_digest
from sllm_loaderd.opening import finished
from sllm_loaderd.resident import Resident
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.checkpoint import chunk_count
from sllm_runtime.protocol.loader import AdoptDevice, Adopted

log = logging.getLogger(__name__)


class CountedMemory:
    """Allocations that serve nobody new, by id. Lives in the event loop; owns them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Allocation, set[str]]] = {}
        self.on_freed: Callable[[list[int]], None] = lambda ids: None

    def has(self, id: int, holders: Iterable[str]) -> bool:
        """Whether it is here; if so ``holders`` have it, too."""
        kept = self._kept.get(id)
        if kept is not None:
            kept[1].update(holders)
        return kept is not None

    def add(self, id: int, allocation: Allocation, holders: Iterable[str]) -> None:
        """Count it until all of ``holders`` are dead."""
        self._kept[id] = (allocation, set(holders))

    def forget(self, holder: str) -> None:
        """A sandbox is dead."""
        freed = []
        for id, (allocation, holders) in list(self._kept.items()):
            holders.discard(holder)
            if not holders:
                del self._kept[id]
                allocation.free()
                freed.append(id)
        self.on_freed(freed)

    def close(self) -> None:
        """Give all of it back."""
        for allocation, _ in self._kept.values():
            allocation.free()
        self._kept.clear()


async def adopt_device(
    request: AdoptDevice, fd: int, model: StoredModel | None, device: Device, stage: DeviceStage, counted: CountedMemory
) -> Adopted:
    """Take in what ``request`` brings; ``fd`` stays the caller's. Raises ``Conflict`` for what is no device memory.

    What no living sandbox has is given up. ``model``: None if the node has it no more.
    """
    if stage.hold(request.id, request.holders):  # the connection was lost, not the daemon
        return Adopted(request=request.request, ids=(request.id,))
    if counted.has(request.id, request.holders):
        return Adopted(request=request.request, ids=(), counted=(request.id,))
    if not request.holders:
        return Adopted(request=request.request, ids=())
    allocation = device.adopt(fd, request.nbytes, request.size)
    whole = False
    try:
        whole = model is not None and await finished(lambda: _right(allocation, model, request.partition))
    finally:  # cancelled while it is looked at, it counts all the same: its sandboxes have it
        if not whole:
            counted.add(request.id, allocation, request.holders)
    if not whole or model is None:
        log.warning("memory on %s with %s serves no further start", device.name, request.model)
        return Adopted(request=request.request, ids=(), counted=(request.id,))
    there = set(range(chunk_count(request.nbytes, model.index.chunk_bytes)))
    resident = Resident((model.checkpoint.digest, request.partition), model, time.monotonic())
    part = DeviceResident(resident, device, allocation, time.monotonic(), there=there, holders=set(request.holders))
    part.id = request.id
    stage.adopt(part)
    return Adopted(request=request.request, ids=(request.id,))


def _right(allocation: Allocation, model: StoredModel, partition: int) -> bool:
    """Whether all of a partition is there, by its digests. Blocking."""
    view, index = allocation.view, model.index
    if view is None or not 0 <= partition < len(index.partitions):
        return False
    found = index.partitions[partition]
    if found.nbytes != allocation.nbytes:
        return False
    with view:
        size = index.chunk_bytes
        return all(
            bool(stated) and chunk_digest(view[number * size : (number + 1) * size]) == stated
            for number, stated in enumerate(found.digests)
        )

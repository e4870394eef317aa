"""GPUs: one VMM allocation for each partition, exported as a descriptor; pinned chunks, a copy stream for each GPU.

Where a driver has no VMM export (some containers), memory of cuMemAlloc and its IPC handle take its place.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from typing import Any

from sllm_loaderd.client import memory
from sllm_loaderd.client.cuda_driver import (
    PINNED_ALREADY,
    Gpu,
    call,
    ipc_bytes,
    map_allocation,
    open_driver,
    unmap_allocation,
)
from sllm_runtime.protocol.errors import Conflict, DeviceOutOfMemory, InvalidRequest, Unavailable
from sllm_runtime.protocol.loader import CUDA, CUDA_IPC, POSIX_FD, link_of


class CudaDevice:
    """``Device`` on one GPU. Its stream ignores the default stream, and nothing waits for the whole device."""

    threads = 2
    """One fills the stream while the other waits for its event: the link never idles between two chunks."""

    def __init__(self, driver: Any, ordinal: int) -> None:
        self.gpu = Gpu(driver, ordinal)
        self.gpu.use()
        self.name = f"{CUDA}:{ordinal}"
        self.path = link_of(self.name)
        self.uuid = self.gpu.uuid
        self.limit = int(call(driver.cuDeviceTotalMem, self.gpu.device))
        self.stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self._event = threading.local()
        self._events: list[Any] = []
        self._lock = threading.Lock()
        self._allocations: set[CudaAllocation] = set()
        self._exports = self.gpu.has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") and self.gpu.has(
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
        )

    @property
    def used(self) -> int:
        with self._lock:
            return sum(allocation.size for allocation in self._allocations)

    def allocate(self, nbytes: int) -> CudaAllocation:
        """Raises ``DeviceOutOfMemory``."""
        self.gpu.use()
        try:
            made = VmmAllocation(self, nbytes) if self._exports else IpcAllocation(self, nbytes)
        except DeviceOutOfMemory as error:
            free, total = call(self.gpu.driver.cuMemGetInfo)
            raise DeviceOutOfMemory(
                f"{self.name} has {total} bytes, {free} of them free, {self.used} in partitions; {nbytes} are needed."
                " Stop instances on it, or load to another device",
                field="device",
                retry_after_s=1.0,
            ) from error
        with self._lock:
            self._allocations.add(made)
        return made

    def adopt(self, fd: int, nbytes: int, size: int) -> CudaAllocation:
        """Memory that a sandbox may have written to: it is counted until that is dead, and serves nobody else."""
        self.gpu.use()
        kind = self.gpu.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            handle = call(self.gpu.driver.cuMemImportFromShareableHandle, fd, kind)
        except (Unavailable, DeviceOutOfMemory) as error:
            raise Conflict(f"a descriptor is no memory of {self.name}: {error.message}", field="device") from error
        made = AdoptedAllocation(self, nbytes, size, handle)
        with self._lock:
            self._allocations.add(made)
        return made

    def discard(self, allocation: CudaAllocation) -> None:
        """It was freed."""
        with self._lock:
            self._allocations.discard(allocation)

    def copy(self, address: int, view: memoryview) -> None:
        """Host to device, complete when it returns. Pageable memory works too, at the speed of the driver's staging."""
        driver = self.gpu.driver
        self.gpu.use()
        event = self._event_of_thread()
        call(driver.cuMemcpyHtoDAsync, address, memory.address_of(view), len(view), self.stream)
        call(driver.cuEventRecord, event, self.stream)
        call(driver.cuEventSynchronize, event)

    def _event_of_thread(self) -> Any:
        event = getattr(self._event, "event", None)
        if event is None:
            flags = self.gpu.driver.CUevent_flags
            both = flags.CU_EVENT_BLOCKING_SYNC.value | flags.CU_EVENT_DISABLE_TIMING.value
            event = self._event.event = call(self.gpu.driver.cuEventCreate, both)
            with self._lock:
                self._events.append(event)
        return event

    def register(self, address: int, nbytes: int) -> None:
        driver = self.gpu.driver
        self.gpu.use()
        call(driver.cuMemHostRegister, address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE, passing=PINNED_ALREADY)

    def unregister(self, address: int) -> None:
        self.gpu.use()
        call(self.gpu.driver.cuMemHostUnregister, address, passing=PINNED_ALREADY)

    def close(self) -> None:
        with self._lock:
            left = list(self._allocations)
        for allocation in left:
            allocation.free()
        self.gpu.use()
        for event in self._events:
            call(self.gpu.driver.cuEventDestroy, event)
        call(self.gpu.driver.cuStreamDestroy, self.stream)
        self.gpu.close()


class CudaAllocation(ABC):
    """What both kinds share. Whoever is given GPU memory can write to it: it is for one sandbox alone."""

    kind = ""
    shareable = False
    handle = b""
    view: memoryview | None = None

    def __init__(self, device: CudaDevice, nbytes: int, size: int) -> None:
        self.nbytes = nbytes
        self.size = size
        self.address = 0
        self._device = device

    def write(self, offset: int, view: memoryview) -> None:
        self._device.copy(self.address + offset, view)

    def free(self) -> None:
        if self.address:
            self._device.gpu.use()
            self._release()
            self.address = 0
            self._device.discard(self)

    @abstractmethod
    def export(self) -> int | None:
        """See ``Allocation``."""

    @abstractmethod
    def _release(self) -> None:
        """Give the memory back to the driver."""


class VmmAllocation(CudaAllocation):
    """cuMemCreate with a POSIX descriptor as its shareable handle."""

    kind = POSIX_FD

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        gpu, driver = device.gpu, device.gpu.driver
        wanted = allocation_properties(driver, gpu.ordinal)
        self._type = wanted.requestedHandleTypes
        border = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = int(call(driver.cuMemGetAllocationGranularity, wanted, border))
        super().__init__(device, nbytes, max(-(-nbytes // unit), 1) * unit)
        self._handle = call(driver.cuMemCreate, self.size, wanted, 0)
        try:
            self.address = map_allocation(gpu, self._handle, self.size)
        except BaseException:
            driver.cuMemRelease(self._handle)
            raise

    def export(self) -> int:
        driver = self._device.gpu.driver
        self._device.gpu.use()
        fd = int(call(driver.cuMemExportToShareableHandle, self._handle, self._type, 0))
        os.set_inheritable(fd, False)
        return fd

    def _release(self) -> None:
        unmap_allocation(self._device.gpu, self.address, self.size)
        call(self._device.gpu.driver.cuMemRelease, self._handle)


class AdoptedAllocation(CudaAllocation):
    """The handle of an earlier loaderd's allocation: keeps it counted, and is not mapped here."""

    kind = POSIX_FD

    def __init__(self, device: CudaDevice, nbytes: int, size: int, handle: Any) -> None:
        super().__init__(device, nbytes, size)
        self._handle: Any = handle

    def write(self, offset: int, view: memoryview) -> None:
        raise Unavailable(f"memory of {self._device.name} that an earlier loaderd filled is not written to again")

    def export(self) -> None:
        """Its sandbox has it already."""

    def free(self) -> None:
        if self._handle is not None:
            self._device.gpu.use()
            self._release()
            self._handle = None
            self._device.discard(self)

    def _release(self) -> None:
        call(self._device.gpu.driver.cuMemRelease, self._handle)


class IpcAllocation(CudaAllocation):
    """cuMemAlloc, handed over by its IPC handle."""

    kind = CUDA_IPC

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        driver = device.gpu.driver
        super().__init__(device, nbytes, max(-(-nbytes // memory.HUGE_PAGE), 1) * memory.HUGE_PAGE)
        self.address = int(call(driver.cuMemAlloc, self.size))
        try:
            self.handle = ipc_bytes(driver, call(driver.cuIpcGetMemHandle, self.address))
        except BaseException:
            driver.cuMemFree(self.address)
            raise

    def export(self) -> None:
        """No descriptor: see ``handle``."""

    def _release(self) -> None:
        call(self._device.gpu.driver.cuMemFree, self.address)


def allocation_properties(driver: Any, ordinal: int) -> Any:
    """Memory on one GPU that can be exported as a POSIX descriptor."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return wanted


def cuda_devices(wanted: str) -> list[CudaDevice]:
    """``all``, or the numbers of GPUs (``0,2``). Raises ``InvalidRequest`` or ``Unavailable``."""
    driver = open_driver()
    count = int(call(driver.cuDeviceGetCount))
    try:
        numbers = list(range(count)) if wanted == "all" else [int(number) for number in wanted.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"CUDA devices are written as all, or as numbers (0,2), not {wanted!r}") from error
    if missing := [number for number in numbers if not 0 <= number < count]:
        raise Unavailable(f"CUDA devices {missing} are not here, {count} are")
    with contextlib.ExitStack() as made:
        devices = []
        for number in numbers:
            devices.append(CudaDevice(driver, number))
            made.callback(devices[-1].close)
        made.pop_all()
    return devices

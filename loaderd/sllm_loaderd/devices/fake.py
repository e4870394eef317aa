"""Fake devices: memory is a memfd for each partition, the link a token bucket. For tests, and where there is no GPU.

They stand in for the copy and for its time, and for nothing else: no kernel runs there. On only by a setting.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from dataclasses import dataclass
from typing import Final

from sllm_loaderd.client import memory
from sllm_loaderd.devices.link import Link
from sllm_loaderd.sealed import adopt_sealed, create_sealed, is_sealed
from sllm_runtime.protocol.errors import Conflict, DeviceOutOfMemory, InvalidRequest
from sllm_runtime.protocol.loader import MEMFD, link_of

MEMFD_NAME: Final = "sllm-fake-device"
_UNITS: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SPECIFICATION: Final = re.compile(r"(\d+)x(\d+)([KMG]iB)@(\d+(?:\.\d+)?)([KMG]B)/s", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FakeSpecification:
    """``count`` devices of ``nbytes`` each behind links of ``bandwidth`` bytes per second."""

    count: int
    nbytes: int
    bandwidth: float


def parse_fake_devices(text: str) -> FakeSpecification:
    """``4x2GiB@8GB/s``: four devices of 2 GiB behind links of 8 GB/s. Raises ``InvalidRequest``."""
    match = _SPECIFICATION.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"fake devices are written COUNTxSIZE@BANDWIDTH, as 4x2GiB@8GB/s, not {text!r}")
    count, size, size_unit, speed, speed_unit = match.groups()
    found = FakeSpecification(
        int(count), int(size) * _UNITS[size_unit.upper()], float(speed) * _UNITS[speed_unit.upper()]
    )
    if not (1 <= found.count <= 64 and found.nbytes and found.bandwidth):
        raise InvalidRequest(f"fake devices are 1 to 64, with memory and bandwidth above 0, not {text!r}")
    return found


class FakeDevice:
    """``Device`` in shared memory."""

    threads = 2
    """One copies while the other waits for the link."""
    uuid = b""

    def __init__(self, ordinal: int, limit: int, link: Link) -> None:
        self.name = f"fake:{ordinal}"
        self.path = link_of(self.name)
        self.limit = limit
        self.link = link
        self._lock = threading.Lock()
        self._allocations: set[FakeAllocation] = set()

    @property
    def used(self) -> int:
        with self._lock:
            return sum(allocation.size for allocation in self._allocations)

    def allocate(self, nbytes: int) -> FakeAllocation:
        """A memfd that only this process can write. Raises ``DeviceOutOfMemory``."""
        size = max(-(-nbytes // memory.HUGE_PAGE), 1) * memory.HUGE_PAGE
        with self._lock:
            taken = sum(allocation.size for allocation in self._allocations)
            if taken + size > self.limit:
                raise DeviceOutOfMemory(
                    f"{self.name} has {self.limit} bytes, {taken} in {len(self._allocations)} partitions; {size} more"
                    " are needed. Stop instances on it, or load to another device",
                    field="device",
                    retry_after_s=1.0,
                )
            fd, address = create_sealed(MEMFD_NAME, size)
            memory.advise(address, size, memory.MADV_HUGEPAGE)  # its pages come with the first copy
            made = FakeAllocation(self, nbytes, size, fd, address)
            self._allocations.add(made)
            return made

    def adopt(self, fd: int, nbytes: int, size: int) -> FakeAllocation:
        """A memfd that an earlier loaderd sealed, mapped read-only: its seal refuses anything else."""
        if os.fstat(fd).st_size != size or not 0 < nbytes <= size or not is_sealed(fd):
            raise Conflict(
                f"a descriptor is no memory of {self.name}: {size} bytes with the seals of one", field="device"
            )
        made = FakeAllocation(self, nbytes, size, *adopt_sealed(fd, size))
        with self._lock:
            self._allocations.add(made)
        return made

    def discard(self, allocation: FakeAllocation) -> None:
        """It was freed."""
        with self._lock:
            self._allocations.discard(allocation)

    def register(self, address: int, nbytes: int) -> None:
        """Nothing: this link copies from any memory."""

    def unregister(self, address: int) -> None:
        """Nothing."""

    def close(self) -> None:
        with self._lock:
            left = list(self._allocations)
        for allocation in left:
            allocation.free()


class FakeAllocation:
    """A sealed memfd, as a chunk is: who is given it maps it privately and cannot change what others see."""

    kind = MEMFD
    handle = b""
    shareable = True

    def __init__(self, device: FakeDevice, nbytes: int, size: int, fd: int, address: int) -> None:
        self.nbytes = nbytes
        self.size = size
        self._device = device
        self._fd, self._address = fd, address

    @property
    def view(self) -> memoryview | None:
        return memory.view(self._address, self.nbytes) if self.shareable else None

    def export(self) -> int:
        return os.dup(self._fd)

    def write(self, offset: int, view: memoryview) -> None:
        until = self._device.link.take(len(view))
        # ctypes gives up the GIL for the copy; slicing a memoryview would not, and links could not work in parallel.
        ctypes.memmove(self._address + offset, memory.address_of(view), len(view))
        self._device.link.wait(until)

    def free(self) -> None:
        if self._fd >= 0:
            memory.unmap(self._address, self.size)
            os.close(self._fd)
            self._fd = -1
            self._device.discard(self)


def fake_devices(specification: FakeSpecification) -> list[FakeDevice]:
    """Devices ``fake:0`` … with links of their own."""
    return [
        FakeDevice(number, specification.nbytes, Link(specification.bandwidth)) for number in range(specification.count)
    ]

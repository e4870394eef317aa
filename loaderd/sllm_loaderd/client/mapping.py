"""A partition's memory in this process: private, writable, and gone when its last user is."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

from sllm_loaderd.client import memory
from sllm_runtime.protocol.errors import Cancelled


class PartitionMemory(Protocol):
    """Where a load's bytes are: `Mapping` (chunks, fake devices) or `cuda.CudaMemory`."""

    @property
    def address(self) -> int:
        """Where it begins, in this process or on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes of the partition."""

    def populate(self, offset: int, nbytes: int) -> None:
        """Make the first use of ready bytes cheap."""

    def exporter(self) -> Any:
        """What tensors are made of: a buffer (``torch.frombuffer``), or an object with ``__cuda_array_interface__``
        (``torch.as_tensor``), of ``nbytes`` unsigned bytes. It keeps the memory alive. Raises ``Cancelled`` after
        ``release``."""

    def release(self) -> None:
        """Give up this object's own share; repeatable. The memory goes with the last exporter."""


class Mapping:
    """Address space for one partition, from a 2 MiB border on.

    Chunks not loaded stay untouchable: reading them is a segmentation fault, never a wrong number.

    The memory is given back when neither this object nor a buffer of it (``exporter``) is referenced any more.
    """

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        self.nbytes = nbytes
        self._chunk_bytes = chunk_bytes
        self._size = max(-(-nbytes // chunk_bytes), 1) * chunk_bytes
        self.address = memory.reserve(self._size)
        self._region: _Region | None = _Region(self.address, self._size)

    def place(self, number: int, fd: int) -> None:
        """Map a chunk where it belongs and close its descriptor."""
        try:
            memory.map_private(self.address + number * self._chunk_bytes, fd, self._chunk_bytes)
        finally:
            os.close(fd)

    def placed(self) -> None:
        """All is in place: let the kernel use huge pages where the chunks have them. Small chunks cannot."""
        if self._chunk_bytes % memory.HUGE_PAGE == 0:
            memory.advise(self.address, self._size, memory.MADV_HUGEPAGE)

    def populate(self, offset: int, nbytes: int) -> None:
        """Fill in the page tables of ready bytes, so that the first reader does not have to fault for them."""
        page = os.sysconf("SC_PAGE_SIZE")
        start = offset // page * page
        memory.advise(self.address + start, offset + nbytes - start, memory.MADV_POPULATE_READ)

    def exporter(self) -> ctypes.Array[ctypes.c_ubyte]:
        """A buffer over the whole partition that keeps the mapping alive, as does all that is made from it.

        Raises ``Cancelled`` after ``release``.
        """
        buffer = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        if self._region is None:
            raise Cancelled("this mapping was given back")
        weakref.finalize(buffer, _keep, self._region).atexit = False
        return buffer

    def release(self) -> None:
        """Give up this object's own share; repeatable. The memory goes with the last buffer."""
        self._region = None


class _Region:
    """Reserved address space, unmapped when nobody refers to this object any more."""

    def __init__(self, address: int, size: int) -> None:
        # At the end of the process the kernel does it, after all threads.
        weakref.finalize(self, memory.unmap, address, size).atexit = False


def _keep(region: _Region) -> None:
    """What a finalizer refers to lives until it has run; there is nothing else to do."""

"""Where weights end up beside the chunks: `Device` in loaderd (no torch), and how a worker makes tensors of it.

One file per kind of device: `fake` (shared memory with a bandwidth), `cuda`. For `cpu` the chunks themselves are the
memory. `tensors` is the worker's half and the only one that imports torch.
"""

from __future__ import annotations

from typing import Protocol


class Allocation(Protocol):
    """Memory of one partition on one device. Safe to use from several threads."""

    @property
    def nbytes(self) -> int:
        """What was asked for."""

    @property
    def size(self) -> int:
        """What it takes of the device."""

    @property
    def kind(self) -> str:
        """How it is handed over: ``protocol.loader`` MEMFD, POSIX_FD or CUDA_IPC."""

    @property
    def handle(self) -> bytes:
        """What stands in for a descriptor: CUDA_IPC only, else empty."""

    @property
    def shareable(self) -> bool:
        """Whether who is given it cannot change what another one sees, so that several sandboxes may have it."""

    @property
    def view(self) -> memoryview | None:
        """Its bytes, where nobody but a loaderd could ever write to them; None: they cannot be trusted unseen."""

    def export(self) -> int | None:
        """A new descriptor for SCM_RIGHTS, which the caller owns; None for CUDA_IPC. Raises ``OSError``."""

    def write(self, offset: int, view: memoryview) -> None:
        """Copy ``view`` to ``offset``; returns when the bytes are in device memory. Raises ``Unavailable``.

        Called by the threads of the device's path.
        """

    def free(self) -> None:
        """Give the memory back. No write may be under way. Repeatable."""


class Device(Protocol):
    """One device of this node, as loaderd sees it."""

    @property
    def name(self) -> str:
        """What a load calls it: ``fake:0``, ``cuda:0``."""

    @property
    def path(self) -> str:
        """Its copy queue: ``link fake:0``."""

    @property
    def uuid(self) -> bytes:
        """What it is called by its driver, in every process; empty for a fake one."""

    @property
    def threads(self) -> int:
        """Threads that its path is to have."""

    @property
    def limit(self) -> int:
        """Bytes of its memory."""

    @property
    def used(self) -> int:
        """Bytes of it that allocations of this loaderd take."""

    def allocate(self, nbytes: int) -> Allocation:
        """Memory for ``nbytes``. Raises ``DeviceOutOfMemory``, taking none."""

    def adopt(self, fd: int, nbytes: int, size: int) -> Allocation:
        """What an earlier loaderd allocated and exported; ``fd`` stays the caller's. It counts, even above the limit.

        It is not written to. Raises ``Conflict`` for what is no such memory.
        """

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory that will be copied from (a chunk, once per chunk and node). Raises ``Unavailable``."""

    def unregister(self, address: int) -> None:
        """Unpin it, before it is unmapped."""

    def close(self) -> None:
        """Give back what the device holds; every allocation is freed."""

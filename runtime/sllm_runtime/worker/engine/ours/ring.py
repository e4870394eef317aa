"""Rows of activations in memory that two processes share: a sealed memfd of slots, one writes, the other reads.

Who may use which slot follows from the order of steps, so there is no lock: a slot is written again only when its step
has come back to the head. The message that says so orders the memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.stages import Hello

SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10
"""And FUTURE_WRITE, which the module has no name for: no second process writes, nobody makes it shorter."""


@dataclass(frozen=True, slots=True)
class Slots:
    """``count`` times at most ``rows`` rows of ``hidden`` numbers."""

    count: int
    rows: int
    hidden: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hello: Hello) -> Slots:
        """What ``hello`` says. Raises ``ProtocolError`` for what is no dtype of activations."""
        dtype = getattr(torch, hello.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ProtocolError(f"{hello.dtype!r} is no dtype of activations")
        return cls(hello.slots, hello.rows, hello.hidden, dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the whole."""
        return self.count, self.rows, self.hidden

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.hidden * self.dtype.itemsize


def create(slots: Slots) -> tuple[int, torch.Tensor]:
    """The writer's end: a descriptor to be sent, which the caller owns, and the slots' memory. Raises ``OSError``."""
    fd = os.memfd_create("sllm-stage", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, slots.nbytes)
        memory = mmap.mmap(fd, slots.nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, _tensor(memory, slots)


def attach(fd: int, slots: Slots) -> torch.Tensor:
    """The reader's end of ``fd``, which stays the caller's. Raises ``ProtocolError`` if it is not what ``create``
    makes: no sender can shorten what is mapped here."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False
    if not sealed or os.fstat(fd).st_size != slots.nbytes:
        raise ProtocolError(f"a stage's memory is no sealed memfd of {slots.nbytes} bytes")
    # Private and writable: torch takes no read-only memory. Nobody writes here, so no page is ever copied.
    return _tensor(mmap.mmap(fd, slots.nbytes, access=mmap.ACCESS_COPY), slots)


def _tensor(memory: mmap.mmap, slots: Slots) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=slots.dtype).view(slots.shape)

"""Memfds that only the process which made them can write to, by whatever name others open them."""

from __future__ import annotations

import fcntl
import os
from typing import Final

from sllm_loaderd.client import memory

SEALS: Final = 0x1 | 0x2 | 0x4 | 0x10
"""SEAL, SHRINK, GROW, FUTURE_WRITE: no new writable mapping, no write(), no change of size, no further seal."""


def create_sealed(name: str, nbytes: int, *, huge: bool = False) -> tuple[int, int]:
    """A sealed memfd and the address of its only writable mapping. Raises ``OSError``.

    ``huge``: with pages of 2 MiB where the kernel gives them; ``nbytes`` must be a multiple of that.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        address = memory.map_shared_huge(fd, nbytes) if huge else memory.map_shared(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, address


def adopt_sealed(fd: int, nbytes: int) -> tuple[int, int]:
    """A duplicate of the sealed memfd ``fd`` and the address of a mapping that can only be read. Raises ``OSError``."""
    kept = os.dup(fd)
    try:
        return kept, memory.map_readable(kept, nbytes)
    except OSError:
        os.close(kept)
        raise


def is_sealed(fd: int) -> bool:
    """Whether it has the seals of ``create_sealed``; what cannot have any has not."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False

"""What this machine's kernel and driver give of what a load can use: tried out for the record, nothing assumed.

A GPU may be in a container or a sandbox whose kernel lacks some of it; a table of times says then which.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks import page_cache
from benchmarks.programs import ProgramFailed
from sllm_loaderd.client import memory
from sllm_loaderd.client.cuda_driver import Gpu, call, open_driver
from sllm_loaderd.huge_pages import SHMEM_ENABLED
from sllm_loaderd.sealed import create_sealed, is_sealed
from sllm_runtime.protocol.errors import SllmError

YES: Final = "yes"
_IO_URING_SETUP: Final = 425
"""The same number on every architecture."""
_PARAMS: Final = 120
"""Bytes of struct io_uring_params."""
_SIZE: Final = 2**20


def abilities(directory: Path) -> dict[str, str]:
    """By name ``yes``, or why not: of this kernel, of the file system of ``directory``, and of the first GPU."""
    tried: dict[str, Callable[[], str]] = {
        "memfd seals": _seals,
        "shmem huge pages": _huge_pages,
        "io_uring": _io_uring,
        "O_DIRECT": lambda: _on_file(directory, _direct),
        "page cache can be dropped": lambda: _on_file(directory, _drop),
        "VMM export": _vmm_export,
    }
    return {name: _tried(attempt) for name, attempt in tried.items()}


def _tried(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except OSError as error:
        return f"no: {error.strerror or error}"
    except (SllmError, ProgramFailed) as error:
        return f"no: {error}"


def _seals() -> str:
    """Those of a chunk, behind which nobody else writes."""
    fd, address = create_sealed("abilities", _SIZE)
    try:
        if not is_sealed(fd):
            return "no: the seals are not there"
        os.pwrite(fd, b"x", 0)
    except PermissionError:
        return YES
    finally:
        memory.unmap(address, _SIZE)
        os.close(fd)
    return "no: a sealed memfd could be written"


def _huge_pages() -> str:
    """As the administrator has set them; loaderd sets ``advise`` where it may."""
    return SHMEM_ENABLED.read_text().strip()


def _io_uring() -> str:
    """A ring of one entry."""
    if sys.platform != "linux":
        return "no: no Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_IO_URING_SETUP, 1, ctypes.create_string_buffer(_PARAMS))
    if fd < 0:
        return f"no: {os.strerror(ctypes.get_errno())}"
    os.close(fd)
    return YES


def _on_file(directory: Path, attempt: Callable[[Path], str]) -> str:
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(bytes(_SIZE))
        file.flush()
        os.fsync(file.fileno())
        return attempt(Path(file.name))


def _direct(file: Path) -> str:
    page_cache.direct_read(file, 1, _SIZE)
    return YES


def _drop(file: Path) -> str:
    page_cache.drop(file, settle_s=1.0)
    return YES


def _vmm_export() -> str:
    """Whether a GPU's memory can be handed on as a descriptor."""
    driver = open_driver()
    if not call(driver.cuDeviceGetCount):
        return "no: no GPU"
    gpu = Gpu(driver, 0)
    try:
        wanted = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        missing = [name for name in wanted if not gpu.has(name)]
    finally:
        gpu.close()
    return f"no: {missing[0]} is not set" if missing else YES

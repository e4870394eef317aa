"""From what loaderd says of a partition's memory on a device to that memory in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sllm_loaderd.client.mapping import Mapping, PartitionMemory
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.loader import CUDA_IPC, MEMFD, POSIX_FD, DeviceMemory


def open_device_memory(message: DeviceMemory, fds: Sequence[int]) -> PartitionMemory:
    """The memory of ``message``; ``fds`` are closed here. Raises ``ProtocolError`` or ``Unavailable``."""
    left = list(fds)
    try:
        if message.kind == MEMFD and left:
            mapping = Mapping(message.nbytes, message.size)
            mapping.place(0, left.pop())
            mapping.placed()
            return mapping
        if (message.kind == POSIX_FD and left) or message.kind == CUDA_IPC:
            from sllm_loaderd.client.cuda import import_cuda  # the driver's bindings are there only where a GPU is

            return import_cuda(message, left[0] if left else None)
    finally:
        for fd in left:
            os.close(fd)
    raise ProtocolError(f"memory of {message.device} comes as {message.kind!r} with {len(fds)} descriptors")

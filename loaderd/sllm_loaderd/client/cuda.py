"""A partition in GPU memory, imported by the worker once: a device address, and nothing copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from sllm_loaderd.client.cuda_driver import Gpu, call, ipc_handle, map_allocation, open_driver, unmap_allocation
from sllm_runtime.protocol.errors import Cancelled, Unavailable
from sllm_runtime.protocol.loader import POSIX_FD, DeviceMemory


class CudaMemory:
    """``PartitionMemory`` on a GPU. Unmapped when neither this object nor an exporter of it is referenced any more."""

    def __init__(self, address: int, nbytes: int, region: _Region) -> None:
        self.address = address
        self.nbytes = nbytes
        self._region: _Region | None = region

    def populate(self, offset: int, nbytes: int) -> None:
        """Nothing: a GPU's page tables are complete when the memory is mapped."""

    def exporter(self) -> CudaBytes:
        """Raises ``Cancelled`` after ``release``."""
        if self._region is None:
            raise Cancelled("this memory was given back")
        return CudaBytes(self.address, self.nbytes, self._region)

    def release(self) -> None:
        self._region = None


class CudaBytes:
    """uint8 [nbytes] for ``torch.as_tensor``, which keeps this object for as long as a tensor lives."""

    def __init__(self, address: int, nbytes: int, region: _Region) -> None:
        self._region = region
        self.device = f"cuda:{region.gpu.ordinal}"
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (nbytes,), "strides": None, "typestr": "|u1", "data": (address, False)
        }  # fmt: skip


class _Region:
    """What has to be undone when nobody refers to the memory any more."""

    def __init__(self, gpu: Gpu, undo: Callable[..., None], *arguments: int) -> None:
        self.gpu = gpu
        # At the end of the process the driver does it.
        weakref.finalize(self, _give_back, gpu, undo, *arguments).atexit = False


def _give_back(gpu: Gpu, undo: Callable[..., None], *arguments: int) -> None:
    gpu.use()
    undo(gpu, *arguments)
    gpu.close()


def import_cuda(message: DeviceMemory, fd: int | None) -> CudaMemory:
    """The memory that loaderd exported; the caller closes ``fd``. Raises ``Unavailable``."""
    gpu = _gpu(message)
    try:
        gpu.use()
        if message.kind == POSIX_FD:
            address = _import_posix_fd(gpu, fd, message.size)
            region = _Region(gpu, unmap_allocation, address, message.size)
        else:
            address = _import_ipc(gpu, message.handle)
            region = _Region(gpu, _close_ipc, address)
    except BaseException:
        gpu.close()
        raise
    return CudaMemory(address, message.nbytes, region)


def _import_posix_fd(gpu: Gpu, fd: int | None, size: int) -> int:
    driver = gpu.driver
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = call(driver.cuMemImportFromShareableHandle, fd, kind)
    try:
        return map_allocation(gpu, handle, size)
    finally:
        call(driver.cuMemRelease, handle)  # the mapping keeps the memory


def _import_ipc(gpu: Gpu, exported: bytes) -> int:
    handle = ipc_handle(gpu.driver, exported)
    lazy = gpu.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    return int(call(gpu.driver.cuIpcOpenMemHandle, handle, lazy))


def _close_ipc(gpu: Gpu, address: int) -> None:
    call(gpu.driver.cuIpcCloseMemHandle, address)


def _gpu(message: DeviceMemory) -> Gpu:
    """The GPU of ``message`` among those that this process sees, whatever number it has here."""
    driver = open_driver()
    for ordinal in range(call(driver.cuDeviceGetCount)):
        device = call(driver.cuDeviceGet, ordinal)
        if bytes(call(driver.cuDeviceGetUuid, device).bytes) == message.uuid:
            return Gpu(driver, ordinal)
    raise Unavailable(f"{message.device} is not among the GPUs of this process; see CUDA_VISIBLE_DEVICES")

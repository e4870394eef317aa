"""The CUDA driver through `cuda.bindings`, imported only when a CUDA device is asked for. No torch, no runtime API."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, Final

from sllm_runtime.protocol.errors import DeviceOutOfMemory, ProtocolError, Unavailable

PINNED_ALREADY: Final = ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
"""Pinning is portable: another device of this process may have done it, or undone it."""


def import_driver() -> Any:
    """The module `cuda.bindings.driver`, which can be imported before a fork. Raises ``ImportError``."""
    return importlib.import_module("cuda.bindings.driver")


def open_driver() -> Any:
    """The module `cuda.bindings.driver`, initialised. Raises ``Unavailable``."""
    try:
        driver = import_driver()
        status = driver.cuInit(0)[0]
    except (ImportError, RuntimeError) as error:  # no package, or no libcuda beside it
        raise Unavailable(
            f"CUDA cannot be used here: {error}; install sllm[cuda] and NVIDIA's driver, or ask for no CUDA device"
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"CUDA cannot be used here: cuInit says {status.name}; see nvidia-smi")
    return driver


def call(function: Callable[..., Any], *arguments: Any, passing: tuple[str, ...] = ()) -> Any:
    """What a driver call returns behind its status. Raises ``DeviceOutOfMemory`` or ``Unavailable``.

    ``passing``: names of errors that are none here.
    """
    status, *values = function(*arguments)
    if status.value != 0 and status.name not in passing:
        kind = DeviceOutOfMemory if status.name == "CUDA_ERROR_OUT_OF_MEMORY" else Unavailable
        raise kind(f"{function.__name__}: {status.name}; see nvidia-smi for who uses the device", field="device")
    return values[0] if len(values) == 1 else tuple(values)


class Gpu:
    """One GPU in this process: its primary context, retained until ``close``."""

    def __init__(self, driver: Any, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.device = call(driver.cuDeviceGet, ordinal)
        self.uuid = bytes(call(driver.cuDeviceGetUuid, self.device).bytes)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self.device)

    def use(self) -> None:
        """Make its context the one of this thread."""
        call(self.driver.cuCtxSetCurrent, self._context)

    def has(self, attribute: str) -> bool:
        """Whether ``CU_DEVICE_ATTRIBUTE_<attribute>`` is set."""
        kind = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return bool(call(self.driver.cuDeviceGetAttribute, kind, self.device))

    def close(self) -> None:
        """Give the context back."""
        call(self.driver.cuDevicePrimaryCtxRelease, self.device)


def map_allocation(gpu: Gpu, handle: Any, size: int) -> int:
    """Map a VMM allocation where this GPU may read and write it; the device address. Raises ``Unavailable``."""
    driver = gpu.driver
    address = call(driver.cuMemAddressReserve, size, 0, 0, 0)
    try:
        call(driver.cuMemMap, address, size, 0, handle, 0)
        try:
            call(driver.cuMemSetAccess, address, size, [access_description(driver, gpu.ordinal)], 1)
        except BaseException:
            driver.cuMemUnmap(address, size)
            raise
    except BaseException:
        driver.cuMemAddressFree(address, size)
        raise
    return int(address)


def access_description(driver: Any, ordinal: int) -> Any:
    """Reading and writing by one GPU."""
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def unmap_allocation(gpu: Gpu, address: int, size: int) -> None:
    """Undo ``map_allocation``."""
    call(gpu.driver.cuMemUnmap, address, size)
    call(gpu.driver.cuMemAddressFree, address, size)


def ipc_bytes(driver: Any, handle: Any) -> bytes:
    """An IPC handle as it travels. The bindings give the address of the structure, not its bytes."""
    return ctypes.string_at(int(handle.getPtr()), driver.CU_IPC_HANDLE_SIZE)


def ipc_handle(driver: Any, travelled: bytes) -> Any:
    """Its reverse. Raises ``ProtocolError`` for bytes that are no handle."""
    if len(travelled) != driver.CU_IPC_HANDLE_SIZE:
        raise ProtocolError(f"a CUDA IPC handle has {driver.CU_IPC_HANDLE_SIZE} bytes, not {len(travelled)}")
    handle = driver.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), travelled, len(travelled))
    return handle

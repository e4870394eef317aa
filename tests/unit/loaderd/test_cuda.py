"""A real GPU: memory that loaderd allocates and another process imports. Skipped, with the reason, where there is none.

What does not need a GPU of the way to one is tested with fake devices: `test_devices.py`, `test_device_loads.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sllm_loaderd.client import cuda as cuda_client
from sllm_loaderd.client import cuda_driver, memory
from sllm_loaderd.client.cuda_driver import PINNED_ALREADY, access_description, call, ipc_bytes, ipc_handle, open_driver
from sllm_loaderd.devices import cuda as cuda_device
from sllm_loaderd.devices.cuda import CudaAllocation, CudaDevice, IpcAllocation, VmmAllocation, cuda_devices
from sllm_loaderd.devices.tensors import bind
from sllm_loaderd.sealed import create_sealed
from sllm_runtime.protocol.errors import DeviceOutOfMemory, ProtocolError, Unavailable
from sllm_runtime.protocol.limits import CHUNK_BYTES, MIB
from tests.fixtures.loaderd import loaderd, numbers_model, session, small_checkpoint

IMPORTER = """
import hashlib, sys
from sllm_loaderd.client.cuda_driver import call, open_driver
from sllm_loaderd.client.device_memory import open_device_memory
from sllm_runtime.protocol.loader import DeviceMemory
size, nbytes, fd = (int(text) for text in sys.argv[2:5])
memory = open_device_memory(
    DeviceMemory(request=1, device="cuda:0", nbytes=nbytes, size=size, kind=sys.argv[1],
                 uuid=bytes.fromhex(sys.argv[5]), handle=bytes.fromhex(sys.argv[6])),
    [fd] if fd >= 0 else [],
)
interface = memory.exporter().__cuda_array_interface__
assert interface["shape"] == (nbytes,) and interface["typestr"] == "|u1"
host = bytearray(nbytes)
call(open_driver().cuMemcpyDtoH, host, interface["data"][0], nbytes)
print(hashlib.sha256(host).hexdigest())
memory.release()
"""


def test_without_cuda_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # as where sllm[cuda] is not installed
    with pytest.raises(Unavailable, match=r"sllm\[cuda\]"):
        open_driver()
    with pytest.raises(Unavailable, match=r"sllm\[cuda\]"):
        cuda_devices("all")


def test_an_ipc_handle_travels_as_its_bytes() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed (sllm[cuda])")
    travelled = os.urandom(driver.CU_IPC_HANDLE_SIZE)
    assert ipc_bytes(driver, ipc_handle(driver, travelled)) == travelled
    with pytest.raises(ProtocolError, match="64 bytes"):
        ipc_handle(driver, travelled[:-1])


def test_the_bindings_have_what_is_used_of_them() -> None:
    """Names and attributes change between releases of the bindings; this needs the package, not a GPU."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed (sllm[cuda])")
    prop, access = cuda_device.allocation_properties(driver, 3), access_description(driver, 3)
    assert (prop.location.id, access.location.id) == (3, 3)
    assert prop.location.type == access.location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert len(bytes(driver.CUuuid().bytes)) in (0, 16)
    assert set(PINNED_ALREADY) <= {result.name for result in driver.CUresult}
    code = "".join(inspect.getsource(module) for module in (cuda_client, cuda_driver, cuda_device))
    used = set(re.findall(r"\bdriver\.((?:cu|CU)\w+(?:\.CU\w+)?)", code))
    assert len(used) > 25
    assert [name for name in sorted(used) if not has(driver, name)] == []


def has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    try:
        found = cuda_devices("0")
    except Unavailable as error:
        pytest.skip(f"no GPU: {error.message}")
    with contextlib.closing(found[0]) as opened:
        yield opened


@pytest.fixture
def chunk(device: CudaDevice) -> Iterator[memoryview]:
    """A chunk as the pool has them, pinned."""
    fd, address = create_sealed("chunk", CHUNK_BYTES)
    view = memory.view(address, CHUNK_BYTES)
    view[:] = os.urandom(CHUNK_BYTES)
    device.register(address, CHUNK_BYTES)
    device.register(address, CHUNK_BYTES)
    yield view
    device.unregister(address)
    view.release()
    memory.unmap(address, CHUNK_BYTES)
    os.close(fd)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [VmmAllocation, IpcAllocation])
def test_another_process_sees_what_was_copied(device: CudaDevice, chunk: memoryview, kind: Any) -> None:
    import hashlib

    nbytes = CHUNK_BYTES + MIB
    allocation: CudaAllocation = kind(device, nbytes)
    fd = allocation.export()
    try:
        allocation.write(0, chunk)
        allocation.write(CHUNK_BYTES, chunk[:MIB])
        words = [allocation.kind, allocation.size, nbytes, -1 if fd is None else fd, device.uuid.hex()]
        done = subprocess.run(
            [sys.executable, "-c", IMPORTER, *map(str, words), allocation.handle.hex()],
            pass_fds=[] if fd is None else [fd], capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == hashlib.sha256(bytes(chunk) + bytes(chunk[:MIB])).hexdigest()
    finally:
        if fd is not None:
            os.close(fd)
        allocation.free()
        allocation.free()


@pytest.mark.gpu
async def test_a_model_on_a_gpu_is_the_same_model(tmp_path: Path) -> None:
    """From its file over a daemon's chunks to tensors of a worker; as on fake devices, but nobody shares the memory."""
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    arrays = numbers_model(tmp_path / "same")
    async with loaderd(tmp_path, cuda_devices="0") as daemon:
        model = (await daemon.control.register(str(checkpoint))).model
        for _ in range(2):  # the second from memory
            async with session(daemon, model) as opened:
                load = opened.load(device="cuda:0")
                tensors = await asyncio.to_thread(bind, load)
                await asyncio.to_thread(load.wait_all)
                assert all(tensor.is_cuda for tensor in tensors.values())
                for name, array in arrays.items():
                    assert torch.equal(tensors[name].cpu(), torch.from_numpy(array)), name
                (used,) = [device.used for device in (await daemon.control.status()).devices]
                assert used >= load.attach().nbytes
            await daemon.control.gone("w")
            assert [device.used for device in (await daemon.control.status()).devices] == [0]


@pytest.mark.gpu
def test_more_than_the_gpu_has_is_a_typed_error(device: CudaDevice) -> None:
    with pytest.raises(DeviceOutOfMemory, match=r"cuda:0 has \d+ bytes"):
        device.allocate(device.limit * 2)
    assert device.used == 0
    device.allocate(MIB).free()


@pytest.mark.gpu
def test_memory_that_nobody_pinned_is_copied_too(device: CudaDevice) -> None:
    allocation = device.allocate(MIB)
    data = bytearray(os.urandom(MIB))
    allocation.write(0, memoryview(data))
    back = bytearray(MIB)
    call(device.gpu.driver.cuMemcpyDtoH, back, allocation.address, MIB)
    assert back == data
    allocation.free()

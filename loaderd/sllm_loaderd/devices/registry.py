"""The devices of this node: which there are is a setting, and a kind's code is imported only when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sllm_loaderd.devices import Device
from sllm_runtime.protocol.errors import Conflict
from sllm_runtime.protocol.loader import CPU, DeviceStatus


def open_devices(fake: str, cuda: str) -> list[Device]:
    """The devices that these two settings name. Raises ``InvalidRequest`` or ``Unavailable``."""
    opened: list[Device] = []
    if cuda:
        from sllm_loaderd.devices.cuda import cuda_devices

        opened += cuda_devices(cuda)
    if fake:
        from sllm_loaderd.devices.fake import fake_devices, parse_fake_devices

        opened += fake_devices(parse_fake_devices(fake))
    return opened


class Devices:
    """Devices by name, ``cpu`` not among them. Owns them."""

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self._devices = {device.name: device for device in devices}

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices.values())

    def get(self, name: str) -> Device:
        """The device called ``name``. Raises ``Conflict``."""
        device = self._devices.get(name)
        if device is None:
            there = ", ".join((CPU, *self._devices))
            raise Conflict(f"device {name!r} is not on this node, which has {there}", field="device")
        return device

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory for all of them. Raises ``Unavailable``."""
        for device in self._devices.values():
            device.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """Unpin it, before it is unmapped."""
        for device in self._devices.values():
            device.unregister(address)

    def status(self) -> tuple[DeviceStatus, ...]:
        """Memory of each."""
        return tuple(DeviceStatus(name=d.name, path=d.path, limit=d.limit, used=d.used) for d in self)

    def close(self) -> None:
        """Close all of them."""
        for device in self._devices.values():
            device.close()

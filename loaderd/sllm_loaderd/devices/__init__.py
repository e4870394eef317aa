"""Where weights end up. One file per kind of device; `cpu` is here, others implement the same protocol."""

from __future__ import annotations

from typing import Any, Protocol

from sllm_loaderd.client import SessionLoad


class Device(Protocol):
    """Makes tensors of a load's memory without copying a byte on the way."""

    @property
    def name(self) -> str:
        """What a load request calls it: ``cpu``, later ``cuda:0``, ``fake:0``."""

    def bind(self, load: SessionLoad, timeout: float) -> Any:
        """Tensors by name (ties and other names included) over the memory of ``load``.

        They may be used only after the load's ``wait`` for their block, and keep the memory alive. Raises
        ``DeadlineExceeded`` or the load's error.
        """

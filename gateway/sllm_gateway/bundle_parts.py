"""Nodes read bundles through gateways: JetStream would answer to any subject that a question names."""

from __future__ import annotations

from typing import Final

from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.node import BundlePart, ReadBundle

MOST: Final = 64
"""Parts that are read at a time, of 256 KiB; who asks beyond that asks again."""
_QUEUE: Final = "bundles"


class BundleParts:
    """Serves parts of bundles to invokers over NATS. ``start`` before use."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Serve, together with the other gateways. Raises ``Unavailable``."""
        self._subscription = await self._bus.serve(
            subjects.READ_BUNDLES, ReadBundle, self._part, queue=_QUEUE, concurrency=MOST, to_asker=True
        )

    async def close(self) -> None:
        """Serve no more."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def _part(self, asked: ReadBundle) -> BundlePart:
        return await bundles.part(self._bus, asked)

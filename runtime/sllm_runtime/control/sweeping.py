"""Bundles that nothing needs: what a killed gateway left half, what was uploaded and never deployed, is removed.

An upload under way grows within ``bundles.STILL_S``, and what it has brought is deployed in seconds; so what has lain
untouched and unneeded from one sweep to the next, minutes apart, is nobody's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from sllm_runtime.control import registry
from sllm_runtime.control.deploy import Deployments, remove_bundles
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import SllmError

log = logging.getLogger(__name__)

SWEEP_S: Final = 300.0
"""Well above ``bundles.STILL_S``."""


class Sweeps:
    """Sweeps every SWEEP_S (by ``pause``) from ``start`` to ``close``."""

    def __init__(
        self,
        loop: Loop,
        nodes: Nodes,
        deployments: Deployments,
        bus: Bus,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._loop, self._nodes, self._deployments, self._bus = loop, nodes, deployments, bus
        self._pause = pause
        self._parts: dict[str, int] = {}
        self._unneeded: frozenset[str] = frozenset()
        self._tasks = Tasks("sweeps")

    def start(self) -> None:
        self._tasks.start(self._run(), "sweep")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await self._pause(SWEEP_S)
            try:
                await self.sweep()
            except SllmError as error:
                log.warning("bundles were not swept: %s", error.message)

    async def sweep(self) -> None:
        """Remove what was unneeded at the last sweep too. Raises ``Unavailable``."""
        unneeded = self._not_needed(await bundles.names(self._bus))
        # A deposed controller's view is old: what it does not know may be needed.
        if await self._nodes.deposed():
            return
        self._parts = await bundles.sweep(self._bus, self._parts)
        leave = sorted(self._not_needed(unneeded & self._unneeded))
        if leave:
            log.info("%d bundle(s) that no version needs are removed", len(leave))
        await remove_bundles(self._loop, self._bus, leave, self._deployments.needs)
        self._unneeded = unneeded - frozenset(leave)

    def _not_needed(self, names: frozenset[str]) -> frozenset[str]:
        unreached = registry.unreachable(self._loop.view, names)
        return frozenset(name for name in unreached if not self._deployments.needs(name))

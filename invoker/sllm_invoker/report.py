"""The node's report: the truth about its instances, sent at every change and every HEARTBEAT_S."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from sllm_runtime.protocol import limits
from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.loader import LISTS, fitting
from sllm_runtime.protocol.node import NodeStatus

log = logging.getLogger(__name__)

COALESCE_S: Final = 0.02
REST: Final = 4.0
"""Times as long as a report took none is sent: it has all instances, and a node may end a thousand at once."""


class Reporter:
    """``compose(sequence)`` makes the report, ``publish`` sends it. ``run`` until cancelled."""

    def __init__(self, compose: Callable[[int], NodeStatus], publish: Callable[[NodeStatus], Awaitable[None]]) -> None:
        self._compose = compose
        self._publish = publish
        self._changed = asyncio.Event()
        self._moved = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._counts_due = 0.0
        self._sequence = 0
        self._untold = 0

    def moved(self) -> None:
        """An instance is elsewhere in its life: whoever waits for that is told at once."""
        self._moved.set()
        self._changed.set()

    def changed(self) -> None:
        """Something else that the report says is different now, and somebody may look at it."""
        self._changed.set()

    def counted(self) -> None:
        """A number of running calls is different now. That an instance has its first one is told at once: a start
        elsewhere may want its place, and can neither move nor stop a call that nobody told it of."""
        if self._timer is None and not self._changed.is_set():
            self._timer = asyncio.get_running_loop().call_at(self._counts_due, self._changed.set)

    async def run(self) -> None:
        """A change that follows a quiet time is reported at once, those after it in COALESCE_S together, with the next
        instance that has moved if that is sooner: a start is as long as its last report is late."""
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            self._moved.clear()
            began = clock()
            await self.send()
            sent = clock()
            await asyncio.sleep(min(REST * (sent - began), COALESCE_S))
            try:
                async with asyncio.timeout_at(sent + COALESCE_S):
                    await self._moved.wait()
            except TimeoutError:
                pass
            try:
                async with asyncio.timeout(limits.HEARTBEAT_S - COALESCE_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def send(self) -> None:
        """One report now. A bus that is away gets the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._counts_due = asyncio.get_running_loop().time() + limits.COUNTS_S
        self._sequence += 1
        try:
            await self._publish(self._told(self._compose(self._sequence)))
        except Unavailable as error:
            log.debug("status: %s", error.message)
        except SllmError as error:
            log.error("this node's report cannot be sent: %s", error.message)

    def _told(self, status: NodeStatus) -> NodeStatus:
        told = fitted(status)
        if told.untold and not self._untold:
            log.warning("a report has no room for all models of this node: of %d it says nothing", told.untold)
        self._untold = told.untold
        return told


def fitted(status: NodeStatus, room: int = limits.MAX_MESSAGE) -> NodeStatus:
    """``status`` of so many models as ``room`` bytes can tell of: those in memory first, then those on the disk. A node
    that sends no report counts as silent."""
    if len(pack(status)) <= room:
        return status
    remote, copied = set(status.remote), status.copied
    models = (*status.resident, *(model for model in status.models if model not in remote), *status.models, *copied)
    lists = (status.models, status.remote, status.resident)
    parts = [*((model, model) for those in lists for model in those), *((each[0], each) for each in copied.items())]
    there = fitting(models, parts, room - len(pack(_of(status, set()))) - LISTS)
    return replace(_of(status, there), untold=status.untold + len({model for model, _ in parts} - there))


def _of(status: NodeStatus, models: set[str]) -> NodeStatus:
    """``status`` of ``models`` alone."""
    return replace(
        status,
        models=tuple(model for model in status.models if model in models),
        remote=tuple(model for model in status.remote if model in models),
        resident=tuple(model for model in status.resident if model in models),
        copied={model: nbytes for model, nbytes in status.copied.items() if model in models},
    )

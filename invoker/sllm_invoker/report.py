"""The node's report: the truth about its instances, sent at every change and every HEARTBEAT_S."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from sllm_runtime.protocol import limits, states
from sllm_runtime.protocol.clipping import clip
from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.loader import LISTS, fitting
from sllm_runtime.protocol.node import InstanceStatus, NodeStatus

log = logging.getLogger(__name__)

COALESCE_S: Final = 0.02
REST: Final = 4.0
"""Times as long as a report took none is sent: it has all instances, and a node may end a thousand at once."""
BRIEF_BYTES: Final = 200
"""Of an error in a report that has no room for more."""


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
        self._short = False

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
        short = told.instances is not status.instances
        if short and not self._short:
            log.warning("a report has no room for all that %d instances have to say", len(status.instances))
        self._untold, self._short = told.untold, short
        return told


def fitted(status: NodeStatus) -> NodeStatus:
    """``status`` in MAX_REPORT bytes: a node that sends no report counts as silent, and what it runs as lost.

    Its models and its instances have half each, and what the other leaves. Of models it tells of so many as there is
    room for, those in memory first, then those on the disk. Of instances, the first before the others, it cuts the
    errors of those that have ended; then leaves out what was told of a start when that was over; then those that have
    ended. Those that live are all told of.
    """
    room, whole = limits.MAX_REPORT, len(pack(status))
    if whole <= room:
        return status
    bare = _of(status, set())
    own = room - min(whole - len(pack(bare)), room // 2)
    for shorter in (_brief, _started, _alive):
        if (excess := len(pack(bare)) - own) <= 0:
            break
        bare = replace(bare, instances=_less(bare.instances, excess, shorter))
    return _with_models(replace(status, instances=bare.instances), room)


def _less(
    instances: tuple[InstanceStatus, ...],
    excess: int,
    shorter: Callable[[InstanceStatus], InstanceStatus | None],
) -> tuple[InstanceStatus, ...]:
    """``instances``, of which the first are ``shorter`` (None: left out): so many that it saves ``excess`` bytes."""
    kept = list[InstanceStatus]()
    for instance in instances:
        said = instance if excess <= 0 else shorter(instance)
        if said is not None:
            kept.append(said)
        if said is not instance:
            excess -= len(pack(instance)) - (0 if said is None else len(pack(said)))
    return tuple(kept)


def _brief(instance: InstanceStatus) -> InstanceStatus:
    error = instance.error
    if error is None:
        return instance
    return replace(instance, error=replace(error, message=clip(error.message, BRIEF_BYTES)))


def _started(instance: InstanceStatus) -> InstanceStatus:
    return replace(instance, spans=(), proof="")


def _alive(instance: InstanceStatus) -> InstanceStatus | None:
    return None if states.final(states.INSTANCE, instance.state) else instance


def _with_models(status: NodeStatus, room: int) -> NodeStatus:
    """``status`` of so many models as there is room for."""
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

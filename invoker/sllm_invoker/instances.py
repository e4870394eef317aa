"""All instances of one node: admitted, owned by a task each, remembered for a while when they have ended."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sllm_invoker.admission import Ledger, claim_of
from sllm_invoker.call import Call
from sllm_invoker.instance import Instance
from sllm_invoker.kernel_kills import KernelKills
from sllm_invoker.logs import InstanceLog, LogSink, Writer
from sllm_invoker.preparation import Suppliers
from sllm_invoker.surroundings import Surroundings
from sllm_invoker.work import Work
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import Draining
from sllm_runtime.protocol.node import InstanceStatus, StartInstance
from sllm_runtime.protocol.states import InstanceState

log = logging.getLogger(__name__)

KEEP_FINAL_S: Final = 60.0
"""An instance that ended stays in the report this long: the controller has certainly seen it by then."""
REMEMBERED: Final = 4096
"""Ids that are not begun a second time."""


class Instances:
    """Starts, finds, stops and reports instances. ``tick`` is called regularly."""

    def __init__(
        self,
        node: str,
        ledger: Ledger,
        suppliers: Suppliers,
        sink: LogSink,
        *,
        ready: Callable[[Call], None],
        consumed: Callable[[Call, int], None],
        moved: Callable[[], None],
        changed: Callable[[], None],
        counted: Callable[[], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.ledger = ledger
        self.draining = False
        self._node = node
        self._suppliers = suppliers
        self._sink = sink
        self._ready, self._consumed = ready, consumed
        self._moved, self._changed, self._counted = moved, changed, counted
        self._clock, self._wall = clock, wall
        self._instances: dict[str, Instance] = {}
        self._past: OrderedDict[str, InstanceStatus] = OrderedDict()
        self._tasks = Tasks(f"instances of {node}")
        self._ticked = clock()
        self._kills = KernelKills(clock)
        self._living: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()

    def __len__(self) -> int:
        """Those that have not ended."""
        return sum(each.ended_at is None for each in self._instances.values())

    def find(self, instance: str) -> Work | None:
        """Whose worker takes calls; None for one that has none (yet, or any more)."""
        found = self._instances.get(instance)
        return found.work if found is not None else None

    @property
    def functions(self) -> frozenset[str]:
        """Whose instances they are."""
        return frozenset(instance.order.function for instance in self._instances.values())

    @property
    def starting(self) -> tuple[StartInstance, ...]:
        """The orders of those that are not ready yet."""
        return tuple(i.order for i in self._instances.values() if i.state is InstanceState.STARTING)

    def statuses(self) -> tuple[InstanceStatus, ...]:
        """For the node's report: those that have ended come first, in that order."""
        found = sorted(self._instances.values(), key=lambda each: math.inf if each.ended_at is None else each.ended_at)
        return tuple(instance.status() for instance in found)

    def start(self, order: StartInstance) -> str:
        """Begin an instance; what happened, for people. One id is begun once.

        Raises ``NoCapacity`` if it does not fit, ``Draining`` if this node takes no more.
        """
        if order.instance in self._instances:
            return "it was begun before"
        if order.instance in self._past:
            return f"it has ended: {self._past[order.instance].state}"
        if self.draining:
            raise Draining(f"node {self._node} is shutting down")
        self.ledger = self.ledger.admit(order.instance, claim_of(order))
        writer = Writer(order.function, order.version, order.instance, self._node)
        around = Surroundings(
            suppliers=self._suppliers,
            log=InstanceLog(writer, self._sink, self._clock, self._wall),
            ready=self._ready,
            consumed=self._consumed,
            moved=self._moved,
            changed=self._changed,
            counted=self._counted,
            clock=self._clock,
            killed_for_memory=self._kills.recently,
        )
        instance = self._instances[order.instance] = Instance(order, around)
        living = self._tasks.start(self._live(instance), order.instance)
        self._living.add(living)
        living.add_done_callback(self._gone)
        self._changed()
        log.info("instance %s of %s v%d begins", order.instance, order.function, order.version)
        return "begun"

    async def _live(self, instance: Instance) -> None:
        try:
            await instance.run()
        finally:
            self.ledger = self.ledger.release(instance.order.instance)
            instance.freed()
            self._moved()

    def _gone(self, living: asyncio.Task[None]) -> None:
        self._living.discard(living)
        self._left.set()

    def reserve(self, nbytes: int) -> None:
        """``nbytes`` of the node's memory are loaderd's: instances to come share the rest."""
        self.ledger = replace(self.ledger, reserved=nbytes)

    def stop(self, instance: str, reason: str, grace_s: float, *, resume: bool = False) -> str:
        """Drain and end it; what happened, for people."""
        found = self._instances.get(instance)
        if found is None:
            return "this node has no such instance"
        found.stop(reason, grace_s, resume=resume)
        return f"it is {found.state}"

    def tick(self) -> None:
        """Judge silent workers, forget what ended long ago."""
        now = self._clock()
        stalled = now - self._ticked > limits.STALL_S
        self._ticked = now
        self._kills.look()
        for name, instance in list(self._instances.items()):
            if stalled:
                instance.forgive(now)
            instance.tick(now)
            if instance.ended_at is not None and now - instance.ended_at > KEEP_FINAL_S:
                del self._instances[name]
                self._past[name] = instance.status()
                instance.work = None  # they know each other: a collection would have to find them
                if len(self._past) > REMEMBERED:
                    self._past.popitem(last=False)

    async def leave(self, within_s: float) -> None:
        """Begin no more, and wait until all have ended, at most ``within_s``. The controller, which hears of it, ends
        them: calls that can be carried go on at other nodes."""
        self.draining = True
        self._changed()
        try:
            async with asyncio.timeout(within_s):
                while self._living:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            log.warning("%d instance(s) have not left within %g s and are ended", len(self._living), within_s)

    async def close(self) -> None:
        """End all of them now."""
        self.draining = True
        await self._tasks.close()

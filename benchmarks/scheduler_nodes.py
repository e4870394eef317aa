"""``python -m benchmarks.scheduler_nodes``: the nodes of ``scheduler``'s case ``acquire``, simulated.

One process says for all of them what an invoker says, over a real NATS connection: a report of eight accelerators and
some models each, every HEARTBEAT_S and at every change; to ``start`` an instance that is READY at once, to ``stop`` one
that is STOPPED. Nothing runs and no byte is read. Lines of JSON: ``{"ready": true}``, then for each line that it is
sent ``{"held": instances}``. It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from functools import partial
from typing import Final

import msgspec

from benchmarks.scheduler_cluster import SEED, cluster
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.limits import HEARTBEAT_S
from sllm_runtime.protocol.node import InstanceStatus, KeepModels, NodeStatus, Ok, StartInstance, StopInstance
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import IMPORT, SANDBOX, SETUP, WEIGHTS, Span

SPANS: Final = (Span(SANDBOX, 0.0, 20.0), Span(IMPORT, 20.0, 5.0), Span(WEIGHTS, 20.0, 5.0), Span(SETUP, 25.0, 1.0))
"""Of every start: the policy learns from it as from real ones."""


class SimulatedNode:
    """One node's instances and what it reports."""

    def __init__(self, bus: Bus, status: NodeStatus) -> None:
        self._bus, self._status = bus, status
        self._held: dict[str, tuple[StartInstance, float]] = {}
        self._ended: dict[str, InstanceStatus] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def serve(self) -> None:
        name = self._status.node
        await self._bus.serve(subjects.node_command(name, "start"), StartInstance, self._start)
        await self._bus.serve(subjects.node_command(name, "stop"), StopInstance, self._stop)
        await self._bus.serve(subjects.node_command(name, "keep"), KeepModels, self._keep)

    def report(self) -> None:
        """Tell what there is. What has ended is told once."""
        now = time.monotonic()
        running = (self._told(name, InstanceState.READY, now) for name in self._held)
        taken = {index: name for name, (command, _) in self._held.items() for index in command.gpus}
        gpus = tuple(msgspec.structs.replace(gpu, used_by=taken.get(gpu.index)) for gpu in self._status.gpus)
        memory = sum(command.manifest.memory for command, _ in self._held.values())
        self._status = msgspec.structs.replace(self._status, sequence=self._status.sequence + 1)
        said = msgspec.structs.replace(
            self._status,
            free_memory=self._status.memory - memory,
            gpus=gpus,
            instances=(*running, *self._ended.values()),
        )
        self._ended.clear()
        self._bus.publish_now(subjects.status(said.node), said)

    def _told(self, name: str, state: InstanceState, now: float) -> InstanceStatus:
        command, since = self._held[name]
        return InstanceStatus(
            instance=name,
            function=command.function,
            version=command.version,
            state=state,
            spans=SPANS,
            idle_s=now - since,
        )

    async def _start(self, command: StartInstance) -> Ok:
        self._obey(command.term)
        if command.instance not in self._held:
            self._held[command.instance] = (command, time.monotonic())
            self.report()
        return Ok()

    async def _stop(self, command: StopInstance) -> Ok:
        self._obey(command.term)
        if command.instance in self._held:
            self._ended[command.instance] = self._told(command.instance, InstanceState.STOPPED, time.monotonic())
            del self._held[command.instance]
            self.report()
        return Ok()

    async def _keep(self, command: KeepModels) -> Ok:
        return Ok()

    def _obey(self, term: int) -> None:
        self._status = msgspec.structs.replace(self._status, term=max(term, self._status.term))


async def simulate(count: int, models: int) -> None:
    """Until stdin ends."""
    view, _ = cluster(count, models, random.Random(SEED))
    bus = await Bus.connect(Settings.load(), "nodes", name="simulated nodes")
    statuses = [node.status for node in view.nodes.values() if node.status is not None]
    nodes = [SimulatedNode(bus, status) for status in statuses]
    try:
        for node in nodes:
            await node.serve()
        reporting = asyncio.create_task(_report(nodes))
        listening = asyncio.create_task(asyncio.to_thread(_listen, nodes))
        _say({"ready": True})
        await asyncio.wait([reporting, listening], return_when=asyncio.FIRST_COMPLETED)
        reporting.cancel()
    finally:
        await bus.close()


def _listen(nodes: list[SimulatedNode]) -> None:
    for _ in iter(partial(sys.stdin.buffer.readline), b""):
        _say({"held": sum(len(node) for node in nodes)})


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def _report(nodes: list[SimulatedNode]) -> None:
    """Each once in HEARTBEAT_S, spread over it as those of real nodes are."""
    began, number = time.monotonic(), 0
    while True:
        nodes[number % len(nodes)].report()
        number += 1
        await asyncio.sleep(max(began + number * HEARTBEAT_S / len(nodes) - time.monotonic(), 0.0))


if __name__ == "__main__":
    asyncio.run(simulate(int(sys.argv[1]), int(sys.argv[2])))

"""A provider beside the world of the pure part: its nodes boot when their time has come, and end when it is told so."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.events import events
from sllm_runtime.control.providing import sizing
from sllm_runtime.control.providing.pool import Pool, Timing
from sllm_runtime.control.providing.provider import Offer, Shape
from sllm_runtime.control.providing.sizing import Action, Remove, SetDesired
from sllm_runtime.protocol.events import Event
from sllm_runtime.protocol.records import PoolRecord
from sllm_runtime.protocol.states import INSTANCE, InstanceState, final
from tests.unit.control.world import GIB, FakeNode, World

TIMING = Timing(idle=60.0, cooldown=10.0, boot=30.0, lost=100.0)
CPU = 4.0
STEP_S = 1.0


class Supplied(World):
    """Nodes of four cores that take ``boot`` seconds to come."""

    def __init__(self, least: int = 0, most: int = 3, boot: float = 20.0, timing: Timing = TIMING) -> None:
        super().__init__()
        self.least, self.most, self.boot, self.desired = least, most, boot, least
        self.booting: dict[str, float] = {}
        self.actions: list[tuple[float, Action]] = []
        self.told: list[Event] = []
        self.harmed: list[str] = []
        """Nodes that were given back while something ran there."""
        self.broken = False
        """Whether what the provider is told gets lost."""
        self._made = 0
        self.view = replace(self.view, pool=Pool(timing), listening_since=self.now)

    @property
    def pool(self) -> Pool:
        assert self.view.pool is not None
        return self.view.pool

    def offer(self) -> Offer:
        members = frozenset({*self.booting, *self.nodes})
        return Offer(self.desired, self.least, self.most, members, Shape(cpu=CPU, memory=64 * GIB))

    def supply(self) -> tuple[Action, ...]:
        """The provider's own work, then a decision and what it is told."""
        while len(self.booting) + len(self.nodes) < self.desired:
            self._made += 1
            self.booting[f"p{self._made}"] = self.now + self.boot
        for name in [name for name, at in self.booting.items() if at <= self.now]:
            del self.booting[name]
            self.nodes[name] = FakeNode(name, CPU, 0)
            self.hear(name)
        made = sizing.step(self.view, self.offer(), self.now)
        self.told += [event for event in events(self.view, made.view, 0.0) if event.kind.startswith(("pool.", "node."))]
        self.view = made.view
        for action in made.actions:
            self.actions.append((self.now, action))
            if not self.broken:
                self._tell(action)
        return made.actions

    def _tell(self, action: Action) -> None:
        if isinstance(action, SetDesired):
            self.desired = action.nodes
        elif isinstance(action, Remove) and action.node in {*self.nodes, *self.booting}:
            self._judge(action.node)
            self.nodes.pop(action.node, None)
            self.booting.pop(action.node, None)
            self.desired -= 1

    def _judge(self, name: str) -> None:
        """A node that is given back while it speaks has nothing to do."""
        node = self.nodes.get(name)
        if node is not None and node.alive:
            at_work = [each for each in node.instances.values() if each.running or not final(INSTANCE, each.state)]
            self.harmed += [name] if at_work and name not in self.pool.silent else []

    def live_for(self, seconds: float, *, works: bool = True) -> None:
        """Time passes. Starts succeed; with ``works`` each instance takes a call that waits, and keeps it."""
        until = self.now + seconds
        while self.now < until:
            self.turn(STEP_S)
            for node in self.nodes.values():
                for name, status in tuple(node.instances.items()):
                    if status.state is InstanceState.STARTING:
                        node.set(name, InstanceState.READY)
                    elif status.state is InstanceState.READY and works and not status.running:
                        self._take(node, name, (status.function, status.version))
            self.supply()

    def _take(self, node: FakeNode, name: str, key: tuple[str, int]) -> None:
        calls = self.view.demand(key)
        if calls:
            node.set(name, InstanceState.READY, running=1, idle_s=0.0)
            self.wait_for(key, calls - 1)

    def all_end(self) -> None:
        """Every call ends, nobody waits."""
        for key in list(self.view.waiting):
            self.wait_for(key, 0)
        for node in self.nodes.values():
            for name, status in tuple(node.instances.items()):
                if status.running:
                    node.set(name, status.state, running=0, idle_s=0.0)
                if status.state is InstanceState.DRAINING:
                    node.set(name, InstanceState.STOPPED)

    def new_leader(self) -> None:
        """Another controller takes over: of the pool it has what is stored."""
        record: PoolRecord = self.pool.record
        nodes = {name: replace(node, status=None, heard=None) for name, node in self.view.nodes.items()}
        self.view = replace(self.view, pool=Pool(self.pool.timing, record), nodes=nodes, listening_since=self.now)

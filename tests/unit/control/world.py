"""A cluster for the pure part: nodes that obey commands when they get them, and a clock that the test turns."""

import random
from dataclasses import replace

import msgspec

from sllm_runtime.control import changes, registry, restore
from sllm_runtime.control.loop import accepted, refused
from sllm_runtime.control.placement import Policy
from sllm_runtime.control.plan import Action, Context, SendStart, SendStop, plan
from sllm_runtime.control.reports import observe, still
from sllm_runtime.control.scheduling.policies import StartupTime
from sllm_runtime.control.view import Instance, Key, View
from sllm_runtime.protocol.errors import ErrorBody, NoCapacity
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import Gpu, InstanceStatus, NodeStatus
from sllm_runtime.protocol.records import LearnedRecord, PoolRecord, Popularity, VersionRecord
from sllm_runtime.protocol.states import INSTANCE, InstanceState, final

ERROR = ErrorBody(code="start_failed", message="it does not import", status=503, stage="import")
GIB = 2**30


def manifest(name: str, **fields: object) -> Manifest:
    handler = {"entry": "app:f", "kind": "function", "streams": False}
    return Manifest.model_validate({"name": name, "handler": handler, "memory": GIB, **fields})


def version(what: Manifest, number: int = 1) -> VersionRecord:
    return VersionRecord(
        function=what.name, version=number, manifest=what, bundle="sha256:b", bundle_bytes=1, content=f"c{number}"
    )


def deployed(view: View, what: Manifest, number: int = 1) -> View:
    """``view`` with an active version, without the trial that a deployment makes first."""
    view = registry.create(view, version(what, number), None)
    return registry.activate(view, (what.name, number))


class FakeNode:
    """A node's side: what it holds, and the reports it would send."""

    def __init__(self, name: str, cpu: float, gpus: int) -> None:
        self.name, self.cpu = name, cpu
        self.gpus = tuple(Gpu(index=index, kind="L4", memory=24 * GIB) for index in range(gpus))
        self.labels: dict[str, str] = {}
        self.models: tuple[str, ...] = ()
        """What lies on its SSD."""
        self.instances: dict[str, InstanceStatus] = {}
        self.holds: dict[str, tuple[float, tuple[int, ...]]] = {}
        self.sequence, self.life, self.alive, self.draining = 0, 0, True, False

    def restart(self) -> None:
        self.life, self.sequence = self.life + 1, 0
        self.instances, self.holds = {}, {}

    def room(self, what: Instance) -> bool:
        """Whether it could take that instance."""
        taken = {index for _, gpus in self.holds.values() for index in gpus}
        return what.manifest.cpu <= self.cpu - sum(cpu for cpu, _ in self.holds.values()) and not taken & {*what.gpus}

    def set(self, name: str, state: InstanceState, error: ErrorBody | None = None, **fields: object) -> None:
        changes = {"state": state, "error": error, **fields}
        self.instances[name] = msgspec.structs.replace(self.instances[name], **changes)
        if final(INSTANCE, state):
            self.holds.pop(name, None)

    def report(self) -> NodeStatus:
        self.sequence += 1
        taken = {index: name for name, (_, gpus) in self.holds.items() for index in gpus}
        return NodeStatus(
            node=self.name,
            boot=f"{self.name}/{self.life}",
            sequence=self.sequence,
            term=1,
            cpu=self.cpu,
            memory=64 * GIB,
            free_cpu=self.cpu - sum(cpu for cpu, _ in self.holds.values()),
            free_memory=(64 - len(self.holds)) * GIB,
            gpus=tuple(msgspec.structs.replace(gpu, used_by=taken.get(gpu.index)) for gpu in self.gpus),
            labels=self.labels,
            models=self.models,
            draining=self.draining,
            instances=tuple(self.instances.values()),
        )


class World:
    """The controller's pure part with the nodes it commands."""

    def __init__(self, *nodes: FakeNode) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.view = View()
        self.now = 1000.0
        self.rng = random.Random(1)
        self.policy: Policy = StartupTime()
        self.started: list[tuple[float, str]] = []
        """When which instance got its first start command."""
        self.refusals = 0
        """Starts for which a node had no room."""
        self.more = False
        """Whether the next plan is to follow at once."""

    def hear(self, name: str) -> None:
        node = self.nodes[name]
        if node.alive:
            status = node.report()
            same, self.view = still(self.view, status, self.now), observe(self.view, status, self.now, 0.0)
            assert same is None or same == self.view, "what nothing follows from is the same in short"

    def hear_all(self) -> None:
        for name in self.nodes:
            self.hear(name)

    def plan(self, *, deliver: bool = True) -> tuple[Action, ...]:
        """One step; ``deliver=False`` loses the commands on their way."""
        made = plan(self.view, Context(now=self.now, wall=0.0, policy=self.policy, rng=self.rng))
        self.view, self.more = made.view, made.more
        for action in made.actions:
            if isinstance(action, SendStart) and action.instance not in [name for _, name in self.started]:
                self.started.append((self.now, action.instance))
            if deliver:
                self.deliver(action)
        return made.actions

    def deliver(self, action: Action) -> None:
        if isinstance(action, SendStop):
            self._stop(self.nodes[action.node], action)
            return
        instance = self.view.instances[action.instance]
        node = self.nodes[instance.record.node]
        if not node.alive:
            return
        if action.instance not in node.instances and not node.room(instance):
            self.refusals += 1
            self.view = refused(self.view, action, NoCapacity(f"{node.name} is full"), self.now)
            return
        if action.instance not in node.instances:
            node.holds[action.instance] = (instance.manifest.cpu, instance.gpus)
            node.instances[action.instance] = InstanceStatus(
                instance=action.instance,
                function=instance.key[0],
                version=instance.key[1],
                state=InstanceState.STARTING,
                content=self.view.versions[instance.key].content,
            )
        self.view = accepted(self.view, action)

    def _stop(self, node: FakeNode, action: SendStop) -> None:
        if not node.alive:
            return
        there = node.instances.get(action.instance)
        if there is not None and not final(INSTANCE, there.state):
            busy = there.running and action.grace_s > 0
            node.set(action.instance, InstanceState.DRAINING if busy else InstanceState.STOPPED)
        self.view = accepted(self.view, action)

    def turn(self, seconds: float) -> None:
        """Time passes; idle instances grow older, and everybody reports as often as they should."""
        while seconds > 0:
            step = min(seconds, 0.5)
            seconds -= step
            self.now += step
            for node in self.nodes.values():
                for name, status in tuple(node.instances.items()):
                    if status.state is InstanceState.READY and not status.running:
                        node.instances[name] = msgspec.structs.replace(status, idle_s=status.idle_s + step)
            self.hear_all()
            self.plan()
            while self.more:
                self.plan()

    def followed(self) -> View:
        """The next controller leads: it knows what is stored, and has heard no node yet. What is stored, as it is."""
        before = self.view
        kept = [record for each in before.instances.values() if (record := changes.kept(each)) is not None]
        stored = restore.Stored(
            functions=dict(before.functions),
            versions={f"{name}.{number}": record for (name, number), record in before.versions.items()},
            models=dict(before.models),
            nodes={name: node.record for name, node in before.nodes.items()},
            instances={record.instance: record for record in kept},
            routes={},
            learned=LearnedRecord(),
            proofs={},
            popularity=Popularity(),
            pool=PoolRecord(),
        )
        found = restore.as_stored(stored, self.now)
        self.view = restore.repaired(found)
        return found

    def live(self, key: Key) -> list[str]:
        return [instance.record.instance for instance in self.view.of(key) if instance.live]

    def finish(self, name: str, state: InstanceState, error: ErrorBody | None = None) -> None:
        """An instance reaches ``state`` on its node, which reports it."""
        node = self.nodes[self.view.instances[name].record.node]
        node.set(name, state, error)
        self.hear(node.name)

    def wait_for(self, key: Key, calls: int) -> None:
        self.view = self.view.put_waiting(key, "gw", calls)

    def reset_listening(self) -> None:
        self.view = replace(self.view, listening_since=self.now)

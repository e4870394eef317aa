"""What an instance needs, what a node has, and what is short between them, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from sllm_runtime.control.view import EMPTY, Instance, Key, Move, Node, View
from sllm_runtime.protocol.errors import PythonMismatch
from sllm_runtime.protocol.limits import MAX_MEMBERS
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import Gpu, NodeStatus, Shared
from sllm_runtime.protocol.quantities import parse_gpu, show_bytes

ANY_GPU = "any"


@dataclass(frozen=True, slots=True)
class Need:
    """One instance's needs. ``gpus``: alternatives (kind, count) by preference; empty: no accelerator."""

    cpu: float
    memory: int
    """Bytes, its models' among them: what it takes where nobody uses these."""
    gpus: tuple[tuple[str, int], ...] = ()
    gpu_memory: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    container: str = ""
    """Why it needs a container ("image …"), or empty."""
    python: str = ""
    weights: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its models by digest: a node sets them aside once for all of its instances that use one."""

    @property
    def own(self) -> int:
        """Bytes that it shares with nobody."""
        return self.memory - sum(self.weights.values())

    def takes(self, there: Capacity) -> int:
        """Bytes of memory that it takes there, where others may use some of its models already."""
        if not there.shared:
            return self.memory
        return self.memory - sum(nbytes for digest, nbytes in self.weights.items() if digest in there.shared)


class Capacity(msgspec.Struct, frozen=True):
    """What a node has to give: all of it, or what is free now."""

    # A structure, since a plan makes one for each node that has changed: a frozen dataclass takes five times as long.

    node: str
    cpu: float
    memory: int
    gpus: tuple[Gpu, ...]
    labels: Mapping[str, str]
    drivers: tuple[str, ...]
    python: str
    shared: Mapping[str, Shared] = EMPTY
    """Models that are in use there, by digest: their bytes are set aside already."""
    each: float = inf
    """CPUs that one instance may have of ``cpu``: a node promises more than it has, to several."""


def need_of(manifest: Manifest, weights: Mapping[str, int] = EMPTY) -> Need:
    """The needs a manifest states, and those of its models. ``gpu_memory`` alone asks for one accelerator of any
    kind."""
    gpus = tuple(parse_gpu(text) for text in manifest.gpu)
    if not gpus and manifest.gpu_memory:
        gpus = ((ANY_GPU, 1),)
    container = f"image {manifest.image}" if manifest.image else ""
    if not container and manifest.requirements:
        container = "requirements " + ", ".join(manifest.requirements)
    return Need(
        cpu=manifest.cpu * manifest.parallelism.processes,
        memory=manifest.memory * manifest.parallelism.processes + sum(weights.values()),
        gpus=gpus,
        gpu_memory=manifest.gpu_memory or 0,
        labels=manifest.labels,
        container=container,
        python=manifest.handler.python or "" if manifest.image is None else "",  # an image has its own
        weights=weights,
    )


def need_in(view: View, key: Key, manifest: Manifest) -> Need:
    """The needs of an instance of version ``key``, its models' bytes included."""
    return need_of(manifest, weights_of(view, key))


def weights_of(view: View, key: Key) -> Mapping[str, int]:
    """Bytes of a version's model and adapters, by digest."""
    version = view.versions.get(key)
    if version is None:
        return EMPTY
    models, digests = view.models, [*version.adapters.values(), version.model or ""]
    return {digest: models[digest].nbytes for digest in digests if digest in models}


def unsupported(manifest: Manifest) -> str:
    """A field that this release keeps but cannot honour yet, in words; empty if there is none. Refused at deploy, so
    that nothing asked for is silently left out."""
    return _not_parallel(manifest) if manifest.parallelism.processes > 1 else ""


def _not_parallel(manifest: Manifest) -> str:
    """What keeps an instance of several processes from being made."""
    wanted = manifest.parallelism
    if wanted.tensor > 1 and wanted.pipeline > 1:
        return "parallelism: tensor and pipeline do not go together yet; leave one of them out"
    if wanted.processes > MAX_MEMBERS:
        return f"parallelism: an instance has at most {MAX_MEMBERS} processes, {wanted.processes} are asked for"
    if not manifest.engine or manifest.model_loader == "build":
        return "parallelism: the engine alone shares a model out; it needs engine=True and no build()"
    if manifest.adapters and wanted.tensor > 1:
        named = ", ".join(sorted(manifest.adapters))
        return f"parallelism: tensor ranks run no adapters, and {named} are named; use pipeline, or one process"
    if not manifest.gpu and not manifest.gpu_memory:
        return ""
    if any(count != wanted.processes for _, count in need_of(manifest).gpus):
        each = "tensor rank" if wanted.tensor > 1 else "stage"
        return f"parallelism: each {each} has a GPU of its own; ask for gpu=KIND:{wanted.processes}"
    return ""


def unheeded(manifest: Manifest) -> tuple[str, ...]:
    """What this release keeps and does not act on, in words; who deploys is told."""
    if manifest.slo.ttft is None and manifest.slo.tbt is None:
        return ()
    return ("slo: it is kept with the version, and nothing acts on it yet",)


def check_python(view: View, manifest: Manifest) -> None:
    """Raises ``PythonMismatch`` if pickled code can run on no node."""
    wanted = manifest.handler.python if manifest.image is None else None
    pythons = {node.status.python for node in view.nodes.values() if node.status is not None}
    if wanted and pythons and "" not in pythons and wanted not in pythons:
        have = " and ".join(sorted(pythons))
        raise PythonMismatch(
            f"function {manifest.name!r} was pickled by Python {wanted}, the nodes run {have}: deploy it with Python "
            f"{have}, or put it in a file of its own, which is imported by name and runs on both",
            field="handler.python",
        )


def total(status: NodeStatus) -> Capacity:
    """All that the node has."""
    gpus, labels = status.gpus, status.labels
    return Capacity(status.node, status.cpu, status.memory, gpus, labels, status.drivers, status.python)


def free(view: View, node: Node, leaving: Sequence[Instance] = ()) -> Capacity | None:
    """What the node has free: its report, less what was placed since and what is promised to those that are to move
    there, plus what ``leaving`` instances will give back. None: never heard."""
    status = node.status
    if status is None:
        return None
    reported = {instance.instance for instance in status.instances}
    name = node.record.node
    there = view.on(name)
    if not leaving and not view.moves and there.keys() <= reported:  # most nodes at most times: nothing is to be added
        return _reported(status)
    back = {None, *(i.record.instance for i in leaving)}
    unseen = [] if there.keys() <= reported else [i for i in there.values() if _unseen(i, reported | back)]
    leaving = [i for i in leaving if i.record.instance in reported]
    promised = _promised(view, name) if view.moves else ()
    taken = {index for i in unseen for index in i.gpus}
    if promised:
        taken.update(index for _, move in promised for index in move.gpus)
        unseen = [*unseen, *(instance for instance, _ in promised)]
    come, gone = ([need_in(view, i.key, i.manifest) for i in each] for each in (unseen, leaving))
    memory, shared = _memory(status, come, gone)
    return Capacity(
        node=name,
        cpu=_left(status) - sum(need.cpu for need in come) + sum(need.cpu for need in gone),
        memory=memory,
        gpus=tuple([gpu for gpu in status.gpus if gpu.used_by in back and gpu.index not in taken]),
        labels=status.labels,
        drivers=status.drivers,
        python=status.python,
        shared=shared,
        each=status.cpu,
    )


def _reported(status: NodeStatus) -> Capacity:
    """What it has free by its own report."""
    return Capacity(
        node=status.node,
        cpu=_left(status),
        memory=status.free_memory,
        gpus=tuple([gpu for gpu in status.gpus if gpu.used_by is None]),
        labels=status.labels,
        drivers=status.drivers,
        python=status.python,
        shared=status.shared or EMPTY,
        each=status.cpu,
    )


def _left(status: NodeStatus) -> float:
    """CPUs that it may promise yet, to all of its instances together."""
    return status.free_cpu if status.left_cpu is None else status.left_cpu


def _promised(view: View, node: str) -> Sequence[tuple[Instance, Move]]:
    """Instances that are to move to ``node``, and have nothing there yet."""
    coming = ((view.instances.get(name), move) for name, move in view.moves.items() if move.node == node)
    return [(instance, move) for instance, move in coming if instance is not None and not move.placed]


def _unseen(instance: Instance, reported: Set[str | None]) -> bool:
    return instance.record.instance not in reported and not instance.ended


def _memory(status: NodeStatus, come: Sequence[Need], gone: Sequence[Need]) -> tuple[int, Mapping[str, Shared]]:
    """Bytes of memory that are free when instances have ``come`` beside those of the report and others are ``gone``,
    and the models that are in use then."""
    shared, free_memory = status.shared, status.free_memory
    if not come and not gone:
        return free_memory, shared or EMPTY
    if shared is None:
        return free_memory - sum(need.memory for need in come) + sum(need.memory for need in gone), EMPTY
    users: Mapping[str, Shared] = shared
    for need in come:
        users = using(users, need)
    for need in gone:
        users = using(users, need, -1)
    own = sum(need.own for need in come) - sum(need.own for need in gone)
    return free_memory - own + _nbytes(shared) - _nbytes(users), users


def _nbytes(shared: Mapping[str, Shared]) -> int:
    return sum(each.nbytes for each in shared.values())


def using(shared: Mapping[str, Shared], need: Need, count: int = 1) -> Mapping[str, Shared]:
    """``shared`` with ``count`` more instances of ``need``; what nobody uses is not in it."""
    users = {digest: shared[digest].instances if digest in shared else 0 for digest in need.weights}
    changed = {digest: Shared(nbytes, users[digest] + count) for digest, nbytes in need.weights.items()}
    return {digest: each for digest, each in {**shared, **changed}.items() if each.instances > 0}


def suits(gpu: Gpu, kind: str, memory: int) -> bool:
    """Whether it is of that kind and has ``memory`` bytes."""
    return kind.lower() in (ANY_GPU, gpu.kind.lower()) and gpu.memory >= memory


def choose_gpus(need: Need, capacity: Capacity) -> tuple[int, tuple[int, ...]] | None:
    """Rank of the preferred kind that fits and the devices; (0, ()) if none are needed, None if none fit."""
    if not need.gpus:
        return 0, ()
    for rank, (kind, count) in enumerate(need.gpus):
        fitting = [gpu.index for gpu in capacity.gpus if suits(gpu, kind, need.gpu_memory)]
        if len(fitting) >= count:
            return rank, tuple(fitting[:count])
    return None


def held(view: View, instance: Instance) -> tuple[Gpu, ...]:
    """The accelerators that ``instance`` holds, by its node's report."""
    node, name = view.nodes.get(instance.record.node), instance.record.instance
    there = node.status.gpus if node is not None and node.status is not None else ()
    return tuple(gpu for gpu in there if gpu.used_by == name)


def alike(need: Need, held: Sequence[Gpu]) -> Need | None:
    """``need`` on as many accelerators of the very kind that are ``held``: on others the same model draws other tokens,
    whatever its version may use. None: they are of several kinds, which cannot be asked for."""
    kinds = {gpu.kind for gpu in held}
    if len(kinds) > 1:
        return None
    gpus = tuple((kind, len(held)) for kind in kinds)
    return need if gpus == need.gpus else replace(need, gpus=gpus)


def show_gpus(need: Need) -> str:
    """The accelerators asked for, for people: ``1 x H100 or 2 x L4 with 20.0 GiB each``."""
    text = " or ".join(f"{count} x {kind}" for kind, count in need.gpus)
    return text + (f" with {show_bytes(need.gpu_memory)} each" if need.gpu_memory else "")


def _gpu_short(need: Need, capacity: Capacity) -> str:
    kinds: dict[str, int] = {}
    for gpu in capacity.gpus:
        label = f"{gpu.kind} ({show_bytes(gpu.memory)})" if need.gpu_memory else gpu.kind
        kinds[label] = kinds.get(label, 0) + 1
    has = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "none"
    return f"{show_gpus(need)} (has {has})"


def short(need: Need, capacity: Capacity) -> tuple[str, ...]:
    """Everything the node lacks, each as ``<needed> (has <there>)``. Empty: it fits."""
    lacks = []
    if choose_gpus(need, capacity) is None:
        lacks.append(_gpu_short(need, capacity))
    for name, value in sorted(need.labels.items()):
        if capacity.labels.get(name) != value:
            lacks.append(f"label {name}={value} (has {capacity.labels.get(name) or 'none'})")
    if need.container and "container" not in capacity.drivers:
        has = f"has {', '.join(capacity.drivers) or 'none'}; what is started with SLLM_SANDBOX=podman or docker has one"
        lacks.append(f"a container driver for {need.container} ({has})")
    if need.python and capacity.python and need.python != capacity.python:
        lacks.append(f"Python {need.python} (has {capacity.python})")
    if (memory := need.takes(capacity)) > capacity.memory:
        lacks.append(f"{show_bytes(memory)} of memory (has {show_bytes(max(capacity.memory, 0))})")
    if need.cpu > (cpu := min(capacity.cpu, capacity.each)) + 1e-9:
        lacks.append(f"{need.cpu:g} CPUs (has {max(cpu, 0.0):g})")
    return tuple(lacks)

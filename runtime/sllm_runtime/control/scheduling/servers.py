"""A node as decisions need it, made from its record, its last report and what was placed on it since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from sllm_runtime.control.fits import ANY_GPU, Capacity, Need, free, short
from sllm_runtime.control.placement import ends_late
from sllm_runtime.control.scheduling.learned import Recent
from sllm_runtime.control.scheduling.prediction import Estimate, slowest_link
from sllm_runtime.control.view import EMPTY, STARTING, Instance, Key, Node, View
from sllm_runtime.protocol.loader import DISK, path_of, unused_bandwidth
from sllm_runtime.protocol.node import Gpu, NodeStatus, PathLoad
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState


@dataclass(frozen=True, slots=True)
class Stored:
    """What a node's storage holds, and how fast it comes. The same object while the reports say the same of it."""

    resident: tuple[str, ...]
    models: tuple[str, ...]
    remote: tuple[str, ...]
    dram: frozenset[str]
    ssd: frozenset[str]

    @classmethod
    def of(cls, status: NodeStatus, before: Stored | None) -> Stored:
        """``before``, if it still holds: most reports are about other things."""
        said = (status.resident, status.models, status.remote)
        if before is not None and said == (before.resident, before.models, before.remote):
            return before
        return cls(*said, frozenset(status.resident), frozenset(status.models).difference(status.remote))


class Turnover(NamedTuple):
    """How many instances of a server give their places back: ``now``, as they are idle or end, and ``in_time``, those
    among them. Not those that their version keeps without a caller."""

    now: int
    in_time: int


class Server(msgspec.Struct, frozen=True, eq=False, dict=True):
    """A node that has reported: what it has free, what its storage holds and how fast that comes."""

    # A structure, as ``Capacity``; with a dictionary for what is worked out once.

    name: str
    node: Node
    status: NodeStatus
    free: Capacity
    instances: Mapping[str, Instance]
    stored: Stored
    paths: Mapping[str, PathLoad]
    disk: Mapping[str, Recent]
    """What was known of disks when ``paths`` were made."""
    spare: Mapping[str, tuple[Gpu, ...]]
    """Free accelerators by kind in lower case; ``ANY_GPU``: all of them."""
    yielding: tuple[Instance, ...]
    """Its instances that are idle or on their way out: no others make room by themselves now."""
    working: tuple[Instance, ...]
    """Its instances that are at work on calls which could go on elsewhere."""
    coming: int
    """Bytes of weights that its queues do not show: of what was sent for since its report, and what it says itself. By
    ``path`` not told apart."""
    warm: int
    """Sandboxes that wait for any function, without those that starts sent since its report will take: each as many as
    it has processes, also where those are made for it alone (``network``, an image)."""

    @cached_property
    def held(self) -> Mapping[str, tuple[Gpu, ...]]:
        """The accelerators that each instance holds."""
        found: dict[str, tuple[Gpu, ...]] = {}
        for gpu in self.status.gpus:
            if gpu.used_by is not None:
                found[gpu.used_by] = (*found.get(gpu.used_by, ()), gpu)
        return found

    @cached_property
    def kinds(self) -> Mapping[str, tuple[str, ...]]:
        """The kinds of the accelerators that each instance holds."""
        return {name: tuple([gpu.kind for gpu in gpus]) for name, gpus in self.held.items()}

    def turnover(self, device: bool) -> Turnover:
        """Of its instances; ``device``: of those that hold an accelerator."""
        return self._turnovers[device]

    @cached_property
    def _turnovers(self) -> tuple[Turnover, Turnover]:
        leave = [i for i in self.instances.values() if not i.ended and (i.stop or not i.manifest.min_instances)]
        hold = [i for i in leave if i.gpus or i.record.instance in self.held]
        soon = {i.record.instance for i in self.yielding if not ends_late(i)}
        of_all, of_holders = (
            Turnover(sum(i.record.instance in soon for i in each), len(each)) for each in (leave, hold)
        )
        return of_all, of_holders

    @cached_property
    def turns(self) -> tuple[tuple[Key, float, Instance], ...]:
        """Its instances at work that are to stay: version, and since when no call of theirs has ended."""
        there = ((i.key, i.turn_since, i) for i in self.instances.values() if i.ready and i.running)
        return tuple((key, since, instance) for key, since, instance in there if since is not None)

    @cached_property
    def starting(self) -> tuple[tuple[Estimate, Instance], ...]:
        """Its instances that start and are to stay, with what that was expected to take."""
        there = ((i.predicted, i) for i in self.instances.values() if i.state in STARTING and i.stop is None)
        return tuple((guess, instance) for guess, instance in there if guess is not None)

    @cached_property
    def link(self) -> float:
        """As ``slowest_link``."""
        return slowest_link(self.status)

    def path(self, model: ModelRecord) -> PathLoad | None:
        """The way ``model`` would come by; None if it is in DRAM."""
        if model.digest in self.stored.dram:
            return None
        name = DISK if model.digest in self.stored.ssd else path_of(model.uri)
        return self.paths.get(name) or PathLoad(path=name, bandwidth=0.0, queued=0)

    def wait(self, path: str) -> tuple[float, float]:
        """Seconds that a load which begins now waits on ``path`` (empty: none), and its bytes per second."""
        if not path:
            return 0.0, 0.0
        load = self.paths.get(path)
        bandwidth = (load.bandwidth if load is not None else 0.0) or unused_bandwidth(path)
        return ((load.queued if load is not None else 0) + self.coming) / bandwidth, bandwidth

    def devices(self, need: Need, rank: int) -> tuple[int, ...] | None:
        """Accelerators for ``need``, of the kind it names at ``rank``; None if there is no room for it."""
        free = self.free
        if need.cpu > min(free.cpu, free.each) + 1e-9 or (need.memory > free.memory and need.takes(free) > free.memory):
            return None
        if (need.labels or need.container or need.python) and short(need, free):
            return None
        if not need.gpus:
            return ()
        kind, count = need.gpus[rank]
        spare = self.spare.get(kind.lower(), ())
        if len(spare) < count:
            return None
        found = tuple(gpu.index for gpu in spare if gpu.memory >= need.gpu_memory)
        return found[:count] if len(found) >= count else None

    def places(self, need: Need) -> int:
        """Instances with such a ``need`` that fit at the most, by what is free."""
        free = self.free
        asked = [(free.cpu, need.cpu), (free.memory, need.memory)]
        asked += [(len(self.spare.get(kind.lower(), ())), count) for kind, count in need.gpus[:1]]
        return min((int(there // takes) for there, takes in asked if takes > 0), default=0)

    def room(self, need: Need) -> tuple[int, tuple[int, ...]] | None:
        """The first rank whose accelerators are free, and their numbers; None if there is no room for ``need``."""
        for rank in range(max(len(need.gpus), 1)):
            found = self.devices(need, rank)
            if found is not None:
                return rank, found
        return None


def server(view: View, node: Node, status: NodeStatus, before: Server | None = None) -> Server:
    """What ``view`` knows of ``node``. ``before``: what it was; what has not changed is taken from it."""
    name = node.record.node
    there = view.on(name)
    capacity = free(view, node)
    assert capacity is not None
    stored = Stored.of(status, before.stored if before is not None else None)
    disk = view.learned.disk
    if before is not None and before.status is status and before.disk is disk:
        paths = before.paths
    else:
        paths = {path.path: _known(view, name, path) for path in status.paths} or EMPTY
    yielding, working, starting = _sorted_out(there)
    unseen = _unseen(starting, status) if starting else []
    return Server(
        name=name,
        node=node,
        status=status,
        free=capacity,
        instances=there,
        stored=stored,
        paths=paths,
        disk=disk,
        spare=_by_kind(capacity.gpus),
        yielding=tuple(yielding),
        working=tuple(working),
        coming=status.coming + (_coming(view, unseen, stored) if unseen else 0),
        warm=status.pool_idle - sum(instance.manifest.parallelism.processes for instance in unseen),
    )


def _known(view: View, node: str, load: PathLoad) -> PathLoad:
    """With the bandwidth that is expected of it."""
    if load.path != DISK or node in view.learned.disk:
        return load
    return msgspec.structs.replace(load, bandwidth=view.learned.disk_bandwidth(node, load.bandwidth))


def _sorted_out(there: Mapping[str, Instance]) -> tuple[list[Instance], list[Instance], list[Instance]]:
    """Those that are idle or on their way out, those at work on what could go on elsewhere, those that start."""
    yielding, working, starting = [], [], []
    for instance in there.values():
        state = instance.record.state
        if state in STARTING:
            starting.append(instance)
        ready = state is InstanceState.READY
        if instance.stop is not None or (ready and not instance.running):
            yielding.append(instance)
        elif ready and instance.carries:
            working.append(instance)
    return yielding, working, starting


def _unseen(starting: Sequence[Instance], status: NodeStatus) -> list[Instance]:
    """Those that its report does not know."""
    reported = {instance.instance for instance in status.instances}
    return [instance for instance in starting if instance.record.instance not in reported]


def _coming(view: View, unseen: Sequence[Instance], stored: Stored) -> int:
    models = (view.model_of(instance.key) for instance in unseen)
    return sum(model.nbytes for model in models if model is not None and model.digest not in stored.dram)


def _by_kind(gpus: Sequence[Gpu]) -> Mapping[str, tuple[Gpu, ...]]:
    if not gpus:
        return EMPTY
    every, kinds = tuple(gpus), {gpu.kind for gpu in gpus}
    if len(kinds) == 1:
        return {ANY_GPU: every, kinds.pop().lower(): every}
    found = {ANY_GPU: every}
    for kind in kinds:
        lower = kind.lower()
        found[lower] = (*found.get(lower, ()), *(gpu for gpu in gpus if gpu.kind == kind))
    return found

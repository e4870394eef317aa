"""The nodes as decisions need them. What did not change since the last view is not made again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sllm_runtime.control.fits import ANY_GPU, Capacity, Need, free, short
from sllm_runtime.control.view import EMPTY, STARTING, Instance, Key, Node, View
from sllm_runtime.protocol.limits import LOST_AFTER_S
from sllm_runtime.protocol.loader import DISK, path_of
from sllm_runtime.protocol.node import Gpu, NodeStatus, PathLoad
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState


@dataclass(frozen=True, slots=True)
class Server:
    """A node that has reported: what it has free, what its storage holds and how fast that comes."""

    name: str
    node: Node
    open: bool
    """It takes starts: an operator has not cordoned it and it does not drain."""
    heard: float
    status: NodeStatus
    free: Capacity
    instances: Mapping[str, Instance]
    dram: frozenset[str]
    ssd: frozenset[str]
    paths: Mapping[str, PathLoad]
    spare: Mapping[str, tuple[Gpu, ...]]
    """Free accelerators by kind in lower case; ``ANY_GPU``: all of them."""
    yielding: bool
    """Whether an instance of it is idle or on its way out: nothing else could make room."""
    coming: int
    """Bytes of weights that were sent for since its report, by ``path`` not told apart: its queues do not show them."""

    def path(self, model: ModelRecord) -> PathLoad | None:
        """The way ``model`` would come by; None if it is in DRAM."""
        if model.digest in self.dram:
            return None
        name = DISK if model.digest in self.ssd else path_of(model.uri)
        return self.paths.get(name) or PathLoad(path=name, bandwidth=0.0, queued=0)

    def room(self, need: Need) -> tuple[int, tuple[int, ...]] | None:
        """Rank of the preferred accelerators that are free and their numbers, as ``fits.choose_gpus``; None if there
        is no room for ``need``."""
        free = self.free
        if need.memory > free.memory or need.cpu > free.cpu + 1e-9:
            return None
        if (need.labels or need.container or need.python) and short(need, free):
            return None
        for rank, (kind, count) in enumerate(need.gpus):
            spare = self.spare.get(kind.lower(), ())
            if len(spare) >= count:
                found = [gpu.index for gpu in spare if gpu.memory >= need.gpu_memory]
                if len(found) >= count:
                    return rank, tuple(found[:count])
        return None if need.gpus else (0, ())


class Servers:
    """``of(view)``: the servers by name. Keeps the last answer; not for use by two threads."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Node, Mapping[str, Instance], Server]] = {}
        self._last: tuple[Mapping[str, Node], Mapping[str, Instance], Mapping[str, Server]] | None = None

    def able(self, view: View, key: Key, now: float) -> list[Server]:
        """Those that may be asked to start version ``key`` now, room aside: living, neither cordoned nor draining, and
        not just refused by them."""
        since = now - LOST_AFTER_S
        heard = view.listening_since > since  # else silence counts
        found = [s for s in self.of(view).values() if s.open and (heard or s.heard > since)]
        if view.refused:
            found = [s for s in found if (r := view.refused.get((key, s.name))) is None or r.until <= now]
        return found

    def of(self, view: View) -> Mapping[str, Server]:
        """Every node of ``view`` that has reported."""
        last = self._last
        if last is not None and last[0] is view.nodes and last[1] is view.instances:
            return last[2]
        found = {}
        for name, node in view.nodes.items():
            if node.status is None:
                continue
            there = view.on(name)
            known = self._known.get(name)
            if known is None or known[0] is not node or known[1] is not there:
                known = self._known[name] = (node, there, server(view, node, node.status))
            found[name] = known[2]
        for name in self._known.keys() - found.keys():
            del self._known[name]
        self._last = (view.nodes, view.instances, found)
        return found


def server(view: View, node: Node, status: NodeStatus) -> Server:
    """What ``view`` knows of ``node``."""
    name = node.record.node
    there = view.on(name)
    capacity = free(view, node)
    assert capacity is not None
    reported = {instance.instance for instance in status.instances}
    sent = (i for i in there.values() if i.record.instance not in reported and i.state in STARTING)
    models = (view.model_of(instance.key) for instance in sent)
    resident = frozenset(status.resident)
    return Server(
        name=name,
        node=node,
        open=not node.record.cordoned and not status.draining,
        heard=node.heard if node.heard is not None else -math.inf,
        status=status,
        free=capacity,
        instances=there,
        dram=resident,
        ssd=frozenset(status.models).difference(status.remote),
        paths={path.path: path for path in status.paths} or EMPTY,
        spare=_by_kind(capacity.gpus),
        yielding=any(i.stop is not None or (i.state is InstanceState.READY and not i.running) for i in there.values()),
        coming=sum(max(m.partitions, default=0) for m in models if m is not None and m.digest not in resident),
    )


def _by_kind(gpus: Sequence[Gpu]) -> Mapping[str, tuple[Gpu, ...]]:
    found: dict[str, tuple[Gpu, ...]] = {ANY_GPU: tuple(gpus)} if gpus else {}
    for gpu in gpus:
        kind = gpu.kind.lower()
        found[kind] = (*found.get(kind, ()), gpu)
    return found

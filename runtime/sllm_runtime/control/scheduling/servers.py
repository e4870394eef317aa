"""The nodes as decisions need them. What did not change since the last view is not made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sllm_runtime.control.fits import Capacity, free
from sllm_runtime.control.view import EMPTY, STARTING, Instance, Node, View
from sllm_runtime.protocol.loader import DISK, path_of
from sllm_runtime.protocol.node import NodeStatus, PathLoad
from sllm_runtime.protocol.records import ModelRecord


@dataclass(frozen=True, slots=True)
class Server:
    """A node that has reported: what it has free, what its storage holds and how fast that comes."""

    name: str
    node: Node
    status: NodeStatus
    free: Capacity
    instances: Mapping[str, Instance]
    dram: frozenset[str]
    ssd: frozenset[str]
    paths: Mapping[str, PathLoad]
    coming: int
    """Bytes of weights that were sent for since its report, by ``path`` not told apart: its queues do not show them."""

    def path(self, model: ModelRecord) -> PathLoad | None:
        """The way ``model`` would come by; None if it is in DRAM."""
        if model.digest in self.dram:
            return None
        name = DISK if model.digest in self.ssd else path_of(model.uri)
        return self.paths.get(name) or PathLoad(path=name, bandwidth=0.0, queued=0)


class Servers:
    """``of(view)``: the servers by name. Keeps the last answer; not for use by two threads."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Node, Mapping[str, Instance], Server]] = {}

    def of(self, view: View) -> Mapping[str, Server]:
        """Every node of ``view`` that has reported."""
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
        status=status,
        free=capacity,
        instances=there,
        dram=resident,
        ssd=frozenset(status.models).difference(status.remote),
        paths={path.path: path for path in status.paths} or EMPTY,
        coming=sum(max(m.partitions, default=0) for m in models if m is not None and m.digest not in resident),
    )

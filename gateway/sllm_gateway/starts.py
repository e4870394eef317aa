"""How far the starts are that callers wait for, from the nodes' own reports."""

from __future__ import annotations

from dataclasses import dataclass

from sllm_runtime.protocol import limits
from sllm_runtime.protocol.node import NodeStatus, Progress
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import CONVERT, IMPORT, SANDBOX, SETUP, WEIGHTS

Key = tuple[str, int]
_ORDER = ("pending", SANDBOX, CONVERT, IMPORT, WEIGHTS, SETUP)


@dataclass(frozen=True)
class _Start:
    key: Key
    progress: Progress
    seen: float


class Starts:
    """Instances that are starting, over all nodes. A node's report is the whole truth about its instances."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, _Start]] = {}
        self._boots: dict[str, str] = {}

    def on_status(self, status: NodeStatus, now: float) -> set[Key]:
        """Take a report in. Returns the versions whose progress may have changed."""
        before = self._by_node.get(status.node, {})
        after = {
            instance.instance: _Start(
                (instance.function, instance.version), instance.progress or Progress(stage="pending"), now
            )
            for instance in status.instances
            if instance.state in (InstanceState.PENDING, InstanceState.STARTING)
        }
        self._by_node[status.node] = after
        return {start.key for start in (*before.values(), *after.values())}

    def restarted(self, status: NodeStatus) -> bool:
        """Whether this report is of another life of its node than the one before: its instances are gone."""
        before = self._boots.get(status.node)
        self._boots[status.node] = status.boot
        return before is not None and before != status.boot

    def of(self, key: Key, now: float) -> Progress | None:
        """The furthest start of this version; None if none goes on (or its node has fallen silent)."""
        found = [
            start.progress
            for starts in self._by_node.values()
            for start in starts.values()
            if start.key == key and now - start.seen < limits.LOST_AFTER_S
        ]
        return max(found, key=_rank, default=None)


def _rank(progress: Progress) -> tuple[int, float]:
    stage = _ORDER.index(progress.stage) if progress.stage in _ORDER else 0
    return stage, progress.done / progress.total if progress.total else 0.0

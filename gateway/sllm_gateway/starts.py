"""How far the starts are that callers wait for, from the nodes' own reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sllm_runtime.protocol import limits
from sllm_runtime.protocol.node import NodeStatus, Progress, Storage
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import CONVERT, IMPORT, SANDBOX, SETUP, WEIGHTS

Key = tuple[str, int]
PROGRESS_EVERY_S: Final = 0.1
"""Between two words to a caller of how far its start is."""
_ORDER = ("pending", SANDBOX, CONVERT, IMPORT, WEIGHTS, SETUP)


@dataclass(frozen=True)
class _Report:
    """A node's furthest start of each version that it starts."""

    furthest: dict[Key, Progress]
    seen: float


class Starts:
    """Instances that are starting, over all nodes. A node's report is the whole truth about its instances. What is
    asked by every call that waits is worked out where a report changes it."""

    def __init__(self) -> None:
        self._by_node: dict[str, _Report] = {}
        """The one that has been silent for longest first."""
        self._furthest: dict[Key, Progress] = {}
        self._boots: dict[str, str] = {}
        self._heard: dict[str, tuple[float, Storage | None]] = {}

    def on_status(self, status: NodeStatus, now: float) -> None:
        """Take a report in."""
        self._heard[status.node] = now, status.storage
        before = self._forget(status.node)
        after: dict[Key, Progress] = {}
        for instance in status.instances:
            if instance.state in (InstanceState.PENDING, InstanceState.STARTING):
                key, progress = (instance.function, instance.version), instance.progress or Progress(stage="pending")
                after[key] = max(after.get(key, progress), progress, key=_rank)
        if after:
            self._by_node[status.node] = _Report(after, now)
        self._look({key for key in (*before, *after) if before.get(key) != after.get(key)})

    def nodes(self, now: float) -> int:
        """How many report."""
        return len(self._reporting(now))

    def storage(self, now: float) -> dict[str, Storage]:
        """What these say of their disks, those whose loaderd is there."""
        return {node: said for node, (_, said) in self._reporting(now).items() if said is not None}

    def _reporting(self, now: float) -> dict[str, tuple[float, Storage | None]]:
        self._heard = {node: each for node, each in self._heard.items() if now - each[0] < limits.LOST_AFTER_S}
        return self._heard

    def restarted(self, status: NodeStatus) -> bool:
        """Whether this report is of another life of its node than the one before: its instances are gone."""
        before = self._boots.get(status.node)
        self._boots[status.node] = status.boot
        return before is not None and before != status.boot

    def of(self, key: Key, now: float) -> Progress | None:
        """The furthest start of this version; None if none goes on (or its node has fallen silent)."""
        while self._by_node:
            node, report = next(iter(self._by_node.items()))
            if now - report.seen < limits.LOST_AFTER_S:
                break
            self._look(self._forget(node))
        return self._furthest.get(key)

    def _forget(self, node: str) -> dict[Key, Progress]:
        """What it last said; it counts no more."""
        report = self._by_node.pop(node, None)
        return report.furthest if report is not None else {}

    def _look(self, keys: Iterable[Key]) -> None:
        """What the nodes say of these is another."""
        for key in keys:
            found = [report.furthest[key] for report in self._by_node.values() if key in report.furthest]
            if found:
                self._furthest[key] = max(found, key=_rank)
            else:
                self._furthest.pop(key, None)


def _rank(progress: Progress) -> tuple[int, float]:
    stage = _ORDER.index(progress.stage) if progress.stage in _ORDER else 0
    return stage, progress.done / progress.total if progress.total else 0.0

"""Keeps models where they should lie: counts how popular they are, decides by ``replicas``, asks nodes for what they
lack. Only models that nodes read from a source are placed; what a node has converted for itself it has for good."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from sllm_runtime.control import popularity
from sllm_runtime.control.changes import Write
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.pulling import Pulls
from sllm_runtime.control.replicas import Disk, Wish, spread
from sllm_runtime.control.view import View
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.ctl import Placed, Placements
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.records import ModelRecord, Popularity
from sllm_runtime.protocol.subjects import POPULARITY_KEY

log = logging.getLogger(__name__)

SPREAD_S: Final = 60.0
SHOWN: Final = 1000
"""Models that people are told of, the most popular ones: as many as fit one message."""


class Spreading:
    """Redoes it every SPREAD_S (by ``pause``) from ``start`` to ``close``, and when asked. ``before``: as popular as
    models were in the life of the controller before."""

    def __init__(
        self,
        loop: Loop,
        ledger: Ledger,
        nodes: Nodes,
        pulls: Pulls,
        before: Mapping[str, float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._loop, self._ledger, self._nodes, self._pulls = loop, ledger, nodes, pulls
        self._popular = dict(before)
        self._starts = dict(loop.view.learned.starts)
        self._counted = time.monotonic()
        self._pause = pause
        self._filling: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks("spreading")

    def start(self) -> None:
        self._tasks.start(self._run(), "spread")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await self._pause(SPREAD_S)
            await self.redo()

    async def redo(self) -> Placements:
        """Decide anew, and begin to bring what lacks; nothing of it is waited for."""
        self._count()
        view, now = self._loop.view, time.monotonic()
        placed = self._placed(view, now)
        for node, digests in placed.items():
            filling = self._filling.get(node)
            if filling is None or filling.done():
                self._filling[node] = self._tasks.start(self._fill(node, digests), f"fill {node}")
        return self.shown()

    def shown(self) -> Placements:
        """How it should be, and how it is."""
        view, now = self._loop.view, time.monotonic()
        placed, there = self._placed(view, now), {disk.node: disk.holds | disk.owns for disk in disks(view, now)}
        models = [
            Placed(
                model=record.digest,
                nbytes=record.nbytes,
                popularity=self._popular.get(record.digest, 0.0),
                wanted=tuple(sorted(node for node, digests in placed.items() if record.digest in digests)),
                there=tuple(sorted(node for node, digests in there.items() if record.digest in digests)),
            )
            for record in _placeable(view)
        ]
        models.sort(key=lambda each: (-each.popularity, each.model))
        return Placements(models=tuple(models[:SHOWN]))

    def _count(self) -> None:
        view, now = self._loop.view, time.monotonic()
        elapsed = now - self._counted
        counted = popularity.starts(view, self._starts, now, elapsed)
        found = popularity.after(self._popular, counted, elapsed)
        self._starts, self._counted = dict(view.learned.starts), now
        if found != self._popular:
            self._popular = found
            self._ledger.take([Write(POPULARITY_KEY, Popularity(models=found))])

    def _placed(self, view: View, now: float) -> Mapping[str, frozenset[str]]:
        wishes = [Wish(each.digest, each.nbytes, self._popular.get(each.digest, 0.0)) for each in _placeable(view)]
        return spread(wishes, disks(view, now))

    async def _fill(self, node: str, digests: frozenset[str]) -> None:
        """One model after the other, the most popular first. What fails is tried again at the next time."""
        try:
            await self._nodes.keep(node, tuple(sorted(digests)))
        except SllmError as error:
            log.warning("models of %s are not placed: %s", node, error.message)
            return
        for digest in sorted(digests, key=lambda each: (-self._popular.get(each, 0.0), each)):
            disk = next((disk for disk in disks(self._loop.view, time.monotonic()) if disk.node == node), None)
            record = self._loop.view.models.get(digest)
            if disk is None or record is None or digest in disk.holds | disk.owns:
                continue
            pull = self._pulls.join(record, node)
            await pull.done.wait()
            if pull.error is not None:
                log.warning("model %s is not brought to %s: %s", digest, node, pull.error.message)


def disks(view: View, now: float) -> list[Disk]:
    """The nodes that take models, with what they have of those that are registered."""
    found = []
    for name, node in sorted(view.nodes.items()):
        status = node.status
        if status is None or status.storage is None or not view.alive(name, now):
            continue
        if status.storage.ssd_limit > 0 and not (node.record.cordoned or node.record.draining or status.draining):
            found.append(_disk(view, status, status.storage.ssd_limit))
    return found


def _disk(view: View, status: NodeStatus, limit: int) -> Disk:
    known = view.models
    whole = {name for name, nbytes in status.copied.items() if name in known and nbytes >= known[name].nbytes}
    owns = frozenset(status.models) - frozenset(status.remote) - status.copied.keys()
    return Disk(status.node, limit, frozenset(whole), owns)


def _placeable(view: View) -> list[ModelRecord]:
    """Registered models that some node reads from a source."""
    statuses = [node.status for node in view.nodes.values() if node.status is not None]
    there = {digest for status in statuses for digest in (*status.remote, *status.copied)}
    return [view.models[digest] for digest in sorted(there & view.models.keys())]

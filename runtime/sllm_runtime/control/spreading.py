"""Keeps models where they should lie: counts how popular they are, decides by ``replicas``, asks nodes for what they
lack. Only models that nodes read from a source are placed; what a node has converted for itself it has for good."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from sllm_runtime.control import popularity
from sllm_runtime.control.backoff import delay
from sllm_runtime.control.changes import Write
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.listing import page
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.pulling import Pull, Pulls
from sllm_runtime.control.replicas import Disk, Wish, next_pulls, spread
from sllm_runtime.control.view import View
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.ctl import Placed, Placements
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.records import ModelRecord, Popularity
from sllm_runtime.protocol.subjects import POPULARITY_KEY

log = logging.getLogger(__name__)

SPREAD_S: Final = 60.0
LONGEST_S: Final = 3600.0
"""A model that cannot be brought is left alone for 1 s, then twice as long each time, no longer than this."""
SHOWN: Final = 1000
"""Models that people are told of, the most popular ones: as many as fit one message."""


class _Decision(NamedTuple):
    """What was decided, and what by."""

    wishes: list[Wish]
    disks: list[Disk]
    placed: Mapping[str, frozenset[str]]


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
        self._deciding = asyncio.Lock()
        self._last: _Decision | None = None
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, set[str]] = {}
        self._going: set[tuple[str, str]] = set()
        self._failed: dict[str, tuple[int, float]] = {}
        self._tasks = Tasks("spreading")

    def start(self) -> None:
        self._tasks.start(self._run(), "spread")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await self._pause(SPREAD_S)
            await self._decide()

    async def redo(self) -> Placements:
        """Decide anew, and begin to bring what lacks; nothing of it is waited for."""
        return self._told(await self._decide())

    async def shown(self) -> Placements:
        """How it should be, and how it is."""
        async with self._deciding:
            placed = await self._placed()
        return self._told(placed)

    async def _decide(self) -> Mapping[str, frozenset[str]]:
        async with self._deciding:
            self._count()
            self._failed = {digest: known for digest, known in self._failed.items() if digest in self._loop.view.models}
            placed = await self._placed()
            self._begin(placed)
            return placed

    def _begin(self, placed: Mapping[str, frozenset[str]]) -> None:
        self._left = {node: left for node, left in self._left.items() if node in placed}
        self._telling = {node: telling for node, telling in self._telling.items() if not telling.done()}
        for node in placed.keys() - self._telling.keys():
            self._telling[node] = self._tasks.start(self._tell(node, placed[node]), f"tell {node}")

    def _told(self, placed: Mapping[str, frozenset[str]]) -> Placements:
        view = self._loop.view
        there = {disk.node: disk.holds | disk.owns for disk in disks(view, time.monotonic())}
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
        shown, _ = page(((str(number), each) for number, each in enumerate(models[:SHOWN])), "")
        return Placements(models=tuple(shown))

    def _count(self) -> None:
        view, now = self._loop.view, time.monotonic()
        elapsed = now - self._counted
        counted = popularity.starts(view, self._starts, now, elapsed)
        found = popularity.after(self._popular, counted, elapsed)
        self._starts, self._counted = dict(view.learned.starts), now
        if found != self._popular:
            self._popular = found
            self._ledger.take([Write(POPULARITY_KEY, Popularity(models=found))])

    async def _placed(self) -> Mapping[str, frozenset[str]]:
        """Beside the loop, and not again while all that it goes by is the same: a thousand models on a hundred nodes
        take a second, which everybody else waits for at times. One at a time."""
        view, last = self._loop.view, self._last
        wishes = [Wish(each.digest, each.nbytes, self._popular.get(each.digest, 0.0)) for each in _placeable(view)]
        there = disks(view, time.monotonic())
        if last is None or (last.wishes, last.disks) != (wishes, there):
            self._last = last = _Decision(wishes, there, await asyncio.to_thread(spread, wishes, there))
        return last.placed

    async def _tell(self, node: str, digests: frozenset[str]) -> None:
        """What it keeps, before it is brought what it lacks of that."""
        self._left.pop(node, None)
        try:
            await self._nodes.keep(node, tuple(sorted(digests)))
        except SllmError as error:
            log.warning("models of %s are not placed: %s", node, error.message)
            return
        disk = next((disk for disk in disks(self._loop.view, time.monotonic()) if disk.node == node), None)
        if disk is not None:
            self._left[node] = set(digests - disk.holds - disk.owns)
            self._bring()

    def _bring(self) -> None:
        """Begin to bring what is next. What fails is tried again at the next time, less and less often."""
        now = time.monotonic()
        resting = {digest for digest, (_, until) in self._failed.items() if until > now}
        for digest, node in next_pulls(self._left, self._going, resting, self._popular):
            record = self._loop.view.models.get(digest)
            if record is None:
                self._left[node].discard(digest)
                continue
            self._going.add((digest, node))
            self._tasks.start(self._brought(self._pulls.join(record, node), digest), f"{digest} to {node}")

    async def _brought(self, pull: Pull, digest: str) -> None:
        await pull.done.wait()
        self._pulls.told(digest, pull)
        self._going.discard((digest, pull.node))
        self._left.get(pull.node, set()).discard(digest)
        if pull.error is None:
            self._failed.pop(digest, None)
        else:
            attempts = self._failed.get(digest, (0, 0.0))[0] + 1
            rest_s = delay(attempts, LONGEST_S)
            self._failed[digest] = (attempts, time.monotonic() + rest_s)
            text = "model %s is not brought to %s: %s; it is left alone for %g s"
            log.warning(text, digest, pull.node, pull.error.message, rest_s)
        self._bring()


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

"""Which models lie on which nodes' SSDs: replicas by popularity, round robin up to the byte limits (ServerlessLLM,
section 7). Pure.

How many replicas a model gets depends on popularities and the bytes that all nodes have, not on what lies where; then
models choose their nodes, the most popular first, and stay where they are if they can. So nothing moves unless
popularities do, and those count in steps: small changes are none.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log2
from typing import Final

STEPS: Final = 2
"""Steps of popularity from one value to twice as much."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A model of ``nbytes`` that is started ``popularity`` times in some time; 0: it gets no replica."""

    digest: str
    nbytes: int
    popularity: float


@dataclass(frozen=True, slots=True)
class Disk:
    """A node's SSD tier of ``limit`` bytes; ``holds``: models that lie on it, ``owns``: those that the node has
    elsewhere on its disk, for good."""

    node: str
    limit: int
    holds: frozenset[str] = frozenset()
    owns: frozenset[str] = frozenset()


def spread(wishes: Iterable[Wish], disks: Sequence[Disk]) -> Mapping[str, frozenset[str]]:
    """What is to lie on each disk, by node: within its limit, and of two models of which one is more popular (by a
    step) and no larger, never fewer of that one, as long as no node owns it."""
    ordered = sorted((wish for wish in wishes if wish.popularity > 0), key=_order)
    counts = _counts(ordered, disks)
    left = {disk.node: disk.limit for disk in disks}
    placed: dict[str, set[str]] = {disk.node: set() for disk in disks}
    for wish in ordered:
        asked = [disk for disk in disks if wish.digest not in disk.owns and left[disk.node] >= wish.nbytes]
        asked.sort(key=lambda disk: (wish.digest not in disk.holds, -left[disk.node], disk.node))
        for disk in asked[: counts[wish.digest]]:
            placed[disk.node].add(wish.digest)
            left[disk.node] -= wish.nbytes
    return {node: frozenset(digests) for node, digests in placed.items()}


def step(popularity: float) -> int:
    """Popularities of one step count the same."""
    return floor(log2(popularity) * STEPS)


def _order(wish: Wish) -> tuple[int, int, str]:
    return (-step(wish.popularity), wish.nbytes, wish.digest)


def _counts(ordered: Sequence[Wish], disks: Sequence[Disk]) -> Mapping[str, int]:
    """Replicas of each model, beside what nodes own: one of each in turn, then one more for the model with the most
    starts a replica, until the bytes of all disks are used or it is everywhere."""
    left = sum(disk.limit for disk in disks)
    owned = {wish.digest: sum(wish.digest in disk.owns for disk in disks) for wish in ordered}
    counts = dict.fromkeys(owned, 0)
    turns = [(_turn(wish, owned[wish.digest]), number) for number, wish in enumerate(ordered)]
    heapq.heapify(turns)
    while turns:
        _, number = heapq.heappop(turns)
        wish = ordered[number]
        have = owned[wish.digest] + counts[wish.digest]
        if have >= len(disks) or wish.nbytes > left:
            continue
        counts[wish.digest] += 1
        left -= wish.nbytes
        heapq.heappush(turns, (_turn(wish, have + 1), number))
    return counts


def _turn(wish: Wish, replicas: int) -> tuple[bool, float]:
    """When it is a model's turn to get one more replica: those without any come first."""
    return (replicas > 0, -(2.0 ** (step(wish.popularity) / STEPS)) / max(replicas, 1))

"""Which models lie on which nodes' SSDs: replicas by popularity, round robin up to the byte limits (ServerlessLLM,
section 7). Pure.

How many replicas a model gets depends on popularities and the room of each node, not on what lies where; then models
choose their nodes, the most popular first, and stay where they are if they can. So nothing moves unless popularities
do, and those count in steps: small changes are none.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import floor, log2
from typing import Final

STEPS: Final = 2
"""Steps of popularity from one value to twice as much."""

AT_ONCE: Final = 16
AT_ONCE_THERE: Final = 2
"""Models that are brought at the same time, in all and to one node: a slow one holds up no other, and a store is not
asked for everything at once."""


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
    step) and no larger, never fewer of that one, as long as no node owns it. None has a second replica in the room of
    another's first."""
    ordered = sorted((wish for wish in wishes if wish.popularity > 0), key=_order)
    dealt = _dealt(ordered, disks)
    counts = Counter(digest for digests in dealt.values() for digest in digests)
    placed = _kept(ordered, disks, counts)
    if counts.keys() <= frozenset().union(*placed.values()):
        return placed
    return dealt  # what lies there now is in the way of one that would have none then


def next_pulls(
    left: Mapping[str, Set[str]], going: Set[tuple[str, str]], resting: Set[str], popular: Mapping[str, float]
) -> list[tuple[str, str]]:
    """What is brought next, as (model, node), where ``left`` is to come to each node: the most popular first, at most
    AT_ONCE_THERE to a node and AT_ONCE in all, those that are ``going`` among them; none that is ``resting``."""
    there = Counter(node for _, node in going)
    wanted = [(digest, node) for node, digests in left.items() for digest in digests if digest not in resting]
    found: list[tuple[str, str]] = []
    for digest, node in sorted(wanted, key=lambda each: (-popular.get(each[0], 0.0), each)):
        if len(going) + len(found) >= AT_ONCE:
            break
        if (digest, node) not in going and there[node] < AT_ONCE_THERE:
            there[node] += 1
            found.append((digest, node))
    return found


def _kept(ordered: Sequence[Wish], disks: Sequence[Disk], counts: Mapping[str, int]) -> Mapping[str, frozenset[str]]:
    """So many replicas of each where they lie already, else where most room is, as far as there is any."""
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


def _dealt(ordered: Sequence[Wish], disks: Sequence[Disk]) -> Mapping[str, frozenset[str]]:
    """As if nothing lay anywhere: one replica of each model in turn, beside what nodes own, then one more for the model
    with the most starts a replica, each on the disk with most room, until there is none or it is everywhere. So how
    many there are does not move with where they are."""
    has = [{number for number, disk in enumerate(disks) if wish.digest in disk.owns} for wish in ordered]
    dealt: list[set[str]] = [set() for _ in disks]
    rooms = [(-disk.limit, number) for number, disk in enumerate(disks)]
    turns = [(_turn(wish, len(has[number])), number) for number, wish in enumerate(ordered)]
    heapq.heapify(rooms)
    heapq.heapify(turns)
    full: list[tuple[int, int, int]] = []
    while turns:
        _, number = heapq.heappop(turns)
        wish, count = ordered[number], len(has[number])
        if any(first < number and nbytes <= wish.nbytes and most <= count for first, nbytes, most in full):
            continue  # one that comes first and is no larger has no more
        disk = _roomiest(rooms, wish.nbytes, has[number])
        if disk is None:
            full += [(number, wish.nbytes, count)] if count < len(disks) else []
            continue
        has[number].add(disk)
        dealt[disk].add(wish.digest)
        heapq.heappush(turns, (_turn(wish, count + 1), number))
    return {disk.node: frozenset(digests) for disk, digests in zip(disks, dealt, strict=True)}


def _roomiest(rooms: list[tuple[int, int]], nbytes: int, has: Set[int]) -> int | None:
    """The disk with most room of those that have it not, by number, with so much less of it from now on; None: none has
    ``nbytes``. ``rooms``: a heap of (less room, number)."""
    passed, found = [], None
    while rooms and found is None and -rooms[0][0] >= nbytes:
        left, number = heapq.heappop(rooms)
        found = number if number not in has else None
        passed.append((left + nbytes if number == found else left, number))
    for each in passed:
        heapq.heappush(rooms, each)
    return found


def _turn(wish: Wish, replicas: int) -> tuple[bool, float]:
    """When it is a model's turn to get one more replica: those without any come first."""
    return (replicas > 0, -(2.0 ** (step(wish.popularity) / STEPS)) / max(replicas, 1))

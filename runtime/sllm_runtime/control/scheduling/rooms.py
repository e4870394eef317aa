"""Where a version fits now, quickest start first, without looking at every server."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush, merge
from math import inf
from typing import Final, TypeAlias

import msgspec

from sllm_runtime.control.fits import Need
from sllm_runtime.control.placement import May
from sllm_runtime.control.scheduling.crowd import NOBODY, Others, delay_s
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.learned import Learned
from sllm_runtime.control.scheduling.prediction import Estimate, Tier, arrival
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import Key
from sllm_runtime.protocol.loader import DISK, path_of
from sllm_runtime.protocol.records import ModelRecord

CLOSE_S: Final = 0.005
"""What could be quicker by less than this is not looked for: no estimate is so good."""
FEW: Final = 16
"""So many servers with a model on their SSD are looked at one by one, without an order."""


class Start(msgspec.Struct, frozen=True):
    """A start that looks for a place. ``may``: whether a node may be asked, room aside."""

    key: Key
    need: Need
    model: ModelRecord | None
    learned: Learned
    may: May
    others: Others = NOBODY
    """What other versions lack."""

    def delay_s(self, server: Server, seconds: float) -> float:
        """What a start that takes so many seconds on ``server`` costs those others."""
        return delay_s(server, self.need, self.others, seconds) if self.others else 0.0

    def on(self, server: Server, release: float = 0.0) -> Estimate:
        """What it takes there."""
        return estimate(server, self.key, self.model, self.learned, release, device=bool(self.need.gpus))

    def least(self, tier: Tier, weights: float, release: float = 0.0) -> float:
        """Seconds that it takes at the least where the weights come from ``tier`` and are there after ``weights``:
        added up in the order of ``Estimate.seconds``, so that it is never more by a rounding."""
        learned, key = self.learned, self.key
        beside = learned.least + learned.import_s(key)
        there = max(beside, weights)
        return release + there + learned.setup_s(key) + learned.rest_s(key, tier, there)


class Room(msgspec.Struct, frozen=True):
    """A server where it fits now. ``rank``: how far down its list of preferred accelerators these are."""

    server: Server
    gpus: tuple[int, ...]
    rank: int
    estimate: Estimate


_Found: TypeAlias = list[tuple[tuple[float, int, str], Room]]
_Tier: TypeAlias = tuple[Tier, Iterable[tuple[float, Server]]]
"""Servers that have the weights in one place, each with the least seconds until these are there; in rising order."""


def quickest(start: Start, servers: Servers, count: int = 1, within: float = inf) -> list[Room]:
    """Up to ``count`` rooms where it starts in less than ``within`` seconds: by the preference of their accelerators,
    then by the seconds of a start there, most free memory first where these are equal."""
    rooms: list[Room] = []
    for rank in range(max(len(start.need.gpus), 1)):
        found: _Found = []
        kind = start.need.gpus[rank][0].lower() if start.need.gpus else ""
        for tier in _tiers(start, servers, kind):
            _look(start, rank, tier, found, count - len(rooms), within)
        taken = {room.server.name for room in rooms}
        rooms += [room for order, room in found if room.server.name not in taken and order[0] < within]
        if len(rooms) >= count:
            break
    return rooms


def by_time(
    start: Start, servers: Servers, among: Mapping[str, Server], release: float, within: float
) -> Iterator[tuple[Estimate, Server]]:
    """Those of the servers ``among`` that may be asked and where it would start in less than ``within`` seconds, were
    there room after ``release`` of them; quickest first, by name where equal. No more are looked at than are taken."""
    if not among:
        return
    seen: list[tuple[float, str, Estimate, Server]] = []
    for least, _, server in merge(*(_leasts(start, tier, release) for tier in _tiers(start, servers))):
        while seen and seen[0][0] < least:
            _, _, guess, next_one = heappop(seen)
            yield guess, next_one
        if least >= within:
            break
        if server.name in among and start.may(server.node):
            guess = start.on(server, release)
            if (seconds := guess.seconds) < within:
                heappush(seen, (seconds, server.name, guess, server))
    while seen:
        _, _, guess, server = heappop(seen)
        yield guess, server


def _leasts(start: Start, tier: _Tier, release: float) -> Iterator[tuple[float, str, Server]]:
    where, ordered = tier
    return ((start.least(where, weights, release), server.name, server) for weights, server in ordered)


def _look(start: Start, rank: int, tier: _Tier, found: _Found, count: int, within: float) -> None:
    """The rooms of a tier. No more is looked at than can matter."""
    where, ordered = tier
    for weights, server in ordered:
        enough = found[-1][0][0] - CLOSE_S if len(found) >= count else within
        if enough < inf and start.least(where, weights) >= enough:
            return
        gpus = server.devices(start.need, rank)
        if gpus is None or not start.may(server.node):
            continue
        guess = start.on(server)
        insort(found, ((guess.seconds, -server.free.memory, server.name), Room(server, gpus, rank, guess)))
        del found[count:]


def _tiers(start: Start, servers: Servers, kind: str = "") -> Iterator[_Tier]:
    """The servers with a free accelerator of ``kind`` (empty: all) by where they have the weights."""
    model = start.model
    if model is None:
        yield "none", _weightless(servers, kind)
        return
    digest = model.digest
    learned, key = start.learned, start.key
    yield "dram", _roomiest(servers.in_dram(digest), learned.lead_s(key, "dram"), kind)
    near, lead = servers.on_ssd(digest), learned.lead_s(key, "ssd")
    if len(near) <= FEW:
        yield "ssd", _roomiest([server for server in near if digest not in server.stored.dram], lead, kind)
    elif near:
        ordered = _waits(servers, DISK, model, lead, kind)
        yield (
            "ssd",
            (each for each in ordered if digest in each[1].stored.ssd and digest not in each[1].stored.dram),
        )
    if len(near) < len(servers):
        ordered = _waits(servers, path_of(model.uri), model, learned.lead_s(key, "remote"), kind)
        yield (
            "remote",
            (each for each in ordered if digest not in each[1].stored.ssd and digest not in each[1].stored.dram),
        )


def _roomiest(among: list[Server], lead: float, kind: str) -> list[tuple[float, Server]]:
    """Those with a free accelerator of ``kind``, most free memory first."""
    found = [server for server in among if kind in server.spare] if kind else among
    if len(found) > 1:
        found.sort(key=lambda server: (-server.free.memory, server.name))
    return [(lead, server) for server in found]


def _weightless(servers: Servers, kind: str) -> Iterator[tuple[float, Server]]:
    """Those with a warm sandbox first."""
    cold = []
    for server in servers.by_memory(kind):
        if server.warm > 0:
            yield 0.0, server
        else:
            cold.append(server)
    for server in cold:
        yield 0.0, server


def _waits(servers: Servers, path: str, model: ModelRecord, lead: float, kind: str) -> Iterator[tuple[float, Server]]:
    waits, fastest = servers.by_wait(path, kind)
    read = model.nbytes / fastest if fastest else 0.0
    return ((arrival(wait, lead, read), server) for wait, server in waits)

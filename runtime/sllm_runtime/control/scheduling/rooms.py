"""Where a version fits now, quickest start first, without looking at every server."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

from sllm_runtime.control.fits import Need
from sllm_runtime.control.scheduling.estimate import estimate, largest
from sllm_runtime.control.scheduling.index import May, Servers
from sllm_runtime.control.scheduling.learned import Learned
from sllm_runtime.control.scheduling.prediction import Estimate
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import Key
from sllm_runtime.protocol.loader import DISK, path_of
from sllm_runtime.protocol.records import ModelRecord

CLOSE_S: Final = 0.005
"""What could be quicker by less than this is not looked for: no estimate is so good."""
FEW: Final = 16
"""So many servers with a model on their SSD are looked at one by one, without an order."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start that looks for a place. ``may``: whether a server may be asked, room aside."""

    key: Key
    need: Need
    model: ModelRecord | None
    learned: Learned
    may: May

    def on(self, server: Server, release: float = 0.0) -> Estimate:
        """What it takes there."""
        return estimate(server, self.key, self.model, self.learned, release)

    @property
    def least(self) -> tuple[float, float]:
        """Seconds that it takes however near the weights are: beside their coming, and after it."""
        return self.learned.least + self.learned.import_s(self.key), self.learned.setup_s(self.key)


@dataclass(frozen=True, slots=True)
class Room:
    """A server where it fits now. ``rank``: how far down its list of preferred accelerators these are."""

    server: Server
    gpus: tuple[int, ...]
    rank: int
    estimate: Estimate


_Found: TypeAlias = list[tuple[tuple[float, int, str], Room]]


def quickest(start: Start, servers: Servers, count: int = 1, within: float = inf) -> list[Room]:
    """Up to ``count`` rooms where it starts in less than ``within`` seconds: by the preference of their accelerators,
    then by the seconds of a start there, most free memory first where these are equal."""
    rooms: list[Room] = []
    for rank in range(max(len(start.need.gpus), 1)):
        found: _Found = []
        for tier in _tiers(start, servers):
            _look(start, rank, tier, found, count - len(rooms), within)
        taken = {room.server.name for room in rooms}
        rooms += [room for _, room in found if room.server.name not in taken and room.estimate.seconds < within]
        if len(rooms) >= count:
            break
    return rooms


def by_time(
    start: Start, servers: Servers, among: Mapping[str, Server], release: float, within: float
) -> list[tuple[Estimate, Server]]:
    """Those of the servers ``among`` that may be asked and where it would start in less than ``within`` seconds, were
    there room after ``release`` of them; quickest first."""
    if not among:
        return []
    beside, after = start.least
    found = []
    for tier in _tiers(start, servers):
        for weights, server in tier:
            if release + max(beside, weights) + after >= within:
                break
            if server.name not in among or not start.may(server):
                continue
            guess = start.on(server, release)
            if guess.seconds < within:
                found.append((guess, server))
    return sorted(found, key=lambda each: (each[0].seconds, each[1].name))


def _look(
    start: Start, rank: int, tier: Iterable[tuple[float, Server]], found: _Found, count: int, within: float
) -> None:
    """The rooms of a tier. It comes with the least seconds until the weights are there, in rising order: no more is
    looked at than can matter."""
    beside, after = start.least
    for weights, server in tier:
        enough = found[-1][0][0] - CLOSE_S if len(found) >= count else within
        if max(beside, weights) + after >= enough:
            return
        gpus = server.devices(start.need, rank)
        if gpus is None or not start.may(server):
            continue
        guess = start.on(server)
        insort(found, ((guess.seconds, -server.free.memory, server.name), Room(server, gpus, rank, guess)))
        del found[count:]


def _tiers(start: Start, servers: Servers) -> Iterator[Iterable[tuple[float, Server]]]:
    """The servers by where they have the weights; each tier in rising order of when these are there at the soonest."""
    model = start.model
    if model is None:
        yield _weightless(servers)
        return
    digest = model.digest
    yield ((0.0, server) for server in servers.in_dram(digest))
    near = servers.on_ssd(digest)
    if len(near) <= FEW:
        yield ((0.0, server) for server in near if digest not in server.stored.dram)
    else:
        yield (
            each
            for each in _waits(servers, DISK, model)
            if digest in each[1].stored.ssd and digest not in each[1].stored.dram
        )
    if len(near) < len(servers):
        yield (
            each
            for each in _waits(servers, path_of(model.uri), model)
            if digest not in each[1].stored.ssd and digest not in each[1].stored.dram
        )


def _weightless(servers: Servers) -> Iterator[tuple[float, Server]]:
    """Those with a warm sandbox first."""
    cold = []
    for server in servers.by_memory():
        if server.status.pool_idle > 0:
            yield 0.0, server
        else:
            cold.append(server)
    for server in cold:
        yield 0.0, server


def _waits(servers: Servers, path: str, model: ModelRecord) -> Iterator[tuple[float, Server]]:
    waits, fastest = servers.by_wait(path)
    read = largest(model) / fastest if fastest else 0.0
    return ((wait + read, server) for wait, server in waits)

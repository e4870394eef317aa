"""Which node an instance goes to. Every policy sees the same rooms; they differ in which of them they take."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sllm_runtime.control.fits import Need
from sllm_runtime.control.placement import Decision, Evict, Place, Policy, Request, Wait, room_made, why_not
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.prediction import Estimate
from sllm_runtime.control.scheduling.servers import Server, Servers
from sllm_runtime.control.view import Instance, View

RELEASE_S: Final = 0.2
"""Until an idle instance that is ended has given back what it held."""


@dataclass(frozen=True, slots=True)
class Room:
    """A server where it fits now. ``rank``: how far down its list of preferred accelerators these are."""

    server: Server
    gpus: tuple[int, ...]
    rank: int


def rooms(request: Request, need: Need, servers: Sequence[Server]) -> Iterator[Room]:
    """Where it fits, of the servers that may be asked."""
    for server in servers:
        chosen = server.room(need)
        if chosen is not None:
            yield Room(server, chosen[1], chosen[0])


class _Rooms(ABC):
    """What the simple policies share: a room if there is one, else the fewest idle instances end."""

    def __init__(self) -> None:
        self._servers = Servers()

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        need = request.need(view)
        servers = self.among(request, self._servers.able(view, request.key, now))
        found = list(rooms(request, need, servers))
        if found:
            room = self.choose(request, view, found, rng)
            return Place(room.server.name, room.gpus)
        return make_room(request, need, view, servers, now) or why_not(
            request, need, view, [server.node for server in servers]
        )

    def among(self, request: Request, servers: Sequence[Server]) -> Sequence[Server]:
        """Which of those that may be asked are."""
        return servers

    @abstractmethod
    def choose(self, request: Request, view: View, found: Sequence[Room], rng: random.Random) -> Room:
        """One of ``found``, which is not empty."""


class Random(_Rooms):
    """Any node where it fits, as serverless platforms that know nothing of models do."""

    def choose(self, request: Request, view: View, found: Sequence[Room], rng: random.Random) -> Room:
        return rng.choice(found)


class Availability(_Rooms):
    """The node with most free memory, wherever the weights are."""

    def choose(self, request: Request, view: View, found: Sequence[Room], rng: random.Random) -> Room:
        return min(found, key=lambda room: (room.rank, -room.server.free.memory, room.server.name))


class Locality(_Rooms):
    """Where the weights are, even if that means waiting for a place there; elsewhere only when no node has them."""

    def among(self, request: Request, servers: Sequence[Server]) -> Sequence[Server]:
        return [server for server in servers if _distance(request, server) < _REMOTE] or servers

    def choose(self, request: Request, view: View, found: Sequence[Room], rng: random.Random) -> Room:
        return min(found, key=lambda r: (r.rank, _distance(request, r.server), -r.server.free.memory, r.server.name))


_REMOTE: Final = 2


def _distance(request: Request, server: Server) -> int:
    """Tiers between the weights and the devices: 0 in DRAM (or no model), 1 on the SSD, 2 elsewhere."""
    if request.model is None or request.model in server.dram:
        return 0
    return 1 if request.model in server.ssd else _REMOTE


class StartupTime:
    """Least estimated startup (ServerlessLLM, section 6): queueing behind a busy disk counts as much as the distance of
    the weights. An idle instance is ended for it where that is quicker, its own next start counted against it."""

    def __init__(self) -> None:
        self._servers = Servers()

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        need = request.need(view)
        able = self._servers.able(view, request.key, now)
        rank, best = _quickest(request, view, list(rooms(request, need, able)))
        if best is not None:  # nobody makes way for accelerators that are less wanted than these
            need = replace(need, gpus=need.gpus[: rank + 1])
        made = _quickest_made(request, need, view, able, now, best)
        if made is not None:
            return made
        return best or why_not(request, need, view, [server.node for server in able])


def _quickest(request: Request, view: View, found: Sequence[Room]) -> tuple[int, Place | None]:
    """The rank of its accelerators, and the place."""
    model = view.models.get(request.model) if request.model else None
    best: tuple[tuple[int, float, int, str], Room, Estimate] | None = None
    for room in found:
        guess = estimate(room.server, request.key, model, view.learned)
        order = (room.rank, guess.seconds, -room.server.free.memory, room.server.name)
        if best is None or order < best[0]:
            best = (order, room, guess)
    if best is None:
        return 0, None
    _, room, guess = best
    return room.rank, Place(room.server.name, room.gpus, guess)


def _quickest_made(
    request: Request, need: Need, view: View, able: Sequence[Server], now: float, best: Place | None
) -> Decision | None:
    """Ending idle instances, or waiting for those that end: where that is quicker than ``best``, or the only way."""
    model = view.models.get(request.model) if request.model else None
    limit = best.estimate.seconds if best is not None and best.estimate is not None else float("inf")
    quickest: tuple[float, str, Decision] | None = None
    for server in able:
        if not server.yielding:
            continue
        guess = estimate(server, request.key, model, view.learned, RELEASE_S)
        if guess.seconds >= limit:
            continue
        idle = room_made(request, need, view, server.node, now)
        if idle is None or (best is not None and not idle and _busy(server)):
            continue
        seconds = guess.seconds + sum(_again(view, server, instance) for instance in idle)
        if seconds < limit and (quickest is None or (seconds, server.name) < quickest[:2]):
            quickest = (seconds, server.name, _ending(server.name, idle))
    return quickest[2] if quickest is not None else None


def _busy(server: Server) -> bool:
    """Whether instances that end there have calls to finish first, which may take as long as calls do."""
    return any(instance.stop is not None and instance.running for instance in server.instances.values())


def _again(view: View, server: Server, instance: Instance) -> float:
    """What ending an idle instance costs whoever calls it next."""
    return estimate(server, instance.key, view.model_of(instance.key), view.learned).seconds


def make_room(request: Request, need: Need, view: View, servers: Sequence[Server], now: float) -> Decision | None:
    """The fewest idle instances whose end lets it fit on one of ``servers``."""
    plans = []
    for server in sorted(servers, key=lambda server: server.name):
        idle = room_made(request, need, view, server.node, now) if server.yielding else None
        if idle is not None:
            plans.append((len(idle), server.name, idle))
    if not plans:
        return None
    _, name, idle = min(plans, key=lambda plan: plan[:2])
    return _ending(name, idle)


def _ending(name: str, idle: tuple[Instance, ...]) -> Decision:
    if not idle:
        return Wait(f"waits for instances to end on {name}")
    names = tuple(instance.record.instance for instance in idle)
    return Evict(names, f"makes room on {name} by ending {len(names)} idle instance(s)")


POLICIES: Final[Mapping[str, type[Policy]]] = {
    "random": Random,
    "availability": Availability,
    "locality": Locality,
    "startup-time": StartupTime,
}
DEFAULT: Final = "startup-time"

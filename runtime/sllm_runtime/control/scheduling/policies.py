"""Which node an instance goes to. Every policy sees the same rooms; they differ in which of them they take."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from sllm_runtime.control.fits import Need, short, total
from sllm_runtime.control.placement import Decision, May, Place, Policy, Request, may_start, why_not
from sllm_runtime.control.scheduling.ending import make_room
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.scheduling.startup import Preemption, StartupTime
from sllm_runtime.control.view import View

__all__ = ["DEFAULT", "POLICIES", "Availability", "Locality", "Preemption", "Random", "StartupTime"]


class _Simple(ABC):
    """What the simple policies share: the first in their order where it fits, else the fewest idle instances end."""

    def __init__(self) -> None:
        self._servers = Servers()

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        servers = self._servers
        there = servers.of(view)
        kept = [there[name] for name, key in view.kept.items() if key == request.key and name in there]
        need = request.own or servers.need(view, request.key, request.manifest)
        may = may_start(view, request.key, now, failed=request.failed)
        for rank in range(max(len(need.gpus), 1)):
            for server in chain(self.order(request, need, may, rng), kept):  # which is kept for it it takes in any case
                gpus = server.devices(need, rank)
                if gpus is not None and may(server.node):
                    return Place(server.name, gpus)
        asked = self.among(request, need, may)
        asked += [server for server in kept if may(server.node) and server not in asked]
        return make_room(request, need, view, asked, now) or why_not(
            request, need, view, [server.node for server in asked]
        )

    @abstractmethod
    def order(self, request: Request, need: Need, may: May, rng: random.Random) -> Iterator[Server]:
        """Servers, those first that are liked best."""

    def among(self, request: Request, need: Need, may: May) -> list[Server]:
        """Where instances may end for it."""
        return [server for server in self._servers.by_name() if may(server.node)]


class Random(_Simple):
    """Any node where it fits, as serverless platforms that know nothing of models do."""

    def order(self, request: Request, need: Need, may: May, rng: random.Random) -> Iterator[Server]:
        left = self._servers.by_name()
        while left:
            chosen = rng.randrange(len(left))
            left[chosen], left[-1] = left[-1], left[chosen]
            yield left.pop()


class Availability(_Simple):
    """The node with most free memory, wherever the weights are."""

    def order(self, request: Request, need: Need, may: May, rng: random.Random) -> Iterator[Server]:
        return self._servers.by_memory()


class Locality(_Simple):
    """Where the weights are, even if that means waiting for a place there; elsewhere only when no node has them that
    could run it."""

    def order(self, request: Request, need: Need, may: May, rng: random.Random) -> Iterator[Server]:
        near = self._near(request, need, may)
        yield from sorted(near, key=lambda server: (request.model not in server.stored.dram, *_roomy(server)))
        if not _could_run(near, need):
            yield from self._servers.by_memory()

    def among(self, request: Request, need: Need, may: May) -> list[Server]:
        near = self._near(request, need, may)
        return near if _could_run(near, need) else super().among(request, need, may)

    def _near(self, request: Request, need: Need, may: May) -> list[Server]:
        """All of them, where it has no model."""
        if request.model is None:
            return super().among(request, need, may)
        dram, ssd = self._servers.in_dram(request.model), self._servers.on_ssd(request.model)
        found = {server.name: server for server in (*dram, *ssd)}
        return [server for server in found.values() if may(server.node)]


def _could_run(servers: Iterable[Server], need: Need) -> bool:
    """Whether any of them could, were it empty."""
    return any(not short(need, total(server.status)) for server in servers)


def _roomy(server: Server) -> tuple[int, str]:
    return (-server.free.memory, server.name)


POLICIES: Final[Mapping[str, type[Policy]]] = {
    "random": Random,
    "availability": Availability,
    "locality": Locality,
    "preemption": Preemption,
    "startup-time": StartupTime,
}
DEFAULT: Final = "startup-time"

"""The policies that go by how long starts take (ServerlessLLM, section 6)."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Final

import msgspec

from sllm_runtime.control.placement import Decision, Evict, Place, Request, Wait, may_start, why_not
from sllm_runtime.control.scheduling.crowd import Crowd
from sllm_runtime.control.scheduling.ending import quickest_ending, release_s
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.moving import SETTLED_S, Moving, fewest_removed, quickest_move, under_way
from sllm_runtime.control.scheduling.rooms import FEW, Room, Start, by_time, quickest
from sllm_runtime.control.scheduling.waiting import quickest_wait
from sllm_runtime.control.view import Move, Node, View

OVERDUE_S: Final = 5.0
"""Moves that take so much longer than expected are not waited for where there is room without them, or where what is
idle makes some."""


def overdue(move: Move, now: float) -> bool:
    """Whether it has taken so much longer than was expected when it was decided."""
    return now > move.decided + move.seconds + OVERDUE_S


class StartupTime:
    """Least estimated startup, what it costs others that lack a place counted (``crowd``): queueing behind a busy disk
    counts as much as the distance of the weights. An idle instance is ended for it where that is quicker, its own next
    start counted against it; unless ``moves`` is False, running calls go on elsewhere where that is quicker; and where
    calls are expected to end soon beside the weights, it waits for that."""

    def __init__(self, moves: bool = True, settled_s: float = SETTLED_S) -> None:
        """``settled_s``: nothing is moved again sooner."""
        self._servers = Servers()
        self._crowd = Crowd(self._servers)
        self._moves, self._settled_s = moves, settled_s

    def ways(self, request: Request, view: View, now: float) -> Ways:
        """How room could be made for it."""
        return Ways(request, view, now, self._settled_s)

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        start = _start(request, view, self._servers, self._crowd, now)
        room = _first(start, self._servers)
        here = _here(room)
        if here is not None and not request.patient:
            return here
        may_move = request.patient and not request.further
        moves = under_way(view, request) if may_move else []
        if moves:
            waits = Wait(f"waits for {len(moves)} instance(s) to go on elsewhere")
            late = all(overdue(move, now) for move in moves)
            return here or self._idle(request, start, view, now) or waits if late else waits
        if room is not None and room.rank + 1 < len(start.need.gpus):  # nobody makes way for what is less wanted
            need = replace(start.need, gpus=start.need.gpus[: room.rank + 1])
            start = msgspec.structs.replace(start, need=need)
        best = _cost(start, room) if room is not None else inf
        made = quickest_ending(request, start, view, self._servers, now, best)
        if self._moves and may_move and self._servers.busy:
            moving = Moving.of(request, view, self._servers, now, self._settled_s, start.others)
            made = quickest_move(moving, start, made[0] if made is not None else best) or made
        otherwise = made[1] if made is not None else here
        kept = request.key in view.kept.values()  # whoever has a node kept for it has waited
        if request.patient and not kept and view.put_off_s(request.key, now) < _ready_s(otherwise):
            ends = quickest_wait(request, start, view, self._servers, now, made[0] if made is not None else best)
            if ends is not None:
                return replace(ends[1], room=True) if best != inf else ends[1]
        return otherwise or why_not(request, start.need, view, _asked(start, self._servers))

    def _idle(self, request: Request, start: Start, view: View, now: float) -> Decision | None:
        """Room by the end of what is idle, without a call to wait for."""
        made = quickest_ending(request, start, view, self._servers, now, inf)
        return made[1] if made is not None and made[0] < inf else None


class Preemption:
    """Shepherd* of the paper: the same choice of a server by estimated startup, but what runs there is stopped for it.
    Its calls go on from their tokens where there is room, or wait for it."""

    def __init__(self, settled_s: float = SETTLED_S) -> None:
        """``settled_s``: nothing is stopped sooner after it became ready."""
        self._servers = Servers()
        self._crowd = Crowd(self._servers)
        self._settled_s = settled_s

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        start = _start(request, view, self._servers, self._crowd, now)
        room = _first(start, self._servers)
        here = _here(room)
        if here is not None and not request.patient:
            return here
        best = _cost(start, room) if room is not None else inf
        made = quickest_ending(request, start, view, self._servers, now, best)
        otherwise = made[1] if made is not None else here
        # Nothing is stopped for what runs, nor where what is idle makes room.
        if request.patient and (made is None or made[0] == inf):
            moving = Moving.of(request, view, self._servers, now, self._settled_s, start.others)
            otherwise = self._stopped(moving, start, best) or otherwise
        return otherwise or why_not(request, start.need, view, _asked(start, self._servers))

    def _stopped(self, moving: Moving, start: Start, best: float) -> Evict | None:
        """What to stop where it starts soonest then, if that is before ``best``."""
        view, found, limit = moving.view, None, best
        for guess, server in by_time(start, self._servers, self._servers.busy, view.learned.least_release, best):
            if guess.seconds >= limit:
                break
            names = fewest_removed(moving, start, server)
            release = release_s(view, (view.instances[name] for name in names))
            seconds = guess.after(release).seconds
            cost = seconds + start.delay_s(server, guess.seconds)
            if names and cost < limit:
                why = f"makes room on {server.name} by stopping {len(names)} at work"
                limit, found = cost, Evict(names, why, names, at_once=True, seconds=seconds)
        return found


class Ways:
    """How room could be made for a start on one server after the other, as ``StartupTime`` weighs it; for people."""

    def __init__(self, request: Request, view: View, now: float, settled_s: float) -> None:
        self._servers = Servers()
        self._request, self._view, self._now = request, view, now
        self._start = _start(request, view, self._servers, Crowd(self._servers), now)
        self._moving = Moving.of(request, view, self._servers, now, settled_s, self._start.others)

    def on(self, name: str) -> list[Decision]:
        """The quickest of each kind on server ``name``."""
        may, view, servers = self._start.may, self._view, self._servers
        here = msgspec.structs.replace(self._start, may=lambda node: node.record.node == name and may(node))
        found = (
            quickest_move(self._moving, here, inf),
            quickest_ending(self._request, here, view, servers, self._now, inf),
            quickest_wait(self._request, here, view, servers, self._now, inf),
        )
        return [each[1] for each in found if each is not None]


def _start(request: Request, view: View, servers: Servers, crowd: Crowd, now: float) -> Start:
    servers.of(view)
    model = view.models.get(request.model) if request.model else None
    need = request.own or servers.need(view, request.key, request.manifest)
    others, may = crowd.others(request.key, view, now), may_start(view, request.key, now, failed=request.failed)
    return Start(request.key, need, model, view.learned, may, others)


def _first(start: Start, servers: Servers) -> Room | None:
    """Where it starts soonest, what it costs others counted."""
    if not start.others:
        return next(iter(quickest(start, servers)), None)
    rooms = quickest(start, servers, FEW)
    return min(rooms, key=lambda room: (room.rank, _cost(start, room)), default=None)


def _cost(start: Start, room: Room) -> float:
    seconds = room.estimate.seconds
    return seconds + start.delay_s(room.server, seconds)


def _ready_s(decision: Decision | None) -> float:
    """Seconds for which it may wait in place of it: calls may follow each other for ever there. Of the start alone,
    whatever it costs others: these may be as many as there are calls."""
    return decision.seconds if decision is not None and decision.seconds is not None else inf


def _here(room: Room | None) -> Place | None:
    return Place(room.server.name, room.gpus, room.estimate) if room is not None else None


def _asked(start: Start, servers: Servers) -> list[Node]:
    """The nodes that may be asked, by name."""
    return [server.node for server in servers.by_name() if start.may(server.node)]

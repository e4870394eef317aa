"""Room by ending what is idle: the fewest instances for the simple policies, the least time for the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from sllm_runtime.control.fits import Need
from sllm_runtime.control.placement import Decision, Evict, Request, Wait, room_made
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.rooms import Start, by_time
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import Instance, View


def quickest_ending(
    request: Request, start: Start, view: View, servers: Servers, now: float, best: float
) -> tuple[float, Decision] | None:
    """Ending idle instances, or waiting for those that end: where that is quicker than ``best`` seconds (infinite:
    there is no room anywhere), what is idle being started again counted against it."""
    found: tuple[float, str, Decision] | None = None
    limit = best
    for guess, server in by_time(start, servers, servers.yielding, view.learned.least_release, best):
        if guess.seconds >= limit:
            break
        idle = room_made(request, start.need, view, server.node, now)
        if idle is None or (best != inf and not idle and _ends_late(server)):
            continue
        ready = guess.after(release_s(view, idle or _leaving(server))).seconds
        seconds = ready + sum(again_s(view, server, instance) for instance in idle)
        if seconds < limit:
            limit, found = seconds, (seconds, server.name, ending(server.name, idle, ready))
    return (found[0], found[2]) if found is not None else None


def release_s(view: View, instances: Iterable[Instance]) -> float:
    """Until all of them, which are ended together, have given back what they hold."""
    return max((view.learned.release_s(each.key) for each in instances), default=0.0)


def _leaving(server: Server) -> list[Instance]:
    return [instance for instance in server.instances.values() if instance.stop is not None]


def _ends_late(server: Server) -> bool:
    """Whether instances that end there have calls to finish first, which may take as long as calls do. What is stopped
    at once has none: nothing is stopped for a start that then goes elsewhere."""
    stops = [instance.stop for instance in server.instances.values() if instance.running]
    return any(stop is not None and stop.grace_s > 0 for stop in stops)


def again_s(view: View, server: Server, instance: Instance) -> float:
    """What ending an idle instance costs whoever calls it next."""
    model, device = view.model_of(instance.key), instance.record.instance in server.held
    return estimate(server, instance.key, model, view.learned, device=device).seconds


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
    return ending(name, idle)


def ending(name: str, idle: tuple[Instance, ...], seconds: float | None = None) -> Decision:
    """The decision to end ``idle`` on server ``name``, for an instance that is ready there after ``seconds``; there are
    none: to wait for those that end already."""
    if not idle:
        return Wait(f"waits for instances to end on {name}")
    names = tuple(instance.record.instance for instance in idle)
    return Evict(names, f"makes room on {name} by ending {len(names)} idle instance(s)", seconds=seconds)

"""Room by ending what is idle: the fewest instances for the simple policies, the least time for the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from sllm_runtime.control.fits import Need
from sllm_runtime.control.placement import Decision, Evict, Request, Wait, ends_late, room_made
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.rooms import Start, by_time
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import Instance, View


def quickest_ending(
    request: Request, start: Start, view: View, servers: Servers, now: float, best: float
) -> tuple[float, Decision] | None:
    """Ending idle instances, or waiting for those that end: where that is quicker than ``best`` seconds (infinite:
    there is no room anywhere), what is idle being started again counted against it. Where what has calls to finish is
    waited for it takes infinitely long: only if there is no room, and no other server makes any."""
    found: Decision | None = None
    limit = (best == inf, best)  # whether calls have to end, and seconds beside these
    for guess, server in by_time(start, servers, servers.yielding, view.learned.least_release, best):
        if (False, guess.seconds) >= limit:
            break
        if found is not None and limit <= (True, guess.seconds) and all(map(ends_late, server.yielding)):
            continue  # no quicker than what is found, where a call has to end as well
        going = room_made(request, start.need, view, server.node, now)
        if going is None:
            continue
        idle = [each for each in going if each.stop is None]
        ready = guess.after(release_s(view, idle or going)).seconds
        seconds = ready + sum(again_s(view, server, instance) for instance in idle)
        cost = (any(map(ends_late, going)), seconds + start.delay_s(server, guess.seconds))
        if cost < limit:
            limit, found = cost, ending(server.name, going, ready, room=best != inf)
    return (inf if limit[0] else limit[1], found) if found is not None else None


def release_s(view: View, instances: Iterable[Instance]) -> float:
    """Until all of them, which are ended together, have given back what they hold."""
    return max((view.learned.release_s(each.key) for each in instances), default=0.0)


def again_s(view: View, server: Server, instance: Instance) -> float:
    """What ending an idle instance costs whoever calls it next."""
    model, device = view.model_of(instance.key), instance.record.instance in server.held
    return estimate(server, instance.key, model, view.learned, device=device).seconds


def make_room(request: Request, need: Need, view: View, servers: Sequence[Server], now: float) -> Decision | None:
    """The fewest idle instances whose end lets it fit on one of ``servers``; those where what has calls to finish is
    waited for come last."""
    plans = []
    for server in sorted(servers, key=lambda server: server.name):
        going = room_made(request, need, view, server.node, now) if server.yielding else None
        if going is not None:
            late = any(map(ends_late, going))
            plans.append((late, sum(each.stop is None for each in going), server.name, going))
    if not plans:
        return None
    *_, name, going = min(plans, key=lambda plan: plan[:3])
    return ending(name, going)


def ending(name: str, going: Sequence[Instance], seconds: float | None = None, *, room: bool = False) -> Decision:
    """The decision to end those of ``going`` on server ``name`` that do not end yet, for an instance that is ready
    there after ``seconds``; where all do, to wait for them. ``room``: there is some elsewhere."""
    claims = tuple(each.record.instance for each in going)
    names = tuple(each.record.instance for each in going if each.stop is None)
    known = seconds if not any(map(ends_late, going)) else None
    if not names:
        return Wait(f"waits for instances to end on {name}", seconds=known, room=room, claims=claims)
    why = f"makes room on {name} by ending {len(names)} idle instance(s)"
    return Evict(names, why, claims, seconds=known)

"""Room by waiting until calls end by themselves where the weights are. Pure.

The paper's scheduler takes a server where there is room, or makes some; locality alone waits, however long that takes.
Where calls are short beside a load from a store it is quicker to wait for the end of one: how long they take is known
from those before (``serving``). A call that takes longer than usual is soon expected to take longer than the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from math import inf
from typing import Final

from sllm_runtime.control.autoscale import BETWEEN_S, floor, lent_s
from sllm_runtime.control.placement import Request, Wait, fits
from sllm_runtime.control.scheduling.ending import again_s
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.rooms import Start
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.scheduling.serving import left_s
from sllm_runtime.control.view import Instance, View
from sllm_runtime.protocol.loader import DISK
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState

MOST_SERVERS: Final = 8
"""With the weights, where it would start soonest were they empty."""


def quickest_wait(
    request: Request, start: Start, view: View, servers: Servers, now: float, best: float
) -> tuple[float, Wait] | None:
    """The server with the weights where it starts soonest once calls have ended there, if that is before ``best``; the
    next starts of those that end for it are counted against it."""
    limit, soonest = best, view.learned.least_release
    if start.model is None or start.least("dram", 0.0, soonest) >= limit:
        return None
    found: tuple[float, Wait] | None = None
    for least, _, server in _near(start, start.model, servers, soonest):
        if least >= limit:
            break
        if server.room(start.need) is not None:  # nobody waits for that
            continue
        made = _quickest(request, start, view, server, now, limit, limit - least + soonest)
        if made is not None:
            limit, found = made[0], made
    return found


def _near(start: Start, model: ModelRecord, servers: Servers, release: float) -> list[tuple[float, str, Server]]:
    """Servers with the weights that may be asked, with the least seconds that it takes there, in rising order."""
    digest, nbytes = model.digest, model.largest
    found = [(start.least("dram", 0.0, release), each.name, each) for each in servers.in_dram(digest)]
    for each in servers.on_ssd(digest):
        if digest not in each.stored.dram:
            wait, bandwidth = each.wait(DISK)
            found.append((start.least("ssd", wait + nbytes / bandwidth, release), each.name, each))
    return nsmallest(MOST_SERVERS, (each for each in found if start.may(each[2])))


def _quickest(
    request: Request, start: Start, view: View, server: Server, now: float, limit: float, within: float
) -> tuple[float, Wait] | None:
    """Waiting for the fewest of those that end ``within`` so many seconds on ``server``, the soonest first, if it is
    quicker than ``limit``."""
    ends = ((_gone_s(request, view, each, now, within), name, each) for name, each in server.instances.items())
    coming = [each for each in ends if each[0] < within]
    coming.sort(key=lambda each: each[:2])
    for count in range(1, len(coming) + 1):
        chosen = coming[:count]
        if not _could(start, server, chosen):
            continue
        ready = start.on(server, chosen[-1][0]).seconds
        if ready >= limit:
            break
        if count == 1 and ready + again_s(view, server, chosen[0][2]) >= limit:  # cheaper to know than what fits
            continue
        if not _fits(start, view, server, chosen):
            continue
        chosen = _needed(start, view, server, chosen)
        if not any(_goes_on(instance, now) for _, _, instance in chosen):
            continue
        seconds = ready + sum(again_s(view, server, instance) for _, _, instance in chosen)
        if seconds >= limit:
            break
        why = f"waits for calls to end on {server.name}, where it would be ready after {ready:.2f} s"
        return seconds, Wait(why, seconds=ready, claims=tuple(name for _, name, _ in chosen))
    return None


def _could(start: Start, server: Server, ends: Sequence[tuple[float, str, Instance]]) -> bool:
    """Whether there are as many accelerators then; no more than that is looked at."""
    if not start.need.gpus:
        return True
    given = sum(len(server.held.get(name, ())) for _, name, _ in ends) + len(server.free.gpus)
    return given >= min(count for _, count in start.need.gpus)


def _needed(
    start: Start, view: View, server: Server, ends: Sequence[tuple[float, str, Instance]]
) -> list[tuple[float, str, Instance]]:
    """Of ``ends``, which make room, those without which there is none."""
    kept = list(ends)
    for each in ends[:-1]:
        fewer = [other for other in kept if other is not each]
        kept = fewer if _fits(start, view, server, fewer) else kept
    return kept


def _fits(start: Start, view: View, server: Server, ends: Iterable[tuple[float, str, Instance]]) -> bool:
    return fits(start.need, view, server.node, [instance for _, _, instance in ends])


def _gone_s(request: Request, view: View, instance: Instance, now: float, within: float) -> float:
    """Seconds until ``instance`` may be ended and has given back what it held; infinite where that is not ``within`` so
    many, or nobody knows when its calls end, or it is needed then."""
    learned, seen, record = view.learned, instance.seen, instance.record
    key = (record.function, record.version)
    if instance.stop is not None:
        return learned.release_s(key) if not instance.running else inf
    if seen is None or record.state is not InstanceState.READY or record.instance in view.claims:
        return inf
    if not seen.running:
        after = lent_s(instance) - instance.idle_s(now)
    elif (call_s := learned.call_s(key)) is None or instance.turn_since is None:
        return inf
    else:
        after = left_s(call_s, now - instance.turn_since) + BETWEEN_S
    if after >= within:  # as most
        return inf
    if key == request.key or key in view.trials or view.demand(key) or not _spare(view, instance):
        return inf
    return max(0.0, after) + learned.release_s(key)


def _goes_on(instance: Instance, now: float) -> bool:
    """Whether there is anything to wait for: one that could be ended now is ended (``ending``), or is left alone."""
    return instance.stop is not None or instance.running > 0 or instance.idle_s(now) < lent_s(instance)


def _spare(view: View, instance: Instance) -> bool:
    """Whether its version has more than it needs, without those that are waited for already."""
    least = floor(view, instance.key, instance.manifest)
    if not least:
        return True
    ready = [other for other in view.of(instance.key) if other.ready and other.record.instance not in view.claims]
    return len(ready) > least

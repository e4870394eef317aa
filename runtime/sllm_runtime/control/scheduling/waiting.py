"""Room by waiting until calls end by themselves where the weights are. Pure.

The paper's scheduler takes a server where there is room, or makes some; locality alone waits, however long that takes.
Where calls are short beside a load from a store it is quicker to wait for the end of one: how long they take is known
from those before (``serving``). A call that takes longer than usual is soon expected to take longer than the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Final, NamedTuple

from sllm_runtime.control.autoscale import BETWEEN_S, floor, lent_s
from sllm_runtime.control.placement import Request, Wait, fits, needed
from sllm_runtime.control.scheduling.ending import again_s
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.prediction import arrival
from sllm_runtime.control.scheduling.rooms import Start
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.scheduling.serving import left_s, over_s
from sllm_runtime.control.view import STARTING, Claim, Instance, View
from sllm_runtime.protocol.loader import DISK
from sllm_runtime.protocol.records import ModelRecord

MOST_SERVERS: Final = 8
"""With the weights, where it would start soonest were they empty."""


def quickest_wait(
    request: Request, start: Start, view: View, servers: Servers, now: float, best: float
) -> tuple[float, Wait] | None:
    """The server with the weights where it starts soonest once calls have ended there, if that is before ``best``; the
    next starts of those that end for it are counted against it."""
    limit, release = best, view.learned.least_release
    if start.model is None or (soonest := start.least("dram", 0.0, release)) >= limit:
        return None
    found: tuple[float, Wait] | None = None
    for least, _, server in _near(start, start.model, servers, release, soonest):
        if least >= limit:
            break
        made = _quickest(request, start, view, server, now, limit, limit - least + release)
        if made is not None:
            limit, found = made[0], made
    return found


def _near(
    start: Start, model: ModelRecord, servers: Servers, release: float, soonest: float
) -> Iterator[tuple[float, str, Server]]:
    """Servers with the weights that may be asked, with the least seconds that it takes there, in rising order;
    ``soonest``: where they are in memory."""
    digest, lead = model.digest, start.learned.lead_s(start.key, "ssd")
    found = [(soonest, each.name, each) for each in servers.in_dram(digest)]
    for each in servers.on_ssd(digest):
        if digest not in each.stored.dram:
            wait, bandwidth = each.wait(DISK)
            there = arrival(wait, lead, model.nbytes / bandwidth)
            found.append((start.least("ssd", there, release), each.name, each))
    found.sort(key=_BY_TIME)
    return islice((each for each in found if start.may(each[2].node)), MOST_SERVERS)


def _quickest(
    request: Request, start: Start, view: View, server: Server, now: float, limit: float, within: float
) -> tuple[float, Wait] | None:
    """Waiting for the fewest of those that end ``within`` so many seconds on ``server``, the soonest first, if it is
    quicker than ``limit``."""
    coming = sorted(_endings(request, view, server, now, within), key=_BY_TIME)
    if not coming or server.room(start.need) is not None:  # where there is room nobody waits
        return None
    begins = start.on(server).seconds
    chosen, lack = list[_Ending](), _lack(start, server)
    for last in coming:
        ready = last.seconds + begins
        if ready >= limit:
            break
        if last.instance.stop is None and not _free(view, last.instance):
            continue
        chosen.append(last)
        lack -= len(server.held.get(last.name) or last.instance.gpus)
        if lack > 0 or ready + again_s(view, server, last.instance) >= limit or not _fits(start, view, server, chosen):
            continue
        kept = needed(start.need, view, server.node, [each.instance for each in reversed(chosen)])
        if all(each.due for each in chosen if each.instance in kept):
            continue
        seconds = ready + sum(again_s(view, server, instance) for instance in kept) + start.delay_s(server, begins)
        if seconds >= limit:
            continue  # of those that end later fewer may be needed, or such as start again sooner
        why = f"waits for calls to end on {server.name}, where it would be ready after {ready:.2f} s"
        return seconds, Wait(why, seconds=ready, claims=tuple(instance.record.instance for instance in kept))
    return None


class _Ending(NamedTuple):
    """An instance that is expected to end, or to be there to be ended."""

    seconds: float
    """Until it has given back what it held."""
    name: str
    instance: Instance
    due: bool
    """Nothing is waited for: it could be ended now. It is (``ending``), or is left alone."""


_BY_TIME: Final = itemgetter(0, 1)


def _endings(request: Request, view: View, server: Server, now: float, within: float) -> Iterator[_Ending]:
    """Those of ``server`` that are over ``within`` so many seconds, with who waits for their places before; not those
    of which nobody knows when their calls end, nor those of the version itself."""
    learned, claims, own = view.learned, view.claims, request.key
    known, soon = learned.calls.get, within - BETWEEN_S
    for key, since, instance in server.turns:  # most of a busy cluster: the most that a decision looks at
        usual = known(key)
        if usual is None or (left := left_s(usual.middle, now - since)) >= soon or key == own:
            continue
        yield from _after(claims, left + BETWEEN_S + learned.release_s(key), within, instance, now)
    for guess, instance in server.starting:
        if instance.key != request.key:
            seconds = over_s(view, instance.key, left_s(guess.seconds, now - instance.placed))
            yield from _after(claims, seconds, within, instance, now)
    for instance in server.yielding:
        if instance.stop is not None:
            after = inf if instance.running else 0.0
        elif instance.seen is None or instance.key == request.key:
            continue
        else:
            after = lent_s(instance) - instance.idle_s(now)
        seconds = max(0.0, after) + learned.release_s(instance.key)
        yield from _after(claims, seconds, within, instance, now, due=after <= 0 and instance.stop is None)


def _after(
    claims: Mapping[str, Claim], seconds: float, within: float, instance: Instance, now: float, *, due: bool = False
) -> Iterator[_Ending]:
    """``instance``, whose place is free after ``seconds``, or once it has served those who wait for it already."""
    name = instance.record.instance
    before = claims.get(name)
    if before is not None:
        seconds, due = max(seconds, before.until - now), False
    if seconds < within:
        yield _Ending(seconds, name, instance, due)


def _free(view: View, instance: Instance) -> bool:
    """Whether nobody counts on it: neither its own version nor a start that waits for its place already."""
    key = instance.key
    if key in view.trials or view.demand(key) > _coming(view, instance):
        return False
    return (not view.migrations or instance.record.instance not in view.destinations) and _spare(view, instance)


def _coming(view: View, instance: Instance) -> int:
    """Calls that its version's instances take which start, if it is one of them: each is over after one turn."""
    if instance.state not in STARTING:
        return 0
    return instance.manifest.concurrency * sum(other.state in STARTING for other in view.of(instance.key) if other.live)


def _lack(start: Start, server: Server) -> int:
    """Accelerators that ``server`` has too few free, of whatever kind: no more than that is looked at."""
    return min((count for _, count in start.need.gpus), default=0) - len(server.free.gpus)


def _fits(start: Start, view: View, server: Server, ends: Iterable[_Ending]) -> bool:
    return fits(start.need, view, server.node, [each.instance for each in ends])


def _spare(view: View, instance: Instance) -> bool:
    """Whether its version has more than it needs, without those that are waited for already."""
    least = floor(view, instance.key, instance.manifest)
    if not least:
        return True
    ready = [other for other in view.of(instance.key) if other.ready and other.record.instance not in view.claims]
    return len(ready) > least

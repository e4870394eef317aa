"""A start that fits is not put off for ever: it waits at most twice as long as a running call may take. Pure.

Others may be placed before it again and again: smaller ones, or such as are more urgent. When it has waited for as long
as any running call may last, a place is kept for it: its node takes nothing else, as little as may be of what runs
there takes no new call, and the last one ends within that time again. So does each of several starts of a version, one
after the other, as long as half of the nodes that could run it are not kept: those beyond wait until one of these has
given its places, and others have the rest meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

from sllm_runtime.control import instances
from sllm_runtime.control.autoscale import floor, lent_s
from sllm_runtime.control.fits import Need, free, need_in, short, total
from sllm_runtime.control.placement import Request, evictable, fewest, may_start
from sllm_runtime.control.providing.packing import places
from sllm_runtime.control.scheduling.prediction import Outlook
from sllm_runtime.control.turns import Turns
from sllm_runtime.control.view import EMPTY, STARTING, Instance, Key, Node, PutOff, View, Waited, without

LINGER_S: Final = 2.0
"""Who asks for an instance asks again within this: between two questions nobody has given up."""
NODES: Final = 32
"""To look at so many for a place to keep takes as long as to look for one place (``turns``)."""
ASIDE_S: Final = 10.0
"""An idle instance that its version wants in any case goes elsewhere for what has waited for so long."""
MOST_LONGER: Final = 4
"""Others that have waited longer, and are looked for a place before one."""


def put_off(view: View, request: Request, now: float, outlook: Outlook | None = None) -> View:
    """The start was not placed now; ``outlook``: what was decided for it."""
    known = view.put_off.get(request.key, PutOff(now, now))
    known = replace(known, last=now, outlook=known.outlook or outlook)
    return replace(view, put_off={**view.put_off, request.key: known})


def waited(view: View, request: Request, count: int, now: float, turns: Turns[Key]) -> View:
    """So many starts of a version that was put off have no place, those aside that wait beside room. Keeps one place
    more where one has waited long enough: each has its own time, the first one that gets a place the longest."""
    key, known = request.key, view.put_off.get(request.key)
    if known is None:
        return view
    there = [Waited(each.since, now) for each in known.waits[:count]]
    gone = [each for each in known.waits[count:] if now - each.last <= LINGER_S]  # who asks may ask again at once
    waits = (*there, *gone, *[Waited(now, now)] * (count - len(there)))
    view, kept = _let_go(replace(view, put_off={**view.put_off, key: replace(known, waits=waits)}), key, now)
    due = bisect_left(there, True, key=lambda each: not _outlasts(view, now - each.since))
    coming = sum(kept.values())
    long = not kept and bool(there) and now - there[0].since >= ASIDE_S
    if coming >= due:
        return _stepped_aside(view, request, now, turns) if long else view
    mine = _Asks(request, kept, there[coming].since)
    for asks in (*_longer(view, key, mine.since), mine):
        turns.looked(key, 1 + len(view.nodes) // NODES)
        found = _place(view, asks.request, asks.kept, now)
        if found is not None:
            break
    else:  # what idles for its version in any case is in the way of the place, or there is none at all
        return _stepped_aside(view, request, now, turns) if long else view
    turns.more = turns.more or asks is not mine or coming + 1 < due
    name, leaving = found
    key = asks.request.key
    view = replace(view, kept={**view.kept, name: key})
    # Those that end already have their time, and those that are about to work are stopped once they do.
    for instance in (each for each in leaving if each.stop is None and not _begins(view, each, key, now)):
        reason = f"makes room for {key[0]}, which has waited for {now - asks.since:.0f} s"
        grace = instance.manifest.timeout if instance.ready else 0.0
        view = instances.stop(view, instance, reason, grace, resume=instance.carries)
    return view


class _Asks(NamedTuple):
    """Who wants a node kept: what starts, nodes that are kept for it with their places, and since when it waits."""

    request: Request
    kept: Mapping[str, int]
    since: float


def _longer(view: View, key: Key, since: float) -> list[_Asks]:
    """Starts of other versions that have waited since before ``since`` and have no node kept, the longest first: with
    the more urgent ones always before them they would wait for ever."""
    have, found = {*view.kept.values(), key}, list[_Asks]()
    for other, known in view.put_off.items():
        if other not in have and known.waits and known.waits[0].since < since and other in view.versions:
            version = view.versions[other]
            found.append(_Asks(Request(other, version.manifest, version.model), EMPTY, known.waits[0].since))
    return sorted(found, key=lambda asks: asks.since)[:MOST_LONGER]


def settled(view: View, now: float) -> View:
    """What is no longer wanted has nothing kept for it."""
    return served(view, [key for key, known in view.put_off.items() if now - known.last > LINGER_S])


def waits_on(view: View, keys: Sequence[Key], now: float) -> View:
    """Of those of these versions that wait for a place nobody has given up; it was not their turn to look for one."""
    still = {key: replace(view.put_off[key], last=now) for key in keys if key in view.put_off}
    return replace(view, put_off={**view.put_off, **still}) if still else view


def served(view: View, keys: Sequence[Key]) -> View:
    """What these versions wait for is not a place, or no longer."""
    if not any(key in view.put_off for key in keys):
        return view
    kept = {node: key for node, key in view.kept.items() if key not in keys}
    return replace(view, put_off=without(view.put_off, keys), kept=kept)


def behind(view: View, key: Key, now: float, outlook: Outlook | None) -> View:
    """It has got an instance and wants more: it is behind those who wait for their first, and has waited all the same.
    ``outlook``: of one that waits still."""
    known = view.put_off.get(key)
    if known is None:
        return view
    later = PutOff(now, now, outlook, lacks=min(known.since, known.lacks), waits=known.waits[1:])
    return _let_go(replace(view, put_off={**view.put_off, key: later}), key, now)[0]


def _let_go(view: View, key: Key, now: float) -> tuple[View, Mapping[str, int]]:
    """What is kept for it no longer than it has places for those that wait, the nodes with the fewest calls left first.
    With the places that each of these gives, or will give."""
    mine = [name for name, whose in view.kept.items() if whose == key]
    if not mine:
        return view, {}
    may, need = may_start(view, key, now), need_in(view, key, view.versions[key].manifest)
    left, kept = len(view.put_off[key].waits), dict[str, int]()
    going = {name: _going(view, key, name, now) for name in mine if name in view.nodes and may(view.nodes[name])}
    for name in sorted(going, key=lambda name: (sum(each.running for each in going[name]), name)):
        given = _given(view, need, view.nodes[name], left, going[name])
        if given:
            left, kept[name] = left - given, given
    gone = [name for name in mine if name not in kept]
    return replace(view, kept=without(view.kept, gone)) if gone else view, kept


def _going(view: View, key: Key, node: str, now: float) -> list[Instance]:
    """What is being ended there for version ``key``, or will be once it works."""
    there = [each for each in view.on(node).values() if not each.ended]
    return [each for each in there if each.stop is not None or _begins(view, each, key, now)]


def _begins(view: View, instance: Instance, key: Key, now: float) -> bool:
    """Whether it starts, or has just begun and its first call is on its way: it is not ended for version ``key`` now,
    or nobody would ever get ready, but once it works. Until then its place is counted on: others would start there
    without end."""
    if instance.key == key or instance.stop is not None or instance.running:
        return False
    return instance.state in STARTING or (instance.ready and instance.idle_s(now) < lent_s(instance))


def _given(view: View, need: Need, node: Node, most: int, leaving: Sequence[Instance] = ()) -> int:
    """Places there, at most so many, where those that leave have gone."""
    capacity = free(view, node, leaving)
    return places(need, capacity, most) if capacity is not None else 0


def _enough(view: View, need: Need, node: Node, count: int, leaving: Sequence[Instance]) -> bool:
    """Whether there are so many places without those that leave."""
    return _given(view, need, node, count, leaving) == count


def _outlasts(view: View, waited: float) -> bool:
    """Whether calls run now, and none of them may last for longer than it has ``waited``."""
    running = False
    for instance in view.instances.values():
        if instance.running and not instance.ended:
            if instance.manifest.timeout > waited:
                return False
            running = True
    return running


class _Cost(NamedTuple):
    """Of a place to keep: what is ended for it. The less the better."""

    urgent: bool
    """Whether any of these calls is more urgent than what it is kept for."""
    calls: int
    further: bool
    """Whether its node is not kept yet."""
    node: str


def _place(view: View, request: Request, kept: Mapping[str, int], now: float) -> tuple[str, Sequence[Instance]] | None:
    """A node that could run one more than is ``kept`` there, and what has to leave it for that, where this costs the
    least. No more nodes are kept than half of those that live and could run it."""
    need, may = request.need(view), may_start(view, request.key, now)
    able = [each for each in view.nodes.values() if each.status is not None and not short(need, total(each.status))]
    further = 2 * len(kept) < sum(node.open and view.alive(node.record.node, now) for node in able)
    offers = []
    for node in able:
        name = node.record.node
        if may(node) and (further or name in kept):
            enough = partial(_enough, view, need, node, kept.get(name, 0) + 1)
            leaving = _leaving(view, request, name, now)
            least = _cost(request, name, [] if enough([]) else leaving[:1], kept)
            offers.append((least, leaving, enough))
    best: tuple[_Cost, Sequence[Instance]] | None = None
    for least, leaving, enough in sorted(offers, key=itemgetter(0)):
        if best is not None and best[0] < least:
            break
        if enough(leaving):
            chosen = fewest(leaving, enough)
            cost = _cost(request, least.node, chosen, kept)
            if best is None or cost < best[0]:
                best = (cost, chosen)
    return (best[0].node, best[1]) if best is not None else None


def _leaving(view: View, request: Request, node: str, now: float) -> list[Instance]:
    """What could leave ``node`` for it, what costs least first. Idle instances that a version wants in any case stay,
    and its own: of these one more would be lacking."""
    there = [each for each in view.on(node).values() if not each.ended]
    own = request.key
    leaving = [
        i
        for i in there
        if i.stop or (i.running and i.key != own) or evictable(request, view, i, now) or _begins(view, i, own, now)
    ]
    return sorted(
        leaving,
        key=lambda each: (each.stop is None, _begins(view, each, own, now), _urgent(request, each), _calls(each)),
    )


def _stepped_aside(view: View, request: Request, now: float, turns: Turns[Key]) -> View:
    """Idle instances that a version wants in any case leave a node for it that is kept for it then, where that is
    enough, and each of them has room on another one: nothing else would ever end them."""
    turns.looked(request.key, 1 + len(view.nodes) // NODES)
    need, may = request.need(view), may_start(view, request.key, now)
    rooms: dict[tuple[Key, int], Mapping[str, int]] = {}
    for name, node in view.nodes.items():
        if node.status is None or short(need, total(node.status)) or not may(node):
            continue
        enough = partial(_enough, view, need, node, 1)
        idle = [each for each in view.on(name).values() if _idle(view, each, request, now)]
        going = fewest(idle, enough) if enough(idle) else []
        if not going or not _elsewhere(view, going, name, now, rooms):
            continue
        view = replace(view, kept={**view.kept, name: request.key})
        for instance in going:
            reason = f"makes room for {request.key[0]}: its version has room elsewhere"
            view = instances.stop(view, instance, reason, instance.manifest.timeout, resume=instance.carries)
        return view
    return view


def _idle(view: View, instance: Instance, request: Request, now: float) -> bool:
    """Whether nobody calls it, is on the way to it, or waits for one like it; nor is it of something more urgent, which
    would be without one for as long as a start takes."""
    taken = instance.record.instance in view.destinations or instance.record.instance in view.moves
    wanted = instance.key in (request.key, *view.trials) or view.demand(instance.key)
    if not instance.ready or taken or wanted or instance.running:
        return False
    return instance.manifest.priority <= request.manifest.priority and instance.idle_s(now) >= lent_s(instance)


def _elsewhere(
    view: View, going: Sequence[Instance], node: str, now: float, rooms: dict[tuple[Key, int], Mapping[str, int]]
) -> bool:
    """Whether those that leave ``node``, of one version that may start again, have room on others. ``rooms``: places
    that each node has for so many of a version, as far as that was looked for."""
    key, most = going[0].key, len(going)
    if any(each.key != key for each in going) or key not in view.versions:
        return False
    failure = view.failures.get(key)
    if failure is not None and (now < failure.until or (failure.blocking and _spare(view, going) < 0)):
        return False  # what works may be the last
    if (key, most) not in rooms:
        need, may = need_in(view, key, going[0].manifest), may_start(view, key, now)
        rooms[key, most] = {
            name: _given(view, need, each, most)
            for name, each in view.nodes.items()
            if name not in view.kept and each.status is not None and may(each)
        }
    room = rooms[key, most]
    return sum(room.values()) - room.get(node, 0) >= most


def _spare(view: View, going: Sequence[Instance]) -> int:
    """Of a version of which a start has failed, and none was made since: those that work, beyond what it wants in any
    case, or where that is nothing but those that go, beyond one that stays. Below zero it may be without any."""
    key = going[0].key
    work = sum(each.ready for each in view.of(key))
    return min(work - floor(view, key, going[0].manifest), work - len(going) - 1)


def _urgent(request: Request, instance: Instance) -> bool:
    return bool(_calls(instance)) and instance.manifest.priority > request.manifest.priority


def _calls(instance: Instance) -> int:
    """That it works on, or is started for."""
    return instance.running or int(instance.state in STARTING)


def _cost(request: Request, node: str, leaving: Sequence[Instance], kept: Mapping[str, int]) -> _Cost:
    ended = [each for each in leaving if each.stop is None]  # the others end in any case
    urgent = any(_urgent(request, each) for each in ended)
    return _Cost(urgent, sum(map(_calls, ended)), node not in kept, node)

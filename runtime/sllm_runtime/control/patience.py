"""A start that fits is not put off for ever: it waits at most twice as long as a running call may take. Pure.

Others may be placed before it again and again: smaller ones, or such as are more urgent. When it has waited for as long
as any running call may last, one node is kept free for it; what runs there takes no new call, and the last one ends
within that time again. So does each of several starts of a version, where as many places can be kept at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Final

from sllm_runtime.control import instances
from sllm_runtime.control.fits import Need, free, need_in
from sllm_runtime.control.placement import Request, evictable, fewest, may_start
from sllm_runtime.control.providing.packing import fitting
from sllm_runtime.control.scheduling.prediction import Outlook
from sllm_runtime.control.view import Instance, Key, Node, PutOff, View, Waited, without

LINGER_S: Final = 2.0
"""Who asks for an instance asks again within this: between two questions nobody has given up."""


def put_off(view: View, request: Request, now: float, outlook: Outlook | None = None) -> View:
    """The start was not placed now; ``outlook``: what was decided for it."""
    known = view.put_off.get(request.key, PutOff(now, now))
    known = replace(known, last=now, outlook=known.outlook or outlook)
    return replace(view, put_off={**view.put_off, request.key: known})


def waited(view: View, request: Request, count: int, now: float) -> View:
    """So many starts of a version that was put off have no place, those aside that wait beside room. Keeps a place for
    each that has waited long enough: each has its own time, the first one that gets a place the longest."""
    key, known = request.key, view.put_off.get(request.key)
    if known is None:
        return view
    there = [Waited(each.since, now) for each in known.waits[:count]]
    gone = [each for each in known.waits[count:] if now - each.last <= LINGER_S]  # who asks may ask again at once
    waits = (*there, *gone, *[Waited(now, now)] * (count - len(there)))
    view = _let_go(replace(view, put_off={**view.put_off, key: replace(known, waits=waits)}), key, now)
    due = list(takewhile(lambda each: _outlasts(view, now - each.since), there))
    for each in due[_coming(view, key, len(due)) :]:
        found = _place(view, request, now)
        if found is None:
            return view
        name, leaving = found
        view = replace(view, kept={**view.kept, name: key})
        for instance in (each for each in leaving if each.stop is None):  # those that end already have their time
            reason = f"makes room for {key[0]}, which has waited for {now - each.since:.0f} s"
            grace = instance.manifest.timeout if instance.ready else 0.0
            view = instances.stop(view, instance, reason, grace, resume=instance.carries)
    return view


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
    return _let_go(replace(view, put_off={**view.put_off, key: later}), key, now)


def _let_go(view: View, key: Key, now: float) -> View:
    """A node that has given the place, or cannot any more, is not kept: another one is."""
    mine = [node for node, whose in view.kept.items() if whose == key]
    if not mine:
        return view
    may = may_start(view, key, now)
    gone = [name for name in mine if name not in view.nodes or not may(view.nodes[name])]
    gone += [name for name in mine if name not in gone and not _given(view, key, view.nodes[name], 1)]
    return replace(view, kept=without(view.kept, gone)) if gone else view


def _coming(view: View, key: Key, most: int) -> int:
    """Places, ``most`` of each node, that the nodes which are kept for it have or will have."""
    mine = (view.nodes[name] for name, whose in view.kept.items() if whose == key)
    return sum(_given(view, key, node, most) for node in mine)


def _given(view: View, key: Key, node: Node, most: int) -> int:
    """Places for version ``key``, at most so many, where what is being ended there has gone."""
    need = need_in(view, key, view.versions[key].manifest)
    going = [each for each in view.on(node.record.node).values() if each.stop is not None and not each.ended]
    return _places(view, need, node, going, most)


def _take(view: View, need: Need, node: Node, count: int, leaving: Sequence[Instance]) -> bool:
    """Whether there are so many places without those that leave."""
    return _places(view, need, node, leaving, count) == count


def _places(view: View, need: Need, node: Node, leaving: Sequence[Instance], most: int) -> int:
    capacity = free(view, node, leaving)
    return fitting([need] * most, [capacity]) if capacity is not None else 0


def _outlasts(view: View, waited: float) -> bool:
    """Whether calls run now, and none of them may last for longer than it has ``waited``."""
    running = False
    for instance in view.instances.values():
        if instance.running and not instance.ended:
            if instance.manifest.timeout > waited:
                return False
            running = True
    return running


def _place(view: View, request: Request, now: float) -> tuple[str, tuple[Instance, ...]] | None:
    """A node that could run one more without what has to leave for that, with the fewest calls: idle instances that a
    version wants in any case stay."""
    found = []
    key, need, may = request.key, request.need(view), may_start(view, request.key, now)
    for name, node in view.nodes.items():
        if not may(node):
            continue
        there = [each for each in view.on(name).values() if not each.ended]
        leaving = [
            each
            for each in there
            # Of its own one more would be lacking.
            if each.stop or (each.running and each.key != key) or evictable(request, view, each, now)
        ]
        leaving.sort(key=lambda each: (each.stop is None, each.running))  # as few calls as may be have to end for it
        count = 1 + (_given(view, key, node, len(there)) if view.kept.get(name) == key else 0)
        enough = partial(_take, view, need, node, count)
        if enough(leaving):
            chosen = fewest(leaving, enough)
            found.append((sum(each.running for each in chosen), name, chosen))
    return min(found, key=lambda each: each[:2])[1:] if found else None

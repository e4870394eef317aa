"""A start that fits is not put off for ever: it waits at most twice as long as a running call may take. Pure.

Others may be placed before it again and again: smaller ones, or such as are more urgent. When it has waited for as long
as any running call may last, one node is kept free for it; what runs there takes no new call, and the last one ends
within that time again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sllm_runtime.control import instances
from sllm_runtime.control.fits import free, short
from sllm_runtime.control.placement import Request, evictable, may_start, needed
from sllm_runtime.control.scheduling.prediction import Outlook
from sllm_runtime.control.view import Instance, Key, PutOff, View, without

LINGER_S: Final = 2.0
"""Who asks for an instance asks again within this: between two questions nobody has given up."""


def put_off(view: View, request: Request, now: float, outlook: Outlook | None = None, *, room: bool = False) -> View:
    """The start was not placed now; ``outlook``: what was decided for it. Keeps a node for it if it has waited long
    enough, unless it waits beside ``room``."""
    key = request.key
    known = view.put_off.get(key, PutOff(now, now))
    since, known = known.since, replace(known, last=now, outlook=known.outlook or outlook)
    view = _let_go(replace(view, put_off={**view.put_off, key: known}), key, now)
    if room or key in view.kept.values() or not _outlasts(view, now - since):
        return view
    found = _place(view, request, now)
    if found is None:
        return view
    name, leaving = found
    view = replace(view, kept={**view.kept, name: key})
    for instance in leaving:
        reason = f"makes room for {key[0]}, which has waited for {now - since:.0f} s"
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
    later = PutOff(now, now, outlook, lacks=min(known.since, known.lacks))
    return replace(served(view, [key]), put_off={**view.put_off, key: later})


def _let_go(view: View, key: Key, now: float) -> View:
    """A node that cannot take it any more is not kept: another one is."""
    mine = [node for node, whose in view.kept.items() if whose == key]
    if not mine:
        return view
    may = may_start(view, key, now)
    kept = [name for name in mine if name not in view.nodes or not may(view.nodes[name])]
    return replace(view, kept=without(view.kept, kept)) if kept else view


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
    """A node that could run it without what has to leave for that, with the fewest calls: idle instances that a version
    wants in any case stay."""
    found = []
    need, may = request.need(view), may_start(view, request.key, now)
    for name, node in view.nodes.items():
        if not may(node):
            continue
        there = [each for each in view.on(name).values() if not each.ended]
        leaving = [each for each in there if each.running or each.stop or evictable(request, view, each, now)]
        leaving.sort(key=lambda each: (each.stop is None, each.running))  # as few calls as may be have to end for it
        capacity = free(view, node, leaving)
        if capacity is not None and not short(need, capacity):
            chosen = needed(need, view, node, leaving)
            found.append((sum(each.running for each in chosen), name, chosen))
    return min(found, key=lambda each: each[:2])[1:] if found else None

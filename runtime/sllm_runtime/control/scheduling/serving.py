"""When calls that wait are expected to begin at the instances that their version has. Pure.

An instance that would be ready only after that would find nobody to serve: it would take a place, a load and a core
from others, and its callers would not have waited less. How long calls take is known as a median, so a call that has
gone on for longer is expected to take as long again: nobody waits much longer than for the start that was not made.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from sllm_runtime.control.autoscale import BETWEEN_S
from sllm_runtime.control.view import STARTING, Instance, Key, View

MOST: Final = 1000
"""More calls than so many are not waited for."""


def last_begins_s(view: View, key: Key, now: float, coming: Sequence[float] = ()) -> float:
    """Seconds until all calls of version ``key`` that wait have begun at instances that are there, or start, or wait
    for a place and will be ready after the seconds of ``coming``; infinite where nobody knows how long its calls take,
    or it has no instance."""
    waiting, call_s = view.demand(key), view.learned.call_s(key)
    if call_s is None or not 0 < waiting <= MOST:
        return inf
    awaited = view.destinations if view.migrations else frozenset()
    there = (i for i in view.of(key) if _takes_calls(view, i) and i.record.instance not in awaited)
    free = [begin for instance in there for begin in _slots(instance, call_s, now)]
    free += [ready for ready in coming for _ in range(view.versions[key].manifest.concurrency)]
    if not free:
        return inf
    heapq.heapify(free)
    for _ in range(waiting - 1):
        heapq.heapreplace(free, free[0] + call_s)
    return free[0]


def over_s(view: View, key: Key, ready: float | None) -> float:
    """Seconds until an instance of version ``key`` that is ``ready`` after so many has served a call and given back
    what it held; infinite where nobody knows."""
    call_s = view.learned.call_s(key)
    if call_s is None or ready is None:
        return inf
    return ready + call_s + BETWEEN_S + view.learned.release_s(key)


def _takes_calls(view: View, instance: Instance) -> bool:
    """Whether it does, or will: it does not end, its calls do not move away, and no gateway has found it deaf. (What
    others move to is there for them alone.)"""
    return instance.live and not instance.record.moves_to and instance.record.instance not in view.suspects


def _slots(instance: Instance, call_s: float, now: float) -> Iterator[float]:
    """Seconds until each place for a call of ``instance`` is free."""
    places = instance.manifest.concurrency
    if instance.state in STARTING:
        ready = left_s(instance.predicted.seconds, now - instance.placed) if instance.predicted is not None else inf
        yield from (ready for _ in range(places))
        return
    yield from (0.0 for _ in range(places - instance.running))
    since = instance.turn_since if instance.turn_since is not None else now
    next_end = left_s(call_s, (now - since) * instance.running) / max(instance.running, 1)
    yield from (next_end + turn * call_s / instance.running for turn in range(min(instance.running, places)))


def left_s(usual: float, gone: float) -> float:
    """Of what takes ``usual`` seconds, and has taken ``gone``."""
    return usual - gone if gone < usual else gone

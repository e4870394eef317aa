"""Instances that are wanted before anybody calls (``sllm fn warmup``). Pure.

They are started as for a call and live by their keep-alive from READY on. The wish ends when it is fulfilled, or a
little after whoever had it has stopped asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sllm_runtime.control import backoff, routes
from sllm_runtime.control.view import EMPTY, Key, View, with_item, without
from sllm_runtime.protocol.ctl import Warmed
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.node import CAPACITY, Progress

GRACE_S: Final = 5.0
"""Between two polls of one who asks, the wish holds on for so long."""


def asked(view: View, key: Key, instances: int, until: float) -> View:
    """``instances`` of version ``key`` are to be there, or more where somebody waits for more. Raises
    ``InvalidRequest`` for more than it may have, and as ``routes.require``."""
    routes.require(view, key)
    most = view.versions[key].manifest.max_instances
    if not 1 <= instances <= most:
        raise InvalidRequest(
            f"{instances} instance(s) of {key[0]} cannot be warm: its max_instances is {most}; ask for 1 to {most}",
            field="instances",
        )
    wishes = view.warm.get(key, EMPTY)
    wishes = with_item(wishes, instances, max(until, wishes.get(instances, 0.0)))
    return replace(view, warm=with_item(view.warm, key, wishes))


def lapsed(view: View, now: float) -> View:
    """Wishes that nobody waits for any more leave the view."""
    for key, wishes in view.warm.items():
        view = _less(view, key, [number for number, until in wishes.items() if until <= now])
    return view


def granted(view: View, key: Key, instances: int) -> View:
    """Who waited for so many has them: unless somebody waits for more, they live by their keep-alive."""
    return _less(view, key, [number for number in view.warm.get(key, EMPTY) if number <= instances])


def _less(view: View, key: Key, numbers: Sequence[int]) -> View:
    if not numbers:
        return view
    left = without(view.warm[key], numbers)
    return replace(view, warm=with_item(view.warm, key, left) if left else without(view.warm, [key]))


def answer(view: View, key: Key, instances: int, now: float) -> Warmed | None:
    """When they are there; None: they are waited for. Raises what a start failed by, and as ``routes.require``."""
    routes.require(view, key)
    if _ready(view, key) >= instances:
        return Warmed(function=key[0], version=key[1], wanted=instances, ready=_ready(view, key))
    failure = view.failures.get(key)
    failed = failure is not None and backoff.active(failure, now, asked=True)
    if failed and failure is not None and not any(instance.live for instance in view.of(key)):
        raise backoff.for_caller(failure, now).to_error()
    return None


def so_far(view: View, key: Key, instances: int) -> Warmed:
    """How many are there after a while, and what the others wait for. Raises as ``routes.require``."""
    routes.require(view, key)
    pending = view.why(key)
    progress = Progress(stage=CAPACITY, message=pending) if pending else routes.progress(view, key)
    return Warmed(function=key[0], version=key[1], wanted=instances, ready=_ready(view, key), progress=progress)


def _ready(view: View, key: Key) -> int:
    return sum(instance.ready for instance in view.of(key))

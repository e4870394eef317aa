"""Instances that are wanted before anybody calls (``sllm fn warmup``). Pure.

They are started as for a call and live by their keep-alive from READY on. The wish ends when it is fulfilled, or a
little after whoever had it has stopped asking.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sllm_runtime.control import backoff, routes
from sllm_runtime.control.view import Key, View, with_item, without
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
    before, since = view.warm.get(key, (0, 0.0))
    return replace(view, warm=with_item(view.warm, key, (max(instances, before), max(until, since))))


def lapsed(view: View, now: float) -> View:
    """Wishes that nobody waits for any more leave the view."""
    over = [key for key, (_, until) in view.warm.items() if until <= now]
    return replace(view, warm=without(view.warm, over)) if over else view


def granted(view: View, key: Key, instances: int) -> View:
    """Who waited for so many has them: unless somebody waits for more, they live by their keep-alive."""
    wanted, _ = view.warm.get(key, (0, 0.0))
    return replace(view, warm=without(view.warm, [key])) if 0 < wanted <= instances else view


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

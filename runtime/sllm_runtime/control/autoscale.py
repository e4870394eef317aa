"""How many instances of a version there should be. Pure; the load-driven scaler fills the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sllm_runtime.control.view import Instance, Key, View
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.quantities import LOAD_TIME

HANDOVER_S: Final = 1.0
"""An instance is never stopped sooner after READY, whatever ``keep_alive`` says: the call it was started for is on its
way. Nor for its age sooner after its last call."""
BETWEEN_S: Final = 0.25
"""One that has served a call may be ended to make room so soon after its last: who calls again at once finds it."""


def lent_s(instance: Instance) -> float:
    """Seconds without a call after which it may be ended to make room."""
    return BETWEEN_S if instance.seen is not None and instance.seen.served else HANDOVER_S


def floor(view: View, key: Key, manifest: Manifest) -> int:
    """Instances that run without a caller: ``min_instances`` of the active version, one for a deployment's trial, what
    somebody wants warm."""
    warm = max(view.warm.get(key, ()), default=0) if view.warm else 0
    least = manifest.min_instances
    return max(least if least and view.active(key) else 0, int(key in view.trials), warm)


def wanted(manifest: Manifest, *, least: int, running: int, waiting: int) -> int:
    """Instances for ``running`` and ``waiting`` calls at ``concurrency`` each, from ``least`` to ``max_instances``."""
    slots = -(-(running + waiting) // manifest.concurrency) if waiting else 0
    return min(max(least, slots), manifest.max_instances)


def lack(view: View, key: Key, manifest: Manifest, live: Sequence[Instance]) -> int:
    """Instances that version ``key`` wants beside those of it that are ``live``."""
    there, running = counted(view, live)
    return wanted(manifest, least=floor(view, key, manifest), running=running, waiting=view.demand(key)) - there


def counted(view: View, live: Sequence[Instance]) -> tuple[int, int]:
    """How many there are ``live`` for calls, and the calls that these run. One that calls move to is there for them
    alone, so it counts as one with where they come from; what has moved both may report for a moment."""
    there, running = len(live), sum(instance.running for instance in live)
    if not view.migrations:
        return there, running
    named = {instance.record.instance: instance for instance in live}
    for move in view.migrations.values():
        destination, source = named.get(move.destination), view.instances.get(move.source)
        if move.ended is not None or destination is None:
            continue
        left = source.running if source is not None else 0
        if move.source in named:
            there, running = there - 1, running - left
        running += min(left, destination.manifest.concurrency - destination.running)
    return there, running


def keep_s(instance: Instance) -> float:
    """Seconds that it may be idle. ``"load-time"`` (ServerlessLLM, section 7: a keep-alive equal to the loading
    latency): what its start was expected to take, less the wait for what made room for it; by a policy that expects
    nothing, or of the controller before, what it took on its node."""
    asked = instance.manifest.keep_alive
    if asked != LOAD_TIME:
        return max(asked, HANDOVER_S)
    guess = instance.predicted
    took = max((span.at + span.ms for span in instance.spans), default=0.0) / 1000.0
    return max(guess.seconds - guess.release if guess is not None else took, HANDOVER_S)


def expired(ready: Sequence[Instance], *, least: int, waiting: int, now: float) -> list[Instance]:
    """Ready instances to stop, longest idle first: idle past ``keep_s``, no caller waiting, ``least`` left over."""
    if waiting:
        return []
    idle = [instance for instance in ready if not instance.running and instance.idle_s(now) >= keep_s(instance)]
    idle.sort(key=lambda instance: -instance.idle_s(now))
    return idle[: max(len(ready) - least, 0)]

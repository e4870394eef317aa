"""What gateways are told: routes, and the answer to an ``acquire``. Pure."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from sllm_runtime.control import backoff
from sllm_runtime.control.view import CARRIES, STARTING, Instance, Key, View
from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.errors import FunctionNotFound, VersionNotFound
from sllm_runtime.protocol.node import AWAITS_NODE, Progress
from sllm_runtime.protocol.records import Route, RouteEntry
from sllm_runtime.protocol.states import InstanceState, MigrationState

_WORKING: Final = frozenset({InstanceState.READY, InstanceState.DRAINING})


def route(view: View, key: Key, *, leave_out: Container[str] = ()) -> Route | None:
    """The route of a version with its ready instances, oldest first; None if calls may not be sent to it."""
    if not view.routable(key):
        return None
    version = view.versions[key]
    promised = _promised(view)
    entries = [
        RouteEntry(
            instance=instance.record.instance,
            node=instance.record.node,
            version=key[1],
            concurrency=version.manifest.concurrency,
            fingerprint=instance.record.fingerprint,
            exact=not version.manifest.engine or CARRIES in instance.record.capabilities,
            spans=instance.spans,
            moves_to=instance.record.moves_to,
        )
        for instance in view.of(key)
        if (instance.ready or _moving(view, instance))
        and instance.record.instance not in leave_out
        and instance.record.instance not in promised
    ]
    return Route(
        function=key[0],
        version=key[1],
        manifest=version.manifest,
        model=version.model,
        active=view.active(key),
        created=version.created,
        entries=tuple(entries),
    )


def _promised(view: View) -> frozenset[str]:
    """Instances that were started for calls of another one, and that is not said yet: who waits would have their slots
    before gateways know whose they are. An idle one that is taken instead goes on serving: it is said at once."""
    preparing = (each for each in view.migrations.values() if each.state is MigrationState.PREPARING)
    return frozenset(each.destination for each in preparing)


def _moving(view: View, instance: Instance) -> bool:
    """Whether gateways are to carry its calls over: it takes no other, and where they go on is ready."""
    destination = view.instances.get(instance.record.moves_to)
    return destination is not None and destination.ready and instance.state in _WORKING


def require(view: View, key: Key) -> None:
    """Raises ``FunctionNotFound`` or ``VersionNotFound`` if no call can be sent to this version."""
    if view.routable(key):
        return
    name, number = key
    function = view.functions.get(name)
    if function is None or function.deleting:
        raise FunctionNotFound(f"there is no function {name!r}; `sllm fn list` shows what there is")
    have = ", ".join(f"v{record.version}" for record in view.versions_of(name) if view.routable((name, record.version)))
    raise VersionNotFound(f"function {name!r} has no version {number} to call; there is {have or 'none yet'}")


def locate(view: View, name: str, number: int | None) -> int:
    """The version that calls of ``name`` go to, or ``number`` if calls may name it. Raises as ``require``."""
    function = view.functions.get(name)
    if number is None:
        number = function.active if function is not None else None
    if number is None:
        raise FunctionNotFound(
            f"there is no function {name!r} with an active version; `sllm fn list` shows what there is"
        )
    require(view, (name, number))
    return number


def answer(view: View, request: Acquire, now: float) -> Acquired | None:
    """What to tell the gateway at once; None: it has to wait. Raises as ``require``."""
    key = (request.function, request.version)
    require(view, key)
    found = route(view, key, leave_out=view.suspects)
    if found is not None and any(entry.instance not in request.known and not entry.moves_to for entry in found.entries):
        return Acquired(route=found)
    failure = view.failures.get(key)
    failed = failure is not None and backoff.active(failure, now, asked=True)
    if failed and failure is not None and not any(instance.live for instance in view.of(key)):
        return Acquired(route=found, error=backoff.for_caller(failure, now))
    told = progress(view, key)
    awaits = told is not None and told.stage == AWAITS_NODE
    if (awaits and not request.awaits) or (key in view.pending and not request.pending):
        return Acquired(route=found, progress=told, pending=_why(view, key))
    return None


def so_far(view: View, request: Acquire) -> Acquired:
    """The answer after ``wait_s``: how far a start is, or why there is none. Raises as ``require``."""
    key = (request.function, request.version)
    require(view, key)
    found = route(view, key, leave_out=view.suspects)
    return Acquired(route=found, progress=progress(view, key), pending=_why(view, key))


def _why(view: View, key: Key) -> str:
    """Why nothing can be started. Not of what nobody has looked at yet: it may be started in a moment, and a gateway
    that was told so would send callers away."""
    return str(view.pending.get(key, ""))


def progress(view: View, key: Key) -> Progress | None:
    """Of the start that is furthest (the oldest), or of the node that it waits for; None if nothing starts."""
    for instance in view.of(key):
        if instance.live and instance.state in STARTING:
            told = instance.seen.progress if instance.seen else None
            return told or Progress(stage="placement", message=f"on node {instance.record.node}")
    return view.awaiting.get(key)

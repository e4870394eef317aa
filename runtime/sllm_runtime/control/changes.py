"""The difference between two views, as records to write and functions whose waiters to wake. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from sllm_runtime.control.routes import route
from sllm_runtime.control.traced import changed
from sllm_runtime.control.view import Instance, Key, View
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.records import InstanceRecord, ProofsRecord, Record, Route
from sllm_runtime.protocol.states import InstanceState

NODES: Final = ""
"""Stands among the names of touched functions when a node has been heard for the first time."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Write:
    """One record to be in the store; ``record`` None: to be gone from it."""

    key: str
    record: Record | None


def differing(old: Mapping[K, V], new: Mapping[K, V]) -> Iterator[tuple[K, V | None, V | None]]:
    """What was added, changed or removed: (key, before, after)."""
    if old is new:
        return
    for key in changed(old, new):
        before, after = old.get(key), new.get(key)
        if before != after:
            yield key, before, after


def touched(old: View, new: View) -> frozenset[str]:
    """Functions about which something changed that a waiter may wait for."""
    names = {key for key, _, _ in differing(old.functions, new.functions)}
    for keyed in (differing(old.versions, new.versions), differing(old.failures, new.failures)):
        names |= {key[0] for key, _, _ in keyed}
    for _, before, after in differing(old.instances, new.instances):
        names |= {instance.key[0] for instance in (before, after) if instance is not None}
    if old.suspects is not new.suspects:
        others = old.suspects.keys() ^ new.suspects.keys()
        names |= {new.instances[name].key[0] for name in others if name in new.instances}
    names |= {key[0] for key in old.awaiting.keys() ^ new.awaiting.keys()}
    names |= {key[0] for key in new.pending.keys() - old.pending.keys()}
    if any(before is None or before.status is None for _, before, _ in differing(old.nodes, new.nodes)):
        names.add(NODES)
    return frozenset(names)


def routes(view: View, functions: frozenset[str]) -> dict[Key, Route]:
    """The routes of these functions' versions that may be called."""
    keys = [key for key in view.versions if key[0] in functions] if functions else []
    found = ((key, route(view, key)) for key in keys)
    return {key: made for key, made in found if made is not None}


def kept(instance: Instance | None) -> InstanceRecord | None:
    """What of an instance is stored: its placement, that it is ready, and nothing once it has ended. A start's steps
    are not: a new controller hears them from the node."""
    if instance is None or instance.ended:
        return None
    state = instance.state
    if state is InstanceState.STARTING:
        state = InstanceState.PENDING
    if state is InstanceState.DRAINING:
        state = InstanceState.READY
    return msgspec.structs.replace(instance.record, state=state)


def decided(old: View, new: View) -> list[Write]:
    """What to store of that which people decide, in the order that keeps the store consistent when it breaks off: what
    is referred to first. All else follows from it and from the nodes' reports."""
    found = [Write(subjects.model_key(k), after) for k, _, after in differing(old.models, new.models)]
    found += [Write(subjects.function_key(k), after) for k, _, after in differing(old.functions, new.functions)]
    found += [Write(subjects.version_key(*k), after) for k, _, after in differing(old.versions, new.versions)]
    for name, was, node in differing(old.nodes, new.nodes):
        if node is None:
            found.append(Write(subjects.node_key(name), None))
        elif was is None or was.record != node.record:
            found.append(Write(subjects.node_key(name), node.record))
    return found


def writes(old: View, new: View, old_routes: Mapping[Key, Route], new_routes: Mapping[Key, Route]) -> list[Write]:
    """All that is to be stored, in that order."""
    found = decided(old, new)
    rerouted = sorted(differing(old_routes, new_routes), key=lambda item: not (item[2] is not None and item[2].active))
    found += [Write(subjects.route_key(*k), after) for k, _, after in rerouted]
    for name, before, after in differing(old.instances, new.instances):
        if kept(before) != kept(after):
            found.append(Write(subjects.instance_key(name), kept(after)))
    for key, _, proofs in differing(old.learned.proofs, new.learned.proofs):
        record = ProofsRecord(function=key[0], version=key[1], proofs=proofs) if proofs else None
        found.append(Write(subjects.proofs_key(*key), record))
    if new.pool is not None and (old.pool is None or old.pool.record != new.pool.record):
        found.append(Write(subjects.POOL_KEY, new.pool.record))
    return found

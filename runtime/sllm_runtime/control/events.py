"""What of the difference between two views is told as events: state changes, and predictions beside what came. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from sllm_runtime.control.changes import differing
from sllm_runtime.control.outcomes import Outcome, of_releases, of_start
from sllm_runtime.control.providing.pool import News
from sllm_runtime.control.view import Instance, Migration, Node, View
from sllm_runtime.protocol.events import Event, Kind
from sllm_runtime.protocol.node import NodeRecord
from sllm_runtime.protocol.records import FunctionRecord, VersionRecord
from sllm_runtime.protocol.states import InstanceState, VersionState

_OF_START: Final = (InstanceState.PENDING, InstanceState.STARTING, InstanceState.READY, InstanceState.FAILED)
"""What the call that an instance was started for waits for: what comes later is no longer of it."""


def events(old: View, new: View, wall: float) -> list[Event]:
    """State changes of instances, moves, versions, functions and nodes, and releases."""
    found = [*_of_instances(old, new, wall), *_of_functions(old, new, wall)]
    for _, begun, move in differing(old.migrations, new.migrations):
        if move is not None and (begun is None or begun.state != move.state):
            found.append(_move_event(move, old, new, wall))
    for name, known, node in differing(old.nodes, new.nodes):
        found += [_node_event(kind, name, wall) for kind in _node_kinds(known, node)]
        found += [_release_event(came, wall) for came in of_releases(known, node, old, name)]
    if new.pool is not None and old.pool is not None and new.pool.news is not old.pool.news:
        found += [_told(news, wall) for news in new.pool.news]
    return found


def _of_instances(old: View, new: View, wall: float) -> Iterator[Event]:
    for _, before, after in differing(old.instances, new.instances):
        if after is not None and (before is None or before.state != after.state):
            yield _instance_event(after, new, wall)


def _of_functions(old: View, new: View, wall: float) -> Iterator[Event]:
    """A function before the versions that it gets, and after those that go with it."""
    functions = [(name, _function_kind(was, now)) for name, was, now in differing(old.functions, new.functions)]
    told = [Event(kind=kind, at=wall, component="controller", function=name) for name, kind in functions if kind]
    yield from (event for event in told if event.kind != Kind.FUNCTION_DELETED)
    for _, was, version in differing(old.versions, new.versions):
        if version is None and was is not None:
            yield _version_event(replace(was, state=VersionState.DELETED, error=None), wall)
        elif version is not None and (was is None or was.state != version.state):
            yield _version_event(version, wall)
    yield from (event for event in told if event.kind == Kind.FUNCTION_DELETED)


def _node_event(kind: Kind, name: str, wall: float) -> Event:
    return Event(kind=kind, at=wall, component="controller", node=name)


def _node_kinds(before: Node | None, after: Node | None) -> Iterator[Kind]:
    """That it has joined or is forgotten, and what was decided about it since."""
    if after is None:
        yield Kind.NODE_REMOVED
        return
    if before is None:
        yield Kind.NODE_JOINED
    was, now = (before or Node(NodeRecord(node=after.record.node))).record, after.record
    if (was.cordoned, was.draining) != (now.cordoned, now.draining):
        cordoned = Kind.NODE_CORDONED if now.cordoned else Kind.NODE_UNCORDONED
        yield Kind.NODE_DRAINING if now.draining else cordoned


def _move_event(move: Migration, old: View, new: View, wall: float) -> Event:
    """With what it was expected to take, and took, once it is over."""
    source = new.instances.get(move.source) or old.instances.get(move.source)
    fields = {"destination": move.destination} if move.destination else {}
    if move.ended is not None and not move.adopted:
        fields["took_s"] = f"{move.ended - move.began:.6f}"
    if move.expected is not None:
        fields["expected_s"] = f"{move.expected:.6f}"
    return Event(
        kind=Kind.of_state("migration", move.state),
        at=wall,
        component="controller",
        message=move.note or f"to {move.destination or move.node or 'where there is room'}",
        function=source.key[0] if source is not None else None,
        version=source.key[1] if source is not None else None,
        instance=move.source,
        node=move.node or None,
        fields=fields,
    )


def _release_event(came: Outcome, wall: float) -> Event:
    """What it took beside what was expected of it until then."""
    return Event(
        kind=Kind.INSTANCE_RELEASED,
        at=wall,
        component="controller",
        message=f"in {came.took:.2f} s; expected {came.expected:.2f} s",
        function=came.key[0],
        version=came.key[1],
        instance=came.instance,
        node=came.node,
        fields={"expected_s": f"{came.expected:.6f}", "took_s": f"{came.took:.6f}"},
    )


def _told(news: News, wall: float) -> Event:
    return Event(kind=news.kind, at=wall, component="controller", message=news.message, node=news.node or None)


def node_events(before: frozenset[str], after: frozenset[str], wall: float) -> list[Event]:
    """Nodes that fell silent, and nodes that are heard (again)."""
    lost = [(Kind.NODE_LOST, name) for name in sorted(before - after)]
    alive = [(Kind.NODE_ALIVE, name) for name in sorted(after - before)]
    return [_node_event(kind, name, wall) for kind, name in lost + alive]


def _instance_event(instance: Instance, view: View, wall: float) -> Event:
    record = instance.record
    reason = record.error.message if record.error else instance.stop.reason if instance.stop else _start(instance)
    refused = view.refused.get((instance.key, record.node))
    if not reason and instance.state is InstanceState.STOPPED and instance.seen is None and refused is not None:
        reason = refused.since or refused.reason  # its node did not begin it
    return Event(
        kind=Kind.of_state("instance", record.state),
        at=wall,
        component="controller",
        message=reason,
        function=record.function,
        version=record.version,
        instance=record.instance,
        node=record.node,
        call=(instance.call or None) if record.state in _OF_START else None,
        fields=_measured(instance),
    )


def _measured(instance: Instance) -> dict[str, str]:
    """Of a start that is over, for programs: seconds as expected (the whole and its terms) and as taken, and where the
    weights were; of what was decided before it the same, from then on."""
    fields: dict[str, str] = {}
    for came in of_start(instance) if instance.state is InstanceState.READY else ():
        before = "" if came.what == "start" else "decided_"
        fields |= {f"{before}expected_s": f"{came.expected:.6f}", f"{before}took_s": f"{came.took:.6f}"}
        fields |= {"decided": came.what} if before else {}
    if fields and (guess := instance.predicted) is not None:
        fields["terms_s"] = ",".join(f"{name}={seconds:.6f}" for name, seconds in guess.terms().items())
        fields["tier"] = guess.tier
    return fields


def _start(instance: Instance) -> str:
    """Of one that begins: what it is expected to take; of one that is over: what it took beside that."""
    if instance.predicted is None:
        return ""
    if instance.state is InstanceState.PENDING:
        return f"expected {instance.predicted.words()}"
    if instance.state is not InstanceState.READY or instance.ready_at is None:
        return ""
    return f"in {instance.ready_at - instance.placed:.2f} s; expected {instance.predicted.words()}"


def _version_event(version: VersionRecord, wall: float) -> Event:
    return Event(
        kind=Kind.of_state("version", version.state),
        at=wall,
        component="controller",
        message=version.error.message if version.error else "",
        function=version.function,
        version=version.version,
    )


def _function_kind(before: FunctionRecord | None, after: FunctionRecord | None) -> Kind | None:
    if after is None:
        return Kind.FUNCTION_DELETED
    if before is None:
        return Kind.FUNCTION_CREATED
    return Kind.FUNCTION_DELETING if after.deleting and not before.deleting else None

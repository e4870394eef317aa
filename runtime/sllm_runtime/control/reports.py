"""Fold a node's report into the view. The report is the truth about its instances (level-triggered). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from sllm_runtime.control import instances
from sllm_runtime.control.view import Instance, Node, View
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.node import InstanceStatus, NodeRecord, NodeStatus
from sllm_runtime.protocol.records import InstanceRecord
from sllm_runtime.protocol.states import INSTANCE, InstanceState, final


def observe(view: View, status: NodeStatus, now: float, wall: float) -> View:
    """``view`` after this report; one older than the last of its life changes nothing. ``wall``: Unix seconds."""
    known = view.nodes.get(status.node)
    last = known.status if known else None
    if last is not None and last.boot == status.boot and status.sequence <= last.sequence:
        return view
    record = known.record if known else NodeRecord(node=status.node, first_seen=wall)
    reborn = last is not None and last.boot != status.boot
    view = view.put_node(Node(record=record, status=status, heard=now))
    for gone, release_s in released(last, status):
        if (gone.function, gone.version) in view.versions:
            view = replace(view, learned=view.learned.released((gone.function, gone.version), release_s))
    if last is None:
        view = _adopted(view, status, now, wall)
    reported = {instance.instance: instance for instance in status.instances}
    same = []
    for instance in view.on(status.node).values():
        if instance.ended:
            continue
        said = reported.get(instance.record.instance)
        if said is not None and _as_before(instance, said):
            same.append(replace(instance, seen=said, seen_at=now))
        elif said is not None:
            view = instances.report(view, instance, said, now)
        elif _was_there(instance):
            view = instances.vanish(view, instance, _gone(instance, reborn).body(), now)
    view = replace(view, instances=view.instances.put(*same)) if same else view
    return _trust(view, status)


def departed(view: View, node: str) -> View:
    """``view`` when a node has left NATS."""
    known = view.nodes.get(node)
    return view if known is None or known.left else view.put_node(replace(known, left=True))


def _adopted(view: View, status: NodeStatus, now: float, wall: float) -> View:
    """What a node has when it is first heard in the life of this controller, and no record names: a leader before died
    between the start and its record. Calls may run there already, so it is this one's from now on, where its version
    is known and has room for it; what is not taken in is a stray (``plan``)."""
    for said in status.instances:
        key = (said.function, said.version)
        version = view.versions.get(key)
        if version is None or said.instance in view.instances or final(INSTANCE, said.state):
            continue
        if said.content and said.content != version.content:  # of a function that had its name before
            continue
        if sum(instance.live for instance in view.of(key)) < version.manifest.max_instances:
            record = InstanceRecord(
                instance=said.instance,
                function=said.function,
                version=said.version,
                node=status.node,
                state=InstanceState.PENDING,
                created=wall,
            )
            view = view.put_instance(Instance(record=record, manifest=version.manifest, placed=now, adopted=True))
    return view


def still(view: View, status: NodeStatus, now: float) -> View | None:
    """``view`` after a report that says no more than that its node is still there, and its instances as they were: a
    thousand nodes say that a thousand times a second, and nothing follows from it. None: it says more, or something
    has changed since the last one; then ``observe``."""
    known = view.nodes.get(status.node)
    if known is None or known.status is None or view.suspects or status.sequence <= known.status.sequence:
        return None
    if news(known.status, status):
        return None
    reported, same = {said.instance: said for said in status.instances}, []
    for instance in view.on(status.node).values():
        if instance.ended:
            continue
        said = reported.get(instance.record.instance)
        if said is None:
            if _was_there(instance):  # it is gone
                return None
        elif _follows(instance, said):
            return None
        else:
            same.append(replace(instance, seen=said, seen_at=now))
    view = view.put_node(replace(known, status=status, heard=now, left=False, lost=False))
    return replace(view, instances=view.instances.put(*same)) if same else view


def _as_before(instance: Instance, said: InstanceStatus) -> bool:
    """Whether nothing follows from what is said of it, as of most instances of a busy node: each that something does
    costs a copy of the table."""
    seen = instance.seen
    return seen is not None and seen.running == said.running and not said.proof and not _follows(instance, said)


def _follows(instance: Instance, said: InstanceStatus) -> bool:
    """Whether it is to move, or there is something to learn."""
    seen = instance.seen
    return seen is None or said.served != seen.served or bool(instances.path(instance.state, said.state))


def pressing(view: View, before: NodeStatus, after: NodeStatus) -> bool:
    """Whether ``news`` are to be acted on at once: calls that begin and end on instances that stay as they are matter
    only while somebody waits for a place."""
    moving = any(each.ended is None for each in view.migrations.values())
    if view.waiting or view.pending or moving or view.trials or view.warm:
        return True
    return _steady(before, running=0) != _steady(after, running=0)


def news(before: NodeStatus, after: NodeStatus) -> bool:
    """Whether a report says more than that its node is still there, its idle instances idle, and the others at work."""
    return _steady(before) != _steady(after)


def released(before: NodeStatus | None, after: NodeStatus) -> Iterator[tuple[InstanceStatus, float]]:
    """Instances that have given back what they held since the report ``before`` of the same life, with the seconds that
    it took them."""
    if before is None or before.boot != after.boot:
        return
    known = {said.instance for said in before.instances if said.release_s is not None}
    for said in after.instances:
        if said.release_s is not None and said.instance not in known:
            yield said, said.release_s


def _steady(status: NodeStatus, **other: int) -> NodeStatus:
    told = {"idle_s": 0.0, "context": 0, "served": 0, "whole": 0, "worked_s": 0.0, "proof": "", **other}
    there = tuple([msgspec.structs.replace(instance, **told) for instance in status.instances])
    return msgspec.structs.replace(status, sequence=0, instances=there)


def _was_there(instance: Instance) -> bool:
    """Whether its node had it once: a report that does not name it says then that it is gone, else that it is yet to
    come."""
    return instance.seen is not None or instance.adopted


def _gone(instance: Instance, reborn: bool) -> InstanceLost:
    name, node = instance.record.instance, instance.record.node
    why = f"node {node} was restarted" if reborn else f"node {node} no longer has it"
    return InstanceLost(f"instance {name} is gone: {why}; call again, another one will be started")


def _trust(view: View, status: NodeStatus) -> View:
    """Suspects that this later report still shows are trusted again."""
    cleared = [
        name
        for name, sequence in view.suspects.items()
        if name not in view.instances
        or (view.instances[name].record.node == status.node and status.sequence > sequence)
    ]
    if not cleared:
        return view
    return replace(view, suspects={name: seq for name, seq in view.suspects.items() if name not in cleared})


def suspect(view: View, names: tuple[str, ...]) -> View:
    """A gateway could not use these: keep them from being offered as new until a later report still shows them."""
    marks = dict(view.suspects)
    for name in names:
        instance = view.instances.get(name)
        node = view.nodes.get(instance.record.node) if instance is not None else None
        if instance is not None and node is not None and node.status is not None and name not in marks:
            marks[name] = node.status.sequence
    return replace(view, suspects=marks)

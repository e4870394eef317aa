"""Nodes that are cordoned or drained, by an operator or because they are stopped: nothing starts there, and what is
there leaves. And those that are forgotten once they have gone. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from sllm_runtime.control import autoscale, instances, migration
from sllm_runtime.control.view import Instance, Migration, View
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import Conflict, NodeNotFound, SllmError, Unavailable
from sllm_runtime.protocol.states import MIGRATION, final

WHY = "its node is drained"
SURE_S: Final = 2.5 * limits.COUNTS_S
"""An instance of which no call was told for so long has none."""


def cordon(view: View, name: str, *, cordoned: bool, drain: bool) -> View:
    """What an operator decided about node ``name``; ``drain`` cordons too, and to cordon what is drained ends no drain:
    who waits for that would wait for ever. Raises ``NodeNotFound``."""
    node = view.nodes.get(name)
    if node is None:
        raise NodeNotFound(f"there is no node {name}; `sllm node list` shows all")
    drains = drain or (cordoned and node.record.draining)
    record = msgspec.structs.replace(node.record, cordoned=cordoned or drain, draining=drains)
    return view if record == node.record else view.put_node(replace(node, record=record))


def forget(view: View, name: str, now: float) -> View:
    """Without node ``name``, which has gone: should it come again, it joins as a new one. Raises ``NodeNotFound``;
    ``Conflict`` where it lives or a provider has it; ``Unavailable`` while neither is known."""
    if name not in view.nodes:
        raise NodeNotFound(f"there is no node {name}; `sllm node list` shows all")
    if view.alive(name, now):
        raise Conflict(f"node {name} lives: `sllm node drain {name}`, stop its invoker, then forget it")
    if view.pool is not None and name in view.pool.record.members:
        raise Conflict(f"node {name} is its provider's: it is forgotten once that no longer has it")
    if not view.silent(name, now) or any(not instance.ended for instance in view.on(name).values()):
        raise Unavailable(f"whether node {name} lives is not known yet; ask again", retry_after_s=limits.LOST_AFTER_S)
    return replace(view.drop_nodes([name]), learned=view.learned.forgotten(name))


def advance(view: View, now: float) -> View:
    """Send away what runs on drained nodes: calls that can be carried move, others end where they are."""
    for name, node in view.nodes.items():
        if node.record.draining or (node.status is not None and node.status.draining):
            for instance in tuple(view.on(name).values()):
                if instance.live:
                    view = _leave(view, instance, now)
    return view


def _leave(view: View, instance: Instance, now: float) -> View:
    if not instance.ready:
        return instances.stop(view, instance, WHY, 0.0)
    known = view.migrations.get(instance.record.instance)
    over = known is not None and final(MIGRATION, known.state)
    # Where others are of another class, and no other node was found for as long as one is waited for, one that has no
    # call ends: its version's next one starts there.
    replaced = known is not None and _sought(known, now) and bool(migration.apart(view, instance, now))
    needed = bool(instance.running) or (_wanted(view, instance) and not replaced)
    if not needed and instance.carries and instance.idle_s(now) < SURE_S:
        return view  # it may have a call that could move: of one that is ended it would be waited for where it is
    if not (needed and instance.carries):
        return instances.stop(view, instance, WHY, instance.manifest.timeout, resume=instance.carries)
    if known is not None and not over:
        return view
    # One that found no room is asked again: until it has moved it goes on here, and takes calls.
    try:
        return migration.ask(view, instance.record.instance, "", now)
    except SllmError:  # its calls cannot go on elsewhere as they are: they end here, or begin again
        return instances.stop(view, instance, WHY, instance.manifest.timeout, resume=True)


def _sought(move: Migration, now: float) -> bool:
    """Whether any other node was looked for until just now: not one that was named, nor for what wanted its place, and
    not so long ago that there may be room by now."""
    anywhere = not (move.destination or move.named or move.by)
    return anywhere and move.ended is not None and now - move.ended <= migration.KEEP_S


def _wanted(view: View, instance: Instance) -> bool:
    """Whether its version has too few beside it that nobody is to call for."""
    least = autoscale.floor(view, instance.key, instance.manifest)
    others = (each for each in view.of(instance.key) if each is not instance and each.ready)
    return sum(_stays(view, each) for each in others) < least


def _stays(view: View, instance: Instance) -> bool:
    """Whether it, or who takes its place, is on a node that takes starts."""
    move, node = view.migrations.get(instance.record.instance), view.nodes.get(instance.record.node)
    return (move is not None and move.ended is None) or (node is not None and node.open)

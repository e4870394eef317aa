"""Each prediction beside what came: of starts, of what was waited for before them, of moves and releases. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sllm_runtime.control.changes import differing
from sllm_runtime.control.reports import released
from sllm_runtime.control.view import Instance, Key, Migration, Node, View
from sllm_runtime.protocol.states import InstanceState, MigrationState


@dataclass(frozen=True, slots=True)
class Outcome:
    """``what``: ``start``, from its command to READY; ``wait``, ``evict`` or ``migrate``: from when that was decided to
    READY, the start included; ``move``; ``release``. Seconds."""

    what: str
    key: Key
    instance: str
    node: str
    expected: float
    took: float


def outcomes(old: View, new: View) -> Iterator[Outcome]:
    """What is over in ``new`` and was not in ``old``."""
    for _, begun, move in differing(old.migrations, new.migrations):
        if move is not None and move.state is MigrationState.DONE and (begun is None or begun.state != move.state):
            yield from _of_move(move, old, new)
    if new.learned is old.learned:  # every start and release that is over teaches something: nothing is compared for it
        return
    for _, before, after in differing(old.instances, new.instances):
        if after is not None and after.state is InstanceState.READY and (before is None or before.state != after.state):
            yield from of_start(after)
    for name, known, node in differing(old.nodes, new.nodes):
        yield from of_releases(known, node, old, name)


def of_start(instance: Instance) -> Iterator[Outcome]:
    """Of one that has become ready."""
    name, node, ready_at, outlook = instance.record.instance, instance.record.node, instance.ready_at, instance.outlook
    if ready_at is None or instance.adopted:
        return
    if instance.predicted is not None:
        took = ready_at - instance.placed
        yield Outcome("start", instance.key, name, node, instance.predicted.seconds, took)
    if outlook is not None and outlook.seconds is not None:
        yield Outcome(outlook.what, instance.key, name, node, outlook.seconds, ready_at - outlook.at)


def _of_move(move: Migration, old: View, new: View) -> Iterator[Outcome]:
    source = new.instances.get(move.source) or old.instances.get(move.source)
    if source is not None and move.expected is not None and move.ended is not None:
        yield Outcome("move", source.key, move.source, move.node, move.expected, move.ended - move.began)


def of_releases(before: Node | None, after: Node | None, known: View, node: str) -> Iterator[Outcome]:
    """Of instances that have given back what they held, beside what was expected of it by what was ``known``."""
    if before is None or after is None or after.status is None:
        return
    for said, took in released(before.status, after.status):
        key = (said.function, said.version)
        yield Outcome("release", key, said.instance, node, known.learned.release_s(key), took)

"""Why a version runs where it does, and where its next instance would go: for people. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final, Literal

import msgspec

from sllm_runtime.control import backoff
from sllm_runtime.control.fits import free, short
from sllm_runtime.control.history import Past
from sllm_runtime.control.outcomes import Outcome
from sllm_runtime.control.placement import Decision, Evict, Migrate, Place, Policy, Refuse, Request, Wait, decided
from sllm_runtime.control.room import MOVED
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.servers import server
from sllm_runtime.control.scheduling.startup import StartupTime
from sllm_runtime.control.view import Instance, Key, Migration, Node, View
from sllm_runtime.protocol.ctl import Candidate, Explained, MoveTold, OutcomeTold, StartTold, Way
from sllm_runtime.protocol.node import NodeStatus

MOST: Final = 256
"""Candidates that are told of, those that fit first: as many as fit one message."""
RECORDED: Final = 16
"""Nodes that are looked at for what is recorded of each start, those with the weights first."""
MOST_WAYS: Final = 16
"""Candidates without room, the quickest first, of which it is looked for how it could be made."""
_BY: Final[dict[type[Decision], Literal["ending", "moving", "waiting"]]] = {
    Evict: "ending",
    Migrate: "moving",
    Wait: "waiting",
}
_BEFORE: Final = {
    "evict": "after instances had been ended for it",
    "migrate": "after running calls had been moved for it",
    "wait": "after it had waited for room",
}
"""What was decided of a start before it could be placed, as ``Outlook.what`` has it."""
MOST_OUTCOMES: Final = 32
"""Predictions that are told of, the newest first."""


def explained(view: View, key: Key, policy: Policy, now: float, outcomes: Sequence[Outcome] = ()) -> Explained:
    """What ``policy`` would decide for one more instance of version ``key`` now, what each node would cost, what the
    starts of its instances took beside what was expected, and what came of its last predictions (``outcomes``)."""
    version, view = view.versions[key], _unclaimed(view)
    request = Request(key, version.manifest, version.model)
    decision = _kept_back(view, key, now) or decided(policy, request, view, now, random.Random(0))
    return Explained(
        function=key[0],
        version=key[1],
        policy=type(policy).__name__,
        decision=_words(decision) if isinstance(decision, Place) else str(decision.reason),
        node=decision.node if isinstance(decision, Place) else "",
        possible=not isinstance(decision, Refuse),
        pending=view.why(key),
        candidates=_candidates(view, request, policy, now, view.nodes)[:MOST],
        starts=tuple(_told(instance) for instance in view.of(key) if not instance.ended),
        moves=(*_planned(view, key, decision), *_moved(view, key)),
        outcomes=_came(outcomes),
        since=min(record.created for record in view.versions_of(key[0])),
    )


def started(past: Past, policy: Policy, outcomes: Sequence[Outcome] = (), *, short: bool = False) -> Explained:
    """The start of one instance: what each node would have cost when it was decided, what it took and what came of its
    predictions (``outcomes``). ``short``: of some nodes, for a record of every start."""
    instance, view = past.instance, _unclaimed(past.view) if past.view is not None else None
    candidates: tuple[Candidate, ...] = ()
    moves: Iterable[MoveTold] = ()
    if view is not None and instance.key in view.versions:
        version = view.versions[instance.key]
        request = Request(instance.key, version.manifest, version.model)
        asked = _nearest(view, request, instance.record.node) if short else view.nodes
        candidates = _candidates(view, request, policy, past.now, asked, 0 if short else MOST_WAYS)
        told = (_move(view, move) for move in past.moves)
        moves = (each for each in told if each.node in ("", instance.record.node))
    place = Place(instance.record.node, instance.gpus, instance.predicted)
    return Explained(
        function=instance.key[0],
        version=instance.key[1],
        policy=type(policy).__name__,
        decision=_words(place) + _before(past),
        node=place.node,
        candidates=candidates[:MOST],
        starts=(_told(instance),),
        moves=tuple(moves),
        outcomes=_came(outcomes),
        past=True,
    )


def _kept_back(view: View, key: Key, now: float) -> Refuse | None:
    """Why none is started whatever room there is; None: nothing keeps it back."""
    failure, most = view.failures.get(key), view.versions[key].manifest.max_instances
    if failure is not None and backoff.active(failure, now, asked=True):
        left_s = failure.until - now
        return Refuse(f"none for another {left_s:.0f} s, since the last start failed: {failure.error.message}")
    if sum(instance.live for instance in view.of(key)) >= most:
        return Refuse(f"none: it has as many as it may (max_instances is {most})")
    return None


def _unclaimed(view: View) -> View:
    """As a plan begins: what it claimed in the end it may have claimed for the very start that is asked about."""
    return replace(view, claims=dict.fromkeys(view.making_way, MOVED))


def _nearest(view: View, request: Request, chosen: str) -> Iterable[str]:
    """Some nodes: ``chosen``, then those with the weights in memory, on the disk, others."""

    def order() -> Iterator[str]:
        yield chosen
        reports = [(name, node.status) for name, node in view.nodes.items() if node.status is not None]
        yield from (name for name, status in reports if request.model in status.resident)
        yield from (name for name, status in reports if request.model in status.models)
        yield from view.nodes

    found: dict[str, None] = {}
    for name in order():
        found[name] = None
        if len(found) >= RECORDED:
            break
    return found


def as_of(told: Explained, past: Past, at: float, outcomes: Sequence[Outcome]) -> Explained:
    """The same with what the start has come to at ``at``, in Unix seconds, and what came of its predictions."""
    starts = (msgspec.structs.replace(_told(past.instance), at=at),)
    return msgspec.structs.replace(told, starts=starts, outcomes=_came(outcomes))


def _candidates(
    view: View, request: Request, policy: Policy, now: float, names: Iterable[str], weighed: int = MOST_WAYS
) -> tuple[Candidate, ...]:
    """Nodes ``names``: those first that it fits, the quickest of them first. Of ``weighed`` others it is looked for how
    room could be made: that takes some milliseconds."""
    found = [_candidate(view, request, view.nodes[name], now) for name in names if name in view.nodes]
    found.sort(key=lambda each: (bool(each.why), each.seconds if each.seconds is not None else inf, each.node))
    full = [each.node for each in found if each.why and each.seconds is not None][:weighed]
    if not full or not isinstance(policy, StartupTime):
        return tuple(found)
    ways = policy.ways(request, view, now)
    made = {name: tuple(_way(decision) for decision in ways.on(name)) for name in full}
    return tuple(msgspec.structs.replace(each, ways=made.get(each.node, ())) for each in found)


def _way(decision: Decision) -> Way:
    assert not isinstance(decision, Place)
    return Way(by=_BY[type(decision)], how=str(decision.reason), seconds=decision.seconds)


def _planned(view: View, key: Key, decision: Decision) -> Iterator[MoveTold]:
    """Moves for ``key`` that have not begun."""
    wanted = [move for name, move in view.moves.items() if move.by == key and name not in view.migrations]
    for move in (*wanted, *(decision.moves if isinstance(decision, Migrate) else ())):
        yield MoveTold(
            instance=move.instance,
            node=_where(view, move.instance),
            to=move.node,
            state="PLANNED",
            seconds=move.seconds,
        )


def _moved(view: View, key: Key) -> Iterator[MoveTold]:
    """Moves for ``key`` that go on, or were of late."""
    return (_move(view, move) for move in view.migrations.values() if move.by == key)


def _move(view: View, move: Migration) -> MoveTold:
    return MoveTold(
        instance=move.source,
        node=_where(view, move.source),
        to=move.node,
        state=move.state.value,
        seconds=move.expected,
        took=move.ended - move.began if move.ended is not None else None,
    )


def _where(view: View, instance: str) -> str:
    found = view.instances.get(instance)
    return found.record.node if found is not None else ""


def _words(place: Place) -> str:
    return f"a start on {place.node}" + (f", expected to take {place.estimate.words()}" if place.estimate else "")


def _before(past: Past) -> str:
    """What was decided of it before it could be placed, and why."""
    outlook, waited_s = past.instance.outlook, past.instance.placed - past.now
    if outlook is None:
        return f", {_BEFORE['wait']} for {waited_s:.2f} s" if waited_s > 0 else ""
    named = f" ({', '.join(outlook.instances)})" if outlook.instances else ""
    return f", {_BEFORE[outlook.what]}" + (f": {outlook.why}{named}" if outlook.why else "")


def _candidate(view: View, request: Request, node: Node, now: float) -> Candidate:
    name, status = node.record.node, node.status
    if status is None or not view.alive(name, now):
        return Candidate(node=name, why="it is not heard")
    model, device = view.model_of(request.key), bool(request.need(view).gpus)
    guess = estimate(server(view, node, status), request.key, model, view.learned, device=device)
    return Candidate(
        node=name, seconds=guess.seconds, expected=guess.words(), why=_why_not(view, request, node, status, now)
    )


def _why_not(view: View, request: Request, node: Node, status: NodeStatus, now: float) -> str:
    """What keeps it from being started there now; empty if nothing does."""
    name = node.record.node
    refused = view.refused.get((request.key, name))
    if node.record.cordoned or status.draining:
        return "it is cordoned" if not (node.record.draining or status.draining) else "it is drained"
    if status.condition:
        return f"it can make no sandbox: {status.condition}"
    if view.kept.get(name, request.key) != request.key:
        return f"it is kept for {view.kept[name][0]}, which has waited long"
    if refused is not None and refused.until > now:
        return f"it has just refused: {refused.reason}"
    capacity = free(view, node)
    lacks = short(request.need(view), capacity) if capacity is not None else ()
    return "needs " + "; ".join(lacks) if lacks else ""


def _came(outcomes: Sequence[Outcome]) -> tuple[OutcomeTold, ...]:
    return tuple(
        OutcomeTold(what=each.what, instance=each.instance, node=each.node, expected=each.expected, took=each.took)
        for each in outcomes[:MOST_OUTCOMES]
    )


def _told(instance: Instance) -> StartTold:
    took = instance.ready_at - instance.placed if instance.ready_at is not None and not instance.adopted else None
    predicted = instance.predicted
    return StartTold(
        instance=instance.record.instance,
        node=instance.record.node,
        state=instance.state,
        seconds=predicted.seconds if predicted is not None else None,
        expected=predicted.words() if predicted is not None else "",
        took=took,
    )

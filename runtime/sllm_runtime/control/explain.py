"""Why a version runs where it does, and where its next instance would go: for people. Pure."""

from __future__ import annotations

import random
from math import inf
from typing import Final

from sllm_runtime.control.fits import free, short
from sllm_runtime.control.history import Past
from sllm_runtime.control.placement import Place, Policy, Refuse, Request
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.servers import server
from sllm_runtime.control.view import Instance, Key, Node, View
from sllm_runtime.protocol.ctl import Candidate, Explained, StartTold
from sllm_runtime.protocol.node import NodeStatus

MOST: Final = 256
"""Candidates that are told of, those that fit first: as many as fit one message."""


def explained(view: View, key: Key, policy: Policy, now: float) -> Explained:
    """What ``policy`` would decide for one more instance of version ``key`` now, what each node would cost, and what
    the starts of its instances took beside what was expected."""
    version = view.versions[key]
    request = Request(key, version.manifest, version.model)
    decision = policy.place(request, view, now, random.Random(0))
    return Explained(
        function=key[0],
        version=key[1],
        policy=type(policy).__name__,
        decision=_words(decision) if isinstance(decision, Place) else str(decision.reason),
        node=decision.node if isinstance(decision, Place) else "",
        possible=not isinstance(decision, Refuse),
        pending=view.why(key),
        candidates=tuple(_candidates(view, request, now)[:MOST]),
        starts=tuple(_told(instance) for instance in view.of(key) if not instance.ended),
    )


def started(past: Past, policy: Policy) -> Explained:
    """The start of one instance: what each node would have cost when it was decided, and what it took."""
    instance, view = past.instance, past.view
    candidates: list[Candidate] = []
    if view is not None and instance.key in view.versions:
        version = view.versions[instance.key]
        candidates = _candidates(view, Request(instance.key, version.manifest, version.model), past.now)
    place = Place(instance.record.node, instance.gpus, instance.predicted)
    return Explained(
        function=instance.key[0],
        version=instance.key[1],
        policy=type(policy).__name__,
        decision=_words(place),
        node=place.node,
        candidates=tuple(candidates[:MOST]),
        starts=(_told(instance),),
        past=True,
    )


def _candidates(view: View, request: Request, now: float) -> list[Candidate]:
    """Those first that it fits, the quickest of them first."""
    found = [_candidate(view, request, node, now) for _, node in sorted(view.nodes.items())]
    found.sort(key=lambda each: (bool(each.why), each.seconds if each.seconds is not None else inf, each.node))
    return found


def _words(place: Place) -> str:
    return f"a start on {place.node}" + (f", expected to take {place.estimate.words()}" if place.estimate else "")


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

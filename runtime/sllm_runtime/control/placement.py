"""Where an instance goes. ``Policy`` is what the startup-time-optimised scheduler (ServerlessLLM, section 6) fills;
``Simple`` prefers the node that has the weights nearest, then the most room."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from sllm_runtime.control.autoscale import HANDOVER_S
from sllm_runtime.control.fits import Need, choose_gpus, free, memory_of, need_of, short, total
from sllm_runtime.control.view import Instance, Key, Node, View
from sllm_runtime.protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Request:
    """One instance to place."""

    key: Key
    manifest: Manifest
    model: str | None = None

    def need(self, view: View) -> Need:
        return replace(need_of(self.manifest), memory=memory_of(view, self.key, self.manifest))


@dataclass(frozen=True, slots=True)
class Place:
    node: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """Stop these idle instances: then it fits."""

    instances: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """It fits a known node, but not now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """No known node could ever run it."""

    reason: str


Decision: TypeAlias = Place | Evict | Wait | Refuse


class Policy(Protocol):
    """A pure function of the view: same view, same ``now``, same state of ``rng`` give the same decision."""

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision: ...


def unsatisfiable(need: Need, view: View) -> str:
    """Why no known node could ever run it, naming the nearest; empty if one could (or none has reported yet)."""
    gaps = []
    for name, node in sorted(view.nodes.items()):
        if node.status is None:
            continue
        lacks = short(need, total(node.status))
        if not lacks:
            return ""
        gaps.append((len(lacks), name, lacks))
    if not gaps:
        return ""
    _, name, lacks = min(gaps)
    return f"no node can run it; the nearest, {name}, lacks {'; '.join(lacks)}"


def _usable(request: Request, view: View, node: Node, now: float) -> bool:
    if node.status is None or node.record.cordoned or node.status.draining:
        return False
    refusal = view.refused.get((request.key, node.record.node))
    if refusal is not None and refusal.until > now:
        return False
    return view.alive(node.record.node, now)


def _distance(request: Request, node: Node) -> int:
    """Tiers between the weights and the devices: 0 in DRAM (or no model), 1 on the SSD, 2 elsewhere."""
    if node.status is None or request.model is None or request.model in node.status.resident:
        return 0
    return 1 if request.model in node.status.models else 2


@dataclass(frozen=True, slots=True)
class Simple:
    """Preferred accelerator, nearest weights, a warm sandbox, most free memory; else make room from the idle."""

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        need = request.need(view)
        usable = [node for node in view.nodes.values() if _usable(request, view, node, now)]
        ranked = []
        for node in usable:
            capacity = free(view, node)
            if capacity is None or short(need, capacity):
                continue
            chosen = choose_gpus(need, capacity)
            if chosen is None or node.status is None:
                continue
            rank, gpus = chosen
            cold = 0 if node.status.pool_idle else 1
            order = (rank, _distance(request, node), cold, -capacity.memory, node.record.node)
            ranked.append((order, Place(node.record.node, gpus)))
        if ranked:
            return min(ranked, key=lambda item: item[0])[1]
        return _make_room(request, need, view, usable, now) or _why(request, view, usable)


def _evictable(request: Request, view: View, instance: Instance, now: float) -> bool:
    """Idle, and not needed: above its version's minimum, or an older version of the very function that is deployed."""
    if not instance.ready or instance.idle_s(now) < HANDOVER_S or view.demand(instance.key):
        return False
    if instance.key[0] == request.key[0] and instance.key != request.key and request.key in view.trials:
        return True
    if instance.key == request.key or instance.key in view.trials:
        return False
    ready = sum(1 for other in view.of(instance.key) if other.ready)
    return not view.active(instance.key) or ready > instance.manifest.min_instances


def _make_room(request: Request, need: Need, view: View, usable: list[Node], now: float) -> Decision | None:
    """Fewest idle instances, longest idle first, whose end lets it fit; those already ending count first."""
    plans = []
    for node in sorted(usable, key=lambda node: node.record.node):
        there = [i for i in view.instances.values() if i.record.node == node.record.node and i.seen and not i.ended]
        leaving = [i for i in there if i.stop is not None]
        if _fits(need, view, node, leaving):
            return Wait(f"waits for {len(leaving)} instance(s) to end on {node.record.node}")
        idle = sorted((i for i in there if _evictable(request, view, i, now)), key=lambda i: -i.idle_s(now))
        for count in range(1, len(idle) + 1):
            if _spares(view, idle[:count]) and _fits(need, view, node, [*leaving, *idle[:count]]):
                plans.append((count, node.record.node, tuple(i.record.instance for i in idle[:count])))
                break
    if not plans:
        return None
    _, name, instances = min(plans)
    return Evict(instances, f"makes room on {name} by ending {len(instances)} idle instance(s)")


def _spares(view: View, chosen: list[Instance]) -> bool:
    """Whether ending all of them together still leaves every other function its minimum."""
    return all(
        sum(1 for other in view.of(key) if other.ready) - sum(1 for i in chosen if i.key == key)
        >= next(i.manifest.min_instances for i in chosen if i.key == key)
        for key in {i.key for i in chosen}
        if view.active(key) and not any(trial[0] == key[0] for trial in view.trials)
    )


def _fits(need: Need, view: View, node: Node, leaving: list[Instance]) -> bool:
    capacity = free(view, node, leaving)
    return bool(leaving) and capacity is not None and not short(need, capacity)


def _why(request: Request, view: View, usable: list[Node]) -> Decision:
    """Words for the one who waits."""
    need = request.need(view)
    never = unsatisfiable(need, view)
    if never:
        return Refuse(never)
    if not view.nodes:
        return Wait("no node has reported yet; is an invoker running? See `sllm node list`")
    fitting = [node for node in usable if node.status is not None and not short(need, total(node.status))]
    if not fitting:
        refusals = (f"{node}: {said.reason}" for (key, node), said in view.refused.items() if key == request.key)
        said = "; ".join(sorted(refusals)) or "see `sllm node list`"
        return Wait(f"no node that could run it is up and accepting work; {said}")
    gaps = []
    for node in fitting:
        capacity = free(view, node)
        if capacity is not None:
            lacks = short(need, capacity)
            gaps.append((len(lacks), node.record.node, lacks))
    _, name, lacks = min(gaps)
    return Wait(f"all capacity is in use: needs {'; '.join(lacks)} on {name}")

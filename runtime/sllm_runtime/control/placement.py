"""What a placement is asked for and answers, and what all policies (``scheduling.policies``) go by: which idle
instances may end to make room, and why something waits. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol, TypeAlias

from sllm_runtime.control.autoscale import floor, lent_s
from sllm_runtime.control.fits import Need, free, need_in, short, total
from sllm_runtime.control.providing.awaiting import awaited, could_come
from sllm_runtime.control.reason import Reason, Words
from sllm_runtime.control.scheduling.prediction import Estimate
from sllm_runtime.control.view import Instance, Key, Move, Node, View
from sllm_runtime.protocol.limits import LOST_AFTER_S
from sllm_runtime.protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Request:
    """One instance to place."""

    key: Key
    manifest: Manifest
    model: str | None = None
    patient: bool = True
    """Whether it may wait, or make room, where there is some that is worse: nobody computes for its callers meanwhile.
    What relieves one that runs takes the room that there is, and has nobody moved."""
    further: bool = False
    """Another instance of its version waits for a place already: moves that are under way are for that one, and no
    more begin meanwhile."""
    own: Need | None = None
    """What it needs, where its manifest does not say it: accelerators of the very kind that its calls began on."""
    failed: bool = False
    """Whether nodes are asked, too, that are left alone since a start of it failed there."""

    def need(self, view: View) -> Need:
        return self.own or need_in(view, self.key, self.manifest)


@dataclass(frozen=True, slots=True)
class Place:
    node: str
    gpus: tuple[int, ...] = ()
    estimate: Estimate | None = None
    """What the start is expected to take; None of a policy that does not ask."""

    @property
    def seconds(self) -> float | None:
        """From now to READY."""
        return self.estimate.seconds if self.estimate is not None else None


@dataclass(frozen=True, slots=True)
class Evict:
    """Stop these instances: then it fits. They are idle, or with ``at_once`` at work: their calls go on elsewhere."""

    instances: tuple[str, ...]
    reason: str
    claims: tuple[str, ...]
    """These, and those that end already, whose places it takes: no other start of the same plan counts on them."""
    at_once: bool = False
    seconds: float | None = None
    """From now until it is ready there; None of a policy that does not ask."""


@dataclass(frozen=True, slots=True)
class Migrate:
    """Let the calls of running instances go on elsewhere: then it fits on ``node``, and starts there sooner than
    anywhere now."""

    node: str
    moves: tuple[Move, ...]
    estimate: Estimate

    @property
    def seconds(self) -> float | None:
        """From now until it is ready there."""
        return self.estimate.seconds

    @property
    def reason(self) -> str:
        """For people."""
        where = ", ".join(f"{move.instance} to {move.node}" for move in self.moves)
        return f"makes room on {self.node} by moving {where}; expected {self.estimate.words()}"


@dataclass(frozen=True, slots=True)
class Wait:
    """It fits a known node, but not now; or it had better wait."""

    reason: Words
    seconds: float | None = None
    """From now until it is expected to be ready, where that is known."""
    room: bool = False
    """Whether there is room now, where it would take longer."""
    claims: tuple[str, ...] = ()
    """Instances whose places it waits for: no other start of the same plan counts on them."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """No known node could ever run it."""

    reason: str
    seconds: ClassVar[None] = None


May: TypeAlias = Callable[[Node], bool]
"""Whether a node may be asked."""
Decision: TypeAlias = Place | Evict | Migrate | Wait | Refuse


class Policy(Protocol):
    """A pure function of the view: same view, same ``now``, same state of ``rng`` give the same decision."""

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision: ...


def decided(policy: Policy, request: Request, view: View, now: float, rng: random.Random) -> Decision:
    """By ``policy``. What is left alone for a failed start is asked all the same where no other node has room, nor is
    to have it."""
    decision = policy.place(request, view, now, rng)
    if not isinstance(decision, Wait) or decision.room:
        return decision
    failed = failed_on(view, request.key, now)
    if not failed or _comes(decision, view, request, now, failed):
        return decision
    return policy.place(replace(request, failed=True), view, now, rng)


def failed_on(view: View, key: Key, now: float) -> list[str]:
    """Nodes that are left alone since a start of version ``key`` failed there, as long as others have room."""
    there = ((node, said) for (which, node), said in view.refused.items() if which == key)
    return [node for node, said in there if said.yields <= now < said.until]


def _comes(decision: Wait, view: View, request: Request, now: float, failed: Sequence[str]) -> bool:
    """Whether it is to have room where no start of it has ``failed``: what has no calls to finish is being ended for
    it, calls are expected to end, which is waited for as long as was first said, or a node is made. None is made for
    what has failed on several: it may be no node's fault."""
    going = [view.instances[name] for name in decision.claims]
    if going and all(each.stop is not None and not ends_late(each) for each in going):
        return True
    if decision.seconds is not None:
        known = view.put_off.get(request.key)
        first = known.outlook if known is not None else None
        if first is None or first.seconds is None or now <= first.at + first.seconds:
            return True
    return request.patient and len(failed) == 1 and awaited(view, request.need(view), now) is not None


def may_start(view: View, key: Key, now: float, *, failed: bool = False) -> May:
    """Whether a node may be asked to start version ``key`` now, room aside: living, neither cordoned nor draining, able
    to make sandboxes, not kept for another version, not in doubt, and it has not just refused. ``failed``: also where a
    start of it has failed."""
    since = now - LOST_AFTER_S
    heard = view.listening_since > since  # else silence counts
    barred = _barred(view, key, now, failed) if view.refused or view.kept or view.suspects else None

    def may(node: Node) -> bool:
        living = node.heard is not None and (heard or node.heard > since) and not node.gone
        return living and node.open and not (barred and node.record.node in barred)

    return may


def _barred(view: View, key: Key, now: float, failed: bool) -> set[str]:
    """Nodes that are not asked to start version ``key``, whatever they say of themselves."""
    refused = ((node, said) for (which, node), said in view.refused.items() if which == key)
    barred = {node for node, said in refused if (min(said.until, said.yields) if failed else said.until) > now}
    barred.update(node for node, whose in view.kept.items() if whose != key)
    return barred | view.in_doubt(now)


def unsatisfiable(need: Need, view: View) -> str:
    """Why no known node could ever run it, nor one that could come, naming the nearest; empty if one could (or none has
    reported yet)."""
    if could_come(view, need):
        return ""
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


def evictable(request: Request, view: View, instance: Instance, now: float) -> bool:
    """Idle, and not needed: above its version's minimum, or an older version of the very function that is deployed."""
    if not instance.ready or instance.idle_s(now) < lent_s(instance) or view.demand(instance.key):
        return False
    if instance.record.instance in view.destinations:  # calls are on their way to it
        return False
    if instance.key[0] == request.key[0] and instance.key != request.key and request.key in view.trials:
        return True
    if instance.key == request.key or instance.key in view.trials:
        return False
    ready = sum(1 for other in view.of(instance.key) if other.ready)
    return ready > floor(view, instance.key, instance.manifest)


def room_made(request: Request, need: Need, view: View, node: Node, now: float) -> tuple[Instance, ...] | None:
    """Instances of ``node`` whose going lets it fit: what is ending already, and the fewest idle ones, longest idle
    first; None if nothing helps. What has calls to finish is among them only where the others are not enough: nobody
    knows how long these take. Not those on whose places other starts of this plan count."""
    there = [i for name, i in view.on(node.record.node).items() if i.seen and not i.ended and name not in view.claims]
    leaving = [i for i in there if i.stop is not None]
    soon, late = [i for i in leaving if not ends_late(i)], [i for i in leaving if ends_late(i)]
    if fits(need, view, node, soon):
        return needed(need, view, node, soon)
    idle = sorted((i for i in there if evictable(request, view, i, now)), key=lambda i: -i.idle_s(now))
    found = _beside(request, need, view, node, soon, idle)
    if found is not None or not late:
        return found
    leaving = [*soon, *late]
    if fits(need, view, node, leaving):
        return needed(need, view, node, leaving)
    return _beside(request, need, view, node, leaving, idle)


def _beside(
    request: Request, need: Need, view: View, node: Node, leaving: Sequence[Instance], idle: Sequence[Instance]
) -> tuple[Instance, ...] | None:
    """Those of ``leaving``, and the fewest of ``idle``, the first ones, whose going lets it fit together."""
    chosen: list[Instance] = []
    for each in idle:
        if not _spares(request, view, [*chosen, each]):  # its version needs it, now that others of it go
            continue
        chosen.append(each)
        if fits(need, view, node, [*leaving, *chosen]):
            return needed(need, view, node, [*leaving, *chosen])
    return None


def needed(need: Need, view: View, node: Node, going: Sequence[Instance]) -> tuple[Instance, ...]:
    """Those of ``going``, after which it fits, without which it would not; of any that would do the first ones."""
    return fewest(going, lambda fewer: fits(need, view, node, fewer))


def fewest(going: Sequence[Instance], enough: Callable[[list[Instance]], bool]) -> tuple[Instance, ...]:
    """Those of ``going``, which are ``enough``, without which they would not be; of any that would do the first
    ones."""
    kept = list(going)
    for each in reversed(going):
        fewer = [other for other in kept if other is not each]
        kept = fewer if enough(fewer) else kept
    return tuple(kept)


def ends_late(instance: Instance) -> bool:
    """Whether it ends and has calls to finish first, which may take as long as calls do; not what is stopped at
    once."""
    return instance.running > 0 and instance.stop is not None and instance.stop.grace_s > 0


def _spares(request: Request, view: View, chosen: list[Instance]) -> bool:
    """Whether ending all of them together still leaves every other function its minimum."""
    deployed = request.key[0] if request.key in view.trials else ""
    return all(
        sum(1 for other in view.of(key) if other.ready) - sum(1 for i in chosen if i.key == key)
        >= next(i.manifest.min_instances for i in chosen if i.key == key)
        for key in {i.key for i in chosen}
        if view.active(key) and key[0] != deployed
    )


def fits(need: Need, view: View, node: Node, leaving: list[Instance]) -> bool:
    """Whether it has room on ``node`` once ``leaving`` have gone."""
    capacity = free(view, node, leaving)
    return bool(leaving) and capacity is not None and not short(need, capacity)


def why_not(request: Request, need: Need, view: View, nodes: Sequence[Node]) -> Decision:
    """It waits though ``nodes`` may be asked, with words for who asks why; or ``Refuse``."""
    never = unsatisfiable(need, view)
    return Refuse(never) if never else Wait(Reason(partial(_in_the_way, request, need, view, nodes)))


def _in_the_way(request: Request, need: Need, view: View, nodes: Sequence[Node]) -> str:
    if not view.nodes:
        return "no node has reported yet; is an invoker running? See `sllm node list`"
    fitting = [node for node in nodes if node.status is not None and not short(need, total(node.status))]
    if not fitting:
        kept = _kept(request, need, view)
        if kept:
            return kept
        refusals = (f"{node}: {said.reason}" for (key, node), said in view.refused.items() if key == request.key)
        said = "; ".join(sorted(refusals)) or "see `sllm node list`"
        return f"no node that could run it is up and accepting work; {said}"
    gaps = []
    for node in fitting:
        capacity = free(view, node)
        if capacity is not None:
            lacks = short(need, capacity)
            gaps.append((len(lacks), node.record.node, lacks))
    _, name, lacks = min(gaps)
    return f"all capacity is in use: needs {'; '.join(lacks)} on {name}"


def _kept(request: Request, need: Need, view: View) -> str:
    """Of the nodes that are kept for others which have waited long, where one of them could run it; else empty."""
    for name, whose in sorted(view.kept.items()):
        node = view.nodes.get(name)
        if whose == request.key or node is None or node.status is None or not node.open:
            continue
        if not short(need, total(node.status)):
            return f"node {name} is kept for {whose[0]} v{whose[1]}, which has waited for too long"
    return ""

"""What to do next: ``plan(view, now)`` gives the view that should be and the commands that make it so. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final, TypeAlias

from sllm_runtime.control import autoscale, backoff, draining, instances, migration, moved, patience, room, warmup
from sllm_runtime.control.placement import (
    Decision,
    Evict,
    Migrate,
    Place,
    Policy,
    Refuse,
    Request,
    Wait,
    decided,
    failed_on,
)
from sllm_runtime.control.providing import awaiting
from sllm_runtime.control.reason import Words
from sllm_runtime.control.scheduling.moving import under_way
from sllm_runtime.control.scheduling.prediction import Outlook
from sllm_runtime.control.scheduling.serving import last_begins_s, over_s
from sllm_runtime.control.turns import Turns
from sllm_runtime.control.view import EMPTY, Claim, Instance, Key, Stop, View, with_item, without
from sllm_runtime.protocol.errors import InstanceLost, StartFailed
from sllm_runtime.protocol.limits import HEARTBEAT_S, LOST_AFTER_S
from sllm_runtime.protocol.node import InstanceStatus
from sllm_runtime.protocol.records import InstanceRecord, VersionRecord
from sllm_runtime.protocol.states import INSTANCE, InstanceState, VersionState, final

REPEAT_S: Final = HEARTBEAT_S
"""A command is repeated after this long until the node's report shows its effect."""
REPEAT_DRAIN_S: Final = 5.0
WORTH_S: Final = 0.5
"""Calls that begin so little later are left to an instance that waits for its place: another one takes it from
others."""
STRAY: Final = "the controller does not know it"
TAKE_S: Final = 30.0
"""A living node that has not shown an instance for this long does not want it."""


@dataclass(frozen=True, slots=True)
class SendStart:
    """``StartInstance`` to the instance's node."""

    instance: str


@dataclass(frozen=True, slots=True)
class SendStop:
    """``StopInstance``; also for instances that only a node knows of."""

    node: str
    instance: str
    reason: str
    grace_s: float
    resume: bool = False


Action: TypeAlias = SendStart | SendStop


@dataclass(frozen=True, slots=True)
class Context:
    """What a plan is made with: the controller's clocks, its placement policy and its source of randomness."""

    now: float
    wall: float
    policy: Policy
    rng: random.Random


@dataclass(frozen=True, slots=True)
class Plan:
    view: View
    actions: tuple[Action, ...] = ()
    more: bool = False
    """Whether some have yet to have their turn (``turns``): the next plan should follow soon."""


def plan(view: View, context: Context) -> Plan:
    """The next step: the dead are struck out, versions scaled, commands sent or repeated. Same input, same answer."""
    before = view
    view = _begun(draining.advance(view, context.now), context.now)
    moves, turns = Turns(before, before.looked_for), Turns(before, before.looked)
    choose, make = partial(_choose, context=context), partial(_make, context=context)
    view = migration.advance(view, context.now, choose, make, moves)
    view = replace(view, claims={**view.claims, **dict.fromkeys(view.making_way, room.MOVED)})
    view = moved.taught(view, context.now)
    view = warmup.lapsed(_forget(view, context.now), context.now)
    view = _bury(view, context.now)
    groups: dict[Key, list[Instance]] = {}
    for instance in view.instances.values():
        groups.setdefault(instance.key, []).append(instance)
    for key in sorted(groups.keys() | _wanted(view), key=lambda key: _order(view, key)):
        view = _version(view, key, groups.get(key, []), context, turns)
    view = _passed(view, turns, context.now)
    view = replace(view, looked=turns.taken, looked_for=moves.taken)
    view = patience.settled(view, context.now)
    view, actions = _command(view, context.now)
    view, strays = _strays(view, context.now)
    return Plan(view, (*actions, *strays), turns.more or moves.more)


def _begun(view: View, now: float) -> View:
    """Before the first decision of a plan: nothing is claimed yet, and what is lacking is counted."""
    return replace(
        view,
        pending=EMPTY,
        unlooked=frozenset(),
        claims=EMPTY,
        awaiting=EMPTY,
        lacking=_lacking(view, now),
        enough=view.enough & view.waiting.keys(),
    )


def _wanted(view: View) -> set[Key]:
    """Versions that may want an instance without having one: few of those that there are."""
    least = {key for key, record in view.versions.items() if record.manifest.min_instances}
    asked = view.waiting.keys() | view.warm.keys() | view.trials
    return least | asked & view.versions.keys()


def _lacking(view: View, now: float) -> Mapping[Key, int]:
    """Instances that calls which wait want beside those that are there or start. Whoever had enough in the last plan is
    not among them until it is found otherwise."""
    found = {}
    for key in view.waiting:
        version = view.versions.get(key)
        if version is None or _unwanted(view, key) or backoff.active(view.failures.get(key), now, asked=True):
            continue
        if key in view.enough:
            continue
        live = [instance for instance in view.of(key) if instance.live]
        count = autoscale.lack(view, key, version.manifest, _counted_on(view, live, now))
        if count > 0:
            found[key] = count
    return found


def _counted_on(view: View, live: list[Instance], now: float) -> list[Instance]:
    """Those whose nodes are not in doubt: calls of the others go on elsewhere already."""
    return [instance for instance in live if not view.doubtful(instance, now)] if view.suspects else live


def _order(view: View, key: Key) -> tuple[int, bool, float, Key]:
    """Who is served first: the higher priority, then deployments, then who has waited longest, then by name."""
    record, known = view.versions.get(key), view.put_off.get(key)
    since = known.since if known is not None else inf
    return (-record.manifest.priority if record else 0, key not in view.trials, since, key)


def _forget(view: View, now: float) -> View:
    """Ended instances and old refusals leave the view."""
    ended = [name for name, instance in view.instances.items() if instance.ended]
    if ended:
        view = replace(view, instances=view.instances.without(ended))
    if any(refusal.until <= now for refusal in view.refused.values()):
        view = replace(view, refused={key: refusal for key, refusal in view.refused.items() if refusal.until > now})
    return view


def _bury(view: View, now: float) -> View:
    """Instances of nodes that are silent, or have left, are LOST; those their living node does not take, FAILED."""
    silent = {node for node in view.nodes if view.silent(node, now)}
    unmarked = [view.nodes[name] for name in silent if not view.nodes[name].gone]
    if unmarked:  # that they were silent is remembered: what was missed since does not make them live
        view = view.put_node(*(replace(node, lost=True) for node in unmarked))
    silent |= view.instances.nodes.keys() - view.nodes.keys()
    for name, instance in tuple(view.instances.items()):
        node, state = instance.record.node, instance.record.state
        if node in silent and not instance.ended:
            text = f"instance {name} is lost: node {node} {_why_dead(view, node)}; call again"
            view = instances.vanish(view, instance, InstanceLost(text).body(), now)
        elif state is InstanceState.PENDING and instance.stop is None and now - _since(view, instance) >= TAKE_S:
            text = f"node {node} did not begin instance {name} within {TAKE_S:g} s; see the log of sllm-invoker {node}"
            view = instances.fail(view, instance, StartFailed(text, stage="placement").body(), now)
    return view


def _since(view: View, instance: Instance) -> float:
    """Since when its node could have said that it has it."""
    return max(instance.placed, view.listening_since)


def _why_dead(view: View, node: str) -> str:
    known = view.nodes.get(node)
    return "has left" if known is not None and known.left else f"has been silent for {LOST_AFTER_S:g} s"


def _unwanted(view: View, key: Key) -> str:
    """Why no instance of this version should live; empty if it may."""
    function, version = view.functions.get(key[0]), view.versions.get(key)
    if function is None or function.deleting or version is None or version.state is VersionState.DELETED:
        return "the function is deleted"
    if version.state is VersionState.FAILED or (version.state is VersionState.PREPARING and key not in view.trials):
        return "its deployment failed"
    return ""


def _version(view: View, key: Key, mine: list[Instance], context: Context, turns: Turns[Key]) -> View:
    unwanted = _unwanted(view, key)
    if unwanted:
        for instance in mine:
            if instance.live:
                view = instances.stop(view, instance, unwanted, instance.manifest.timeout if instance.ready else 0.0)
        return view
    return _scale(view, view.versions[key], [instance for instance in mine if instance.live], context, turns)


def _scale(view: View, version: VersionRecord, live: list[Instance], context: Context, turns: Turns[Key]) -> View:
    key, manifest = (version.function, version.version), version.manifest
    waiting, least = view.demand(key), autoscale.floor(view, key, manifest)
    asked = bool(waiting) or key in view.warm or key in view.trials
    beside = _counted_on(view, live, context.now)
    lack = autoscale.lack(view, key, manifest, beside)
    if lack > 0 and not backoff.active(view.failures.get(key), context.now, asked=asked):
        there, _ = autoscale.counted(view, beside)
        view = _grow(view, version, there, lack, context, turns)
    view = _within(view, version, live, context.now)
    awaited = view.destinations
    names = (instance.record.instance for instance in live)
    ready = [view.instances[name] for name in names if view.instances[name].ready and name not in awaited]
    for instance in autoscale.expired(ready, least=least, waiting=waiting, now=context.now):
        why = f"idle for {instance.idle_s(context.now):.0f} s, keep_alive is {autoscale.keep_s(instance):g} s"
        # A call may be on its way to it. One that outlives the grace goes on elsewhere, if it can.
        view = instances.stop(view, instance, why, manifest.timeout, resume=instance.carries)
    return view


def _within(view: View, version: VersionRecord, live: list[Instance], now: float) -> View:
    """Above ``max_instances`` there are some where one that was in doubt, in whose place another was started, is there
    after all: once nobody is in doubt the youngest go. Not what is to relieve another one, nor before who had asked the
    controller before this one for that has asked again."""
    most = version.manifest.max_instances
    if len(live) <= most or now - view.listening_since < LOST_AFTER_S:
        return view
    if any(instance.record.instance in view.suspects for instance in live):
        return view
    awaited = view.destinations
    relieved = {move.source for move in view.migrations.values() if move.ended is None and move.destination}
    count = len([each for each in live if each.record.instance not in relieved]) - most
    others = [each for each in live if each.record.instance not in relieved | awaited]
    for instance in others[::-1][: max(count, 0)]:
        why = f"{len(live)} are there, max_instances is {most}"
        grace = instance.manifest.timeout if instance.ready else 0.0
        view = instances.stop(view, instance, why, grace, resume=instance.carries)
    return view


def _passed(view: View, turns: Turns[Key], now: float) -> View:
    """Whose turn it was not since the last one's waits on, for what was found before."""
    keys, view = turns.passed(view)
    if not keys:
        return view
    before = turns.before
    words = {key: before.pending[key] for key in keys if key in before.pending}
    nodes = {key: before.awaiting[key] for key in keys if key in before.awaiting}
    unlooked = view.unlooked | {key for key in keys if key not in words}
    view = replace(view, pending={**view.pending, **words}, awaiting={**view.awaiting, **nodes}, unlooked=unlooked)
    return patience.waits_on(view, keys, now)


def _counted(view: View, key: Key, lack: int) -> View:
    """Version ``key`` lacks so many instances for calls that wait, as this plan has found."""
    if key not in view.waiting or key in view.enough:
        lack = 0
    if view.lacking.get(key, 0) == lack:
        return view
    return replace(view, lacking=with_item(view.lacking, key, lack) if lack else without(view.lacking, [key]))


def _grow(view: View, version: VersionRecord, there: int, lack: int, context: Context, turns: Turns[Key]) -> View:
    """``lack`` more instances, beside those that are ``there``, if it is its turn. Where one waits for a place of its
    own it goes on: the next one may have another."""
    key, now = (version.function, version.version), context.now
    most = turns.places(key)
    if not most:
        return view
    asked = 2 if failed_on(view, key, now) else 1  # times for each: a decision may be made over
    most = -(-most // asked)
    view = _passed(view, turns, now)
    least = autoscale.floor(view, key, version.manifest)
    placed, beside, coming = 0, 0, list[float]()
    for number in range(min(lack, most)):
        turns.looked(key, asked)
        request = Request(key, version.manifest, version.model, further=bool(coming))
        decision = _choose(request, view, context=context)
        for_calls = there + number >= least  # none is wanted but for calls that wait
        enough = _enough(view, key, decision, coming, now) if for_calls else ""
        if enough:
            if not coming:
                view = replace(patience.served(view, [key]), pending=with_item(view.pending, key, enough))
                view = replace(view, enough=view.enough | {key})
            lack = placed + len(coming)
            break
        view = replace(view, enough=view.enough - {key}) if key in view.enough else view
        if isinstance(decision, Place):
            view = _started(view, version, decision, context, more=number + 1 < lack, waits=bool(coming))
            placed += 1
            continue
        before = view.claims.keys()
        view = _waits(view, request, decision, now)
        coming.append(decision.seconds if decision.seconds is not None else inf)
        beside += isinstance(decision, Wait) and decision.room
        if view.claims.keys() <= before and (request.further or not under_way(view, request)):
            break
    if coming:
        view = patience.waited(view, request, lack - placed - beside, now, turns)
    turns.more = turns.more or (placed > 0 and lack > most)
    return _counted(view, key, lack - placed)


def _enough(view: View, key: Key, decision: Decision, coming: Sequence[float], now: float) -> str:
    """Why it is not started, where all its calls begin sooner at instances that it has, or that wait for their places
    and are ready after those of ``coming``; else empty."""
    if decision.seconds is None:
        return ""
    begin_s = last_begins_s(view, key, now, coming)
    if begin_s > decision.seconds + (WORTH_S if coming else 0.0):
        return ""
    why = f"all its calls are expected to begin at instances that it has, after {begin_s:.2f} s; another one "
    return why + f"would be ready after {decision.seconds:.2f} s"


def _started(view: View, version: VersionRecord, place: Place, context: Context, *, more: bool, waits: bool) -> View:
    """One more instance. ``more``: others are wanted yet; ``waits``: one of these has been waiting for longer."""
    key = (version.function, version.version)
    known = view.put_off.get(key)
    outlook = known.outlook if known is not None else None
    caller = next(iter(view.callers.get(key, EMPTY).values()), "")
    waited = known is not None and not waits
    made = replace(_new(version, place, context), outlook=None if waits else outlook, waited=waited, call=caller)
    view = view.put_instance(made)
    if more or waits:
        return patience.behind(view, key, context.now, outlook if waits else None)
    return patience.served(view, [key])


def _waits(view: View, request: Request, decision: Evict | Migrate | Wait | Refuse, now: float) -> View:
    """It has no place yet; room is made for it as was decided."""
    key = request.key
    view = room.begun(view, key, decision, Claim(now + over_s(view, key, decision.seconds), key))
    reason: Words = decision.reason
    if isinstance(decision, Wait) and not decision.room:
        view, reason = awaiting.told(view, key, request.need(view), reason, now)
    if not isinstance(decision, Refuse):
        outlook = _outlook(decision, now)
        view = patience.put_off(view, request, now, outlook)
    return view if key in view.pending else replace(view, pending={**view.pending, key: reason})


def _outlook(decision: Evict | Migrate | Wait, now: float) -> Outlook | None:
    """What is remembered of it for when it has its place; None: no more was decided than that there is no room."""
    if decision.seconds is None and not isinstance(decision, Evict):
        return None
    taken = () if isinstance(decision, Migrate) else decision.claims
    return Outlook(type(decision).__name__.lower(), now, decision.seconds, str(decision.reason), taken)


def _choose(request: Request, view: View, *, context: Context) -> Decision:
    return decided(context.policy, request, view, context.now, context.rng)


def _make(view: View, key: Key, place: Place, *, context: Context) -> tuple[View, str]:
    made = _new(view.versions[key], place, context)
    return view.put_instance(made), made.record.instance


def _new(version: VersionRecord, place: Place, context: Context) -> Instance:
    record = InstanceRecord(
        instance=f"{version.function}-{version.version}-{context.rng.getrandbits(40):010x}",
        function=version.function,
        version=version.version,
        node=place.node,
        state=InstanceState.PENDING,
        created=context.wall,
    )
    return Instance(
        record=record, manifest=version.manifest, placed=context.now, gpus=place.gpus, predicted=place.estimate
    )


def _due(instance: Instance, now: float) -> bool:
    """Whether a command about it must go out now, for the first time or again."""
    if instance.stop is None and (instance.adopted or instance.record.state is not InstanceState.PENDING):
        return False
    if instance.ended:
        return False
    draining = instance.state is InstanceState.DRAINING and instance.acked
    return instance.commanded is None or now - instance.commanded >= (REPEAT_DRAIN_S if draining else REPEAT_S)


def _command(view: View, now: float) -> tuple[View, list[Action]]:
    actions: list[Action] = []
    sent: dict[str, Instance] = {}
    for name, instance in view.instances.items():
        if not _due(instance, now):
            continue
        sent[name] = replace(instance, commanded=now)
        stop = instance.stop
        actions.append(SendStart(name) if stop is None else _stop(instance, stop))
    if sent:
        view = replace(view, instances=view.instances.put(*sent.values()))
    return view, actions


def _stop(instance: Instance, stop: Stop) -> SendStop:
    return SendStop(instance.record.node, instance.record.instance, stop.reason, stop.grace_s, stop.resume)


def _strays(view: View, now: float) -> tuple[View, list[Action]]:
    """Instances that a node works on and nobody knows: of a lost start command, or back from a silence. They end when
    their calls have, which nobody has cancelled; what outlives its grace goes on elsewhere."""
    there: dict[str, SendStop] = {}
    for name, node in view.nodes.items():
        if node.status is None or not view.alive(name, now):
            continue
        for status in node.status.instances:
            if status.instance not in view.instances and not final(INSTANCE, status.state):
                grace_s = _stray_s(view, status)
                there[status.instance] = SendStop(name, status.instance, STRAY, grace_s, resume=True)
    due = [name for name in there if now - view.orphans.get(name, -REPEAT_S) >= REPEAT_S]
    if not due and view.orphans.keys() == there.keys():
        return view, []
    marks: Mapping[str, float] = {name: now if name in due else view.orphans[name] for name in there}
    return replace(view, orphans=marks), [there[name] for name in due]


def _stray_s(view: View, status: InstanceStatus) -> float:
    """How long its calls may go on: no route ever named one that starts, nor one of a version that is gone."""
    version = view.versions.get((status.function, status.version))
    return version.manifest.timeout if version is not None and status.state is not InstanceState.STARTING else 0.0

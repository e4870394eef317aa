"""Live migration of an instance's running calls, step by step (``states.MIGRATION``; ServerlessLLM, section 5.3). Pure.

Here is decided which instance goes where and when the source takes no new call. That its record names the destination
(``moves_to``) is the commit: gateways read it in the route and carry the calls over, each at its own time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Final, TypeAlias

import msgspec

from sllm_runtime.control import autoscale, backoff, fits, instances, room
from sllm_runtime.control.placement import Decision, Place, Request, Wait, ends_late, may_start, room_made
from sllm_runtime.control.scheduling.ending import ending
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.moving import carried_s
from sllm_runtime.control.scheduling.servers import server
from sllm_runtime.control.scheduling.startup import overdue
from sllm_runtime.control.turns import Turns
from sllm_runtime.control.view import Claim, Instance, Key, Migration, Refusal, View, with_item, without
from sllm_runtime.protocol.ctl import Migrated
from sllm_runtime.protocol.errors import (
    Conflict,
    InstanceNotFound,
    InvalidRequest,
    NodeNotFound,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.states import MIGRATION, InstanceState, MigrationState, check, final

PLACE_S: Final = 60.0
"""A destination that has no room for so long gives it up, ..."""
RELEASED_S: Final = 10.0
"""... so much later where what ends for it is about to give back what it held."""
MIXED: Final = "it holds accelerators of several kinds"
OTHER_CLASS: Final = (
    "it computes other bits than the source, or serves another context: the rest would be of another answer"
)
FAILED_S: Final = 300.0
"""A node where a destination did not start, or served another context, is left out for so long; where it did not start
it is tried all the same for who names it."""
KEEP_S: Final = 60.0
"""What came of a migration can be asked for so long after its end; longer where its source would be moved in vain."""

Make: TypeAlias = Callable[[View, Key, Place], tuple[View, str]]
"""Adds a new instance to the view; its name."""
Choose: TypeAlias = Callable[[Request, View], Decision]


def ask(view: View, name: str, to: str, now: float, expected: float | None = None, by: Key | None = None) -> View:
    """Begin to move the calls of instance ``name`` to node ``to`` (empty: the policy chooses), which is ``expected`` to
    take so many seconds, to make room for version ``by``; one that goes on there, or anywhere, is joined.

    Raises ``InstanceNotFound``, ``NodeNotFound``, ``Conflict``, or ``InvalidRequest`` if they cannot be
    carried."""
    known = view.migrations.get(name)
    instance = view.instances.get(name)
    if known is not None and (instance is None or not final(MIGRATION, known.state)):
        return view if instance is None else _joined(view, known, instance, to, now, by)
    if instance is None or instance.ended:
        raise InstanceNotFound(f"there is no instance {name}; `sllm fn describe` shows those of a function")
    _reachable(view, instance, _carried(view, instance), to, now)
    if by is None and to in apart(view, instance, now):
        raise InvalidRequest(f"calls of instance {name} cannot go on at node {to}: {OTHER_CLASS}", field="to")
    tokens = instance.tokens(now)
    begun = Migration(name, to, MigrationState.PREPARING, now, tokens=tokens, expected=expected, by=by, named=to)
    return _put(view, replace(begun, unfit=known.unfit, apart=known.apart) if known is not None else begun)


def _joined(view: View, known: Migration, source: Instance, to: str, now: float, by: Key | None) -> View:
    """Who names another node than it goes to is not told that it goes there; while it has none yet it gets that one.
    What people ask for as well is theirs."""
    if by is None and known.by is not None:
        known = replace(known, by=None)
        view = _put(view, known)
    destination = view.instances.get(known.destination)
    node = destination.record.node if destination is not None else known.node
    if to in ("", node):
        return view
    if not known.destination and not node:
        _reachable(view, source, _carried(view, source), to, now)
        return _put(view, replace(known, node=to, named=to))
    where = f"node {node}" if node else f"instance {known.destination}"
    raise Conflict(f"instance {known.source} moves to {where} already; ask again when that is over")


def apart(view: View, source: Instance, now: float) -> frozenset[str]:
    """Nodes where an instance is known to be of another numerics class than ``source``, on accelerators of its kind."""
    known, mark, kinds = view.migrations.get(source.record.instance), source.record.fingerprint, _kinds(view, source)
    met = (node for node, until in known.apart.items() if now < until) if known is not None else ()
    others = (each for each in view.of(source.key) if each.record.fingerprint not in ("", mark))
    return frozenset((*met, *(each.record.node for each in others if _kinds(view, each) == kinds)))


def _kinds(view: View, instance: Instance) -> Counter[str]:
    return Counter(gpu.kind for gpu in fits.held(view, instance))


def _carried(view: View, instance: Instance) -> fits.Need:
    """What it needs elsewhere. Raises unless the calls of ``instance`` can go on there."""
    name, function, manifest = instance.record.instance, instance.key[0], instance.manifest
    if not instance.ready:
        why = instance.stop.reason if instance.stop else f"it is {instance.state}"
        raise Conflict(f"instance {name} cannot be moved: {why}")
    if not manifest.engine:
        raise InvalidRequest(f"calls of {function} cannot be moved: it is not engine-backed (engine=True)")
    if not manifest.resumable:
        raise InvalidRequest(f"calls of {function} cannot be moved: it is deployed with resumable=False")
    if not instance.carries:
        raise InvalidRequest(f"calls of {function} cannot be moved: its engine does not resume exactly on this node")
    need = _need(view, instance)
    if need is None:
        raise InvalidRequest(f"calls of {function} cannot be moved: {MIXED}")
    return need


def _reachable(view: View, instance: Instance, need: fits.Need, to: str, now: float) -> None:
    if not to:
        return
    node = view.nodes.get(to)
    if node is None:
        raise NodeNotFound(f"there is no node {to}; `sllm node list` shows all")
    if to == instance.record.node:
        raise InvalidRequest(
            f"instance {instance.record.instance} is on node {to} already; name another one", field="to"
        )
    if node.status is None or not view.alive(to, now):
        raise Unavailable(f"node {to} is not heard; choose another one")
    if node.record.cordoned or node.status.draining:
        raise Unavailable(f"node {to} takes no starts: it is cordoned or draining; choose another one")
    if node.status.condition:
        raise Unavailable(f"node {to} can make no sandbox: {node.status.condition}; choose another one")
    lacks = fits.short(need, fits.total(node.status))
    if lacks:
        raise InvalidRequest(f"node {to} can never run it: it lacks {'; '.join(lacks)}", field="to")


def _need(view: View, instance: Instance) -> fits.Need | None:
    return fits.alike(Request(instance.key, instance.manifest).need(view), fits.held(view, instance))


def restored(view: View, now: float) -> View:
    """With the moves that a controller before this one began, and told of. Known before a node is heard: a source may
    have ended meanwhile, as was wanted, and that its move is done is told by whoever leads then."""
    for name, source in view.instances.items():
        to = source.record.moves_to
        if to and not source.ended:
            there = view.instances.get(to)
            node = there.record.node if there is not None else ""
            moving = Migration(name, node, MigrationState.MOVING, now, destination=to, adopted=True)
            view = _put(_drained(view, source, to), moving)
    return view


# --- step by step -----------------------------------------------------------------------------------
def advance(view: View, now: float, choose: Choose, make: Make, turns: Turns[str]) -> View:
    """The next step of each migration. What ``choose`` places, ``make`` adds."""
    view = _asked_by_policy(view, now)
    for migration in tuple(view.migrations.values()):
        if migration.ended is None:
            view = _step(view, migration, now, choose, make, turns)
    _, view = turns.passed(view)
    view = _followed(view)
    old = [name for name, each in view.migrations.items() if _told(view, each, now)]
    return replace(view, migrations=without(view.migrations, old)) if old else view


def _told(view: View, migration: Migration, now: float) -> bool:
    """Whether nobody needs what is known of it any more: it is over, and nowhere would its source be moved in vain."""
    if migration.ended is None or now - migration.ended <= KEEP_S:
        return False
    in_vain = any(now < until for until in (*migration.unfit.values(), *migration.apart.values()))
    return not in_vain or migration.source not in view.instances


def _asked_by_policy(view: View, now: float) -> View:
    """What a placement wants moved."""
    gone = []
    for name, wanted in view.moves.items():
        known = view.migrations.get(name)
        if known is not None and known.began >= wanted.decided:
            continue
        try:
            view = ask(view, name, wanted.node, now, wanted.seconds, wanted.by)
        except SllmError:
            gone.append(name)
    return replace(view, moves=without(view.moves, gone)) if gone else view


def _followed(view: View) -> View:
    """What a placement wanted moved leaves ``View.moves`` when that is over; nothing more is promised to what has its
    place."""
    going = ((move, view.migrations[name]) for name, move in view.moves.items())
    on = [replace(move, placed=bool(known.destination)) for move, known in going if known.ended is None]
    moves = {move.instance: move for move in on}
    return replace(view, moves=moves) if moves != view.moves else view


def _step(view: View, migration: Migration, now: float, choose: Choose, make: Make, turns: Turns[str]) -> View:
    source = view.instances.get(migration.source)
    if source is None or source.ended:
        moved = migration.state is MigrationState.MOVING and (source is None or source.state is InstanceState.STOPPED)
        state = MigrationState.DONE if moved else MigrationState.ABANDONED
        return _end(view, migration, state, "" if moved else "the source has ended; its calls go on elsewhere", now)
    if migration.state is MigrationState.PREPARING and source.stop is not None:
        why = f"the source is being ended: {source.stop.reason}"
        view = view if source.running else _for_nobody(view, migration, why)
        return _end(view, migration, MigrationState.ABANDONED, why, now)
    destination = view.instances.get(migration.destination)
    comes = destination.live and not destination.ready if destination is not None else not migration.destination
    if comes and _needless(view, migration, source, now):
        why = "its calls have ended; it can be ended for what wants its place"
        return _end(_for_nobody(view, migration, why), migration, MigrationState.ABANDONED, why, now)
    if not migration.destination:
        return _place(view, migration, source, now, choose, make, turns)
    if destination is None or destination.ended or destination.stop is not None:
        return _lost(view, migration, source, destination, now)
    if migration.state is MigrationState.MOVING:
        return _drained(view, source, migration.destination)
    return _commit(view, migration, source, destination, now) if destination.ready else view


def _needless(view: View, migration: Migration, source: Instance, now: float) -> bool:
    """Whether the start that a policy has it moved for has room by its end: it is idle, may be ended, and its move is
    overdue. Not where that start may not go, nor before that gives all the room: its place is kept for it."""
    by, node, move = migration.by, view.nodes.get(source.record.node), view.moves.get(migration.source)
    version = view.versions.get(by) if by is not None else None
    if source.running or by is None or version is None or node is None or move is None or not overdue(move, now):
        return False
    if not may_start(view, by, now)(node):
        return False
    request = Request(by, version.manifest)
    going = room_made(request, request.need(view), view, node, now) or ()
    return source in going and not any(map(ends_late, going))


def _place(
    view: View, migration: Migration, source: Instance, now: float, choose: Choose, make: Make, turns: Turns[str]
) -> View:
    """An idle instance of the version, or a new one."""
    idle = _idle(view, source, migration.node, now)
    if idle is not None:
        found = replace(migration, destination=idle.record.instance, node=idle.record.node)
        return _commit(view, _predicted(view, found, source, 0.0, now), source, idle, now)
    if not turns.places(migration.source):
        return view
    _, view = turns.passed(view)
    turns.looked(migration.source)
    decision = _choice(view, migration, source, now, choose)
    if isinstance(decision, Place):
        view, name = make(view, source.key, decision)
        found = replace(migration, destination=name, node=decision.node)
        return _put(view, _predicted(view, found, source, decision.seconds, now))
    # One that a policy has decided on is decided on anew: what it went by is no longer so.
    patience_s = PLACE_S + (RELEASED_S if _is_made(decision) else 0.0)
    if now - migration.began >= patience_s or migration.by is not None:
        return _end(view, migration, MigrationState.ABANDONED, f"no room for it: {decision.reason}", now)
    return room.begun(view, source.key, decision, Claim(inf, migration.source))


def _predicted(view: View, migration: Migration, source: Instance, start_s: float | None, now: float) -> Migration:
    """With what it is expected to take where people asked for it: its destination is ready after ``start_s`` (None: by
    a policy that does not ask)."""
    if migration.expected is not None or start_s is None:
        return migration
    return replace(migration, expected=now - migration.began + start_s + carried_s(view, source, now))


def _is_made(decision: Decision) -> bool:
    """Whether room is being made: what ends for it has given back what it held in a moment."""
    return isinstance(decision, Wait) and bool(decision.claims)


def _idle(view: View, source: Instance, node: str, now: float) -> Instance | None:
    """One that is free on a node that takes starts: what is on others leaves them, or may be gone."""
    taken, in_doubt = view.destinations, view.in_doubt(now)
    for other in view.of(source.key):
        record = other.record
        there = record.node != source.record.node and node in ("", record.node)
        free = other.ready and not other.running and record.instance not in taken and not record.moves_to
        if not (there and free and record.fingerprint == source.record.fingerprint):
            continue
        known = view.nodes.get(record.node)
        stays = known is not None and known.open and view.alive(record.node, now) and record.node not in in_doubt
        if stays and record.instance not in view.suspects:
            return other
    return None


def _left_out(view: View, migration: Migration, source: Instance, now: float) -> dict[str, str]:
    """Nodes where none is started, and why."""
    failed = (node for node, until in migration.unfit.items() if now < until)
    return dict.fromkeys(failed, "it did not start there") | dict.fromkeys(apart(view, source, now), OTHER_CLASS)


def _choice(view: View, migration: Migration, source: Instance, now: float, choose: Choose) -> Decision:
    """Where a new one goes; or how room is made for it, or what is short."""
    view = replace(view, moves=without(view.moves, [source.record.instance]))  # the place that is promised to itself
    need, node, version = _need(view, source), migration.node, view.versions.get(source.key)
    if need is None:
        return Wait(MIXED)
    if version is None:
        return Wait("its version is no more")
    failure = view.failures.get(source.key)
    if failure is not None and backoff.active(failure, now, asked=True):
        return Wait(f"its version's last start failed: {failure.error.message}")
    without_hope = _left_out(view, migration, source, now)
    if not node:
        # On accelerators of its kind, whatever its version may use.
        request = Request(source.key, source.manifest, version.model, patient=False, own=need)
        # The policy looks everywhere but where it runs now.
        barred = {**without_hope, source.record.node: "it moves away"}
        elsewhere = {(source.key, name): Refusal(now + 1, why) for name, why in barred.items()}
        return choose(request, replace(view, refused={**view.refused, **elsewhere}))
    if node in without_hope and (migration.by is not None or node in apart(view, source, now)):
        return Wait(f"node {node}: {without_hope[node]}")
    known = view.nodes.get(node)
    capacity = fits.free(view, known) if known is not None else None
    if known is None or known.status is None or capacity is None or not view.alive(node, now):
        return Wait(f"node {node} is not heard")
    if not known.open:
        return Wait(f"node {node} takes no starts now: it is cordoned, drained, or makes no sandboxes")
    refusal = view.refused.get((source.key, node))
    if refusal is not None and now < min(refusal.until, refusal.yields):
        return Wait(f"node {node}: {refusal.reason}")
    chosen, lacks = fits.choose_gpus(need, capacity), fits.short(need, capacity)
    if chosen is not None and not lacks:
        there = server(view, known, known.status)
        guess = estimate(there, source.key, view.model_of(source.key), view.learned, device=bool(need.gpus))
        return Place(node, chosen[1], guess)
    request = Request(source.key, source.manifest, version.model)
    # Nothing ends for what a policy has decided on, who went by its being there.
    going = room_made(request, need, view, known, now) if migration.by is None else None
    return ending(node, going) if going else Wait(f"{node} lacks {'; '.join(lacks)}")


def _commit(view: View, migration: Migration, source: Instance, destination: Instance, now: float) -> View:
    """The destination is there: the source takes no new call, and says where those that run go on."""
    if destination.record.fingerprint != source.record.fingerprint:
        why = "it computes other bits than the one that it was to relieve, or serves another context"
        view, until = instances.stop(view, destination, why, 0.0), _apart_until(view, source, destination, now)
        migration = replace(migration, apart=with_item(migration.apart, destination.record.node, until))
        return _end(view, migration, MigrationState.ABANDONED, f"instance {migration.destination}: {OTHER_CLASS}", now)
    served = source.seen.served if source.seen is not None else 0
    begun = replace(migration, state=check(MIGRATION, migration.state, MigrationState.MOVING), served=served, since=now)
    view = _put(view, replace(begun, tokens=source.tokens(now)))
    view = _points(view, source, migration.destination)
    return _drained(view, view.instances[migration.source], migration.destination)


def _drained(view: View, source: Instance, destination: str) -> View:
    return instances.stop(view, source, f"its calls go on at {destination}", source.manifest.timeout)


def _points(view: View, source: Instance, destination: str) -> View:
    return view.put_instance(replace(source, record=msgspec.structs.replace(source.record, moves_to=destination)))


def _lost(view: View, migration: Migration, source: Instance, destination: Instance | None, now: float) -> View:
    """The destination is no more: what has not moved goes on at the source, to its end."""
    if migration.state is MigrationState.PREPARING and destination is not None and _refused(destination):
        return _put(view, replace(migration, destination="", node=migration.named))
    error = destination.record.error if destination is not None else None
    stop = destination.stop if destination is not None else None
    why = error.message if error is not None else stop.reason if stop is not None else "it is gone"
    if source.record.moves_to:
        view = _points(view, source, "")
    if destination is not None and destination.state is InstanceState.FAILED:
        unfit = with_item(migration.unfit, destination.record.node, now + FAILED_S)
        migration = replace(migration, unfit=unfit)
    return _end(view, migration, MigrationState.ABANDONED, f"instance {migration.destination}: {why}", now)


def _refused(destination: Instance) -> bool:
    """Whether its node did not begin it: another place is looked for, as for any start (``instances.withdraw``)."""
    return destination.state is InstanceState.STOPPED and destination.stop is None and destination.seen is None


def _apart_until(view: View, source: Instance, destination: Instance, now: float) -> float:
    """For good; but on accelerators of one kind it may be that less memory was free when it started (decision 0060)."""
    alike = _kinds(view, source) == _kinds(view, destination) != Counter()
    return now + FAILED_S if alike else inf


def _for_nobody(view: View, migration: Migration, why: str) -> View:
    """Its calls have ended before they could move: the destination is ended too, unless its version wants it."""
    destination = view.instances.get(migration.destination)
    if destination is None or not destination.live or destination.running or view.demand(destination.key):
        return view
    others = sum(each.live for each in view.of(destination.key)) - 1
    if others < autoscale.floor(view, destination.key, destination.manifest):
        return view
    grace = destination.manifest.timeout if destination.ready else 0.0  # a call may be on its way to it
    return instances.stop(view, destination, why, grace, resume=destination.carries)


def _end(view: View, migration: Migration, state: MigrationState, note: str, now: float) -> View:
    return _put(view, replace(migration, state=check(MIGRATION, migration.state, state), note=note, ended=now))


def _put(view: View, migration: Migration) -> View:
    return replace(view, migrations=with_item(view.migrations, migration.source, migration))


# --- what is told of it -----------------------------------------------------------------------------
def so_far(view: View, name: str) -> Migrated:
    """How far it is. Raises ``InstanceNotFound`` if nothing is known of it (any more)."""
    migration = view.migrations.get(name)
    if migration is None:
        raise InstanceNotFound(f"no migration of instance {name} is known; ask for one with `sllm migrate`")
    source = view.instances.get(name)
    return Migrated(
        instance=name,
        destination=migration.destination,
        node=migration.node,
        state=migration.state,
        running=source.running if source is not None and not source.ended else 0,
        note=migration.note,
    )


def outcome(view: View, name: str) -> Migrated | None:
    """``so_far``, once it is over."""
    found = so_far(view, name)
    return found if final(MIGRATION, found.state) else None

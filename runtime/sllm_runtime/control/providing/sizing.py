"""How many nodes there should be: ``step(view, offer, now)`` gives the view that follows and what the provider is told.
Pure.

Starts that wait for a node get as many as they fill; a node that has had nothing to do for a while is drained, and
given back when it is empty. Between two decisions lies a cool-down, nothing is given back while a start waits or a node
comes, and a node that is to go stays if a start turns up for it: so a constant demand moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from sllm_runtime.control import autoscale, draining
from sllm_runtime.control.fits import Need, need_in, short, total
from sllm_runtime.control.providing.awaiting import could_come, need_of_errand
from sllm_runtime.control.providing.packing import nodes_for
from sllm_runtime.control.providing.pool import Asked, Errand, News, Pool
from sllm_runtime.control.providing.provider import Offer
from sllm_runtime.control.view import Key, View, without
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.states import INSTANCE, final

SETTLED_S: Final = 2.0
"""A start that has waited for less may find room yet: a node that refuses is asked again after a second."""
FRESH_S: Final = 10.0
"""A node that has first reported so recently may still refuse: its loaderd is on its way, or its sandboxes."""
AGAIN_S: Final = 60.0
"""A node that is still a member so long after its removal was asked for is asked for again."""


@dataclass(frozen=True, slots=True)
class SetDesired:
    nodes: int


@dataclass(frozen=True, slots=True)
class Remove:
    node: str


Action: TypeAlias = SetDesired | Remove


@dataclass(frozen=True, slots=True)
class Step:
    view: View
    actions: tuple[Action, ...] = ()


def step(view: View, offer: Offer, now: float) -> Step:
    """The next decision, from what the provider has just said. Same input, same answer."""
    if view.pool is None:
        return Step(view)
    pool = _observed(view, _used_again(view, view.pool), offer, now)
    view = _forgotten(_put(view, pool), now)
    needs, shape = tuple(waiting(view, now)), _pool(view).shape
    wanted = nodes_for(needs, shape) - _room(_pool(view), now) if shape is not None else 0
    staying = _staying(view)[: max(wanted, 0)]
    if staying:
        return Step(_kept(view, staying, len(needs)))
    gone = _given_back(view, now)
    if gone:
        return _removing(view, gone, now)
    if wanted > 0:
        return _grow(view, wanted, len(needs), now)
    return Step(view if needs else _shrink(view, now))


def waiting(view: View, now: float) -> Iterator[Need]:
    """What starts, moves of running calls and preparations need that wait for a node."""
    for key in view.awaiting:
        if key in view.versions and view.put_off_s(key, now) >= SETTLED_S:
            for _ in range(_lacking(view, key)):
                yield need_at(view, key)
    for move in view.migrations.values():
        source = view.instances.get(move.source)
        unplaced = move.ended is None and not move.destination and not move.node
        if unplaced and source is not None and source.key in view.versions and now - move.began >= SETTLED_S:
            yield need_at(view, source.key)
    for errand in _pool(view).errands.values():
        if not errand.node:
            yield need_of_errand(errand)


def need_at(view: View, key: Key) -> Need:
    """What one instance of version ``key`` takes on its node."""
    return need_in(view, key, view.versions[key].manifest)


def _unmet(view: View) -> list[Need]:
    """Of what waits, what a node of the provider could run, whether one is to come for it or not."""
    wanted = (need_at(view, key) for key in view.pending if key in view.versions)
    return [need for need in wanted if could_come(view, need)]


def _no_use(view: View, name: str, unmet: list[Need]) -> bool:
    """Whether it could run nothing of what waits, empty as it is: its accelerators are broken."""
    status = view.nodes[name].status
    return status is not None and all(short(need, total(status)) for need in unmet)


def _room(pool: Pool, now: float) -> int:
    """Nodes that those who wait have yet to be placed on: on their way, or just come and still empty."""
    fresh = [name for name in pool.idle if now - pool.arrived[name] < FRESH_S and name not in pool.record.leaving]
    return len(pool.coming) + len(fresh)


def _lacking(view: View, key: Key) -> int:
    """Instances of a version that there should be and are not."""
    live = [instance for instance in view.of(key) if instance.live]
    return autoscale.lack(view, key, view.versions[key].manifest, live)


# --- what is seen -------------------------------------------------------------------------------------
def _observed(view: View, pool: Pool, offer: Offer, now: float) -> Pool:
    alive = frozenset(name for name in offer.members if view.alive(name, now))
    coming = _coming(pool, offer, now)
    said = ", ".join(map(str, (offer.shape.cpu, offer.shape.memory, *offer.shape.gpus)))
    if not pool.record.said:  # of a controller of before
        pool = pool.with_record(said=said)
    elif pool.record.said != said:  # its nodes are of another type from now on
        pool = pool.with_record(cpu=0.0, memory=0, gpus=None, fewer=None, said=said, seen=pool.record.members)
    pool = replace(pool, offer=offer, coming=coming, arrived=_only(pool.arrived, offer.members))
    for name in sorted(alive - pool.arrived.keys()):
        pool = _seen(view, replace(pool.came(now), arrived={**pool.arrived, name: now}), name)
    members = {*pool.record.members, *offer.members}
    seen = members & {*pool.record.seen, *pool.arrived}
    given = sorted(pool.removed.keys() - offer.members)
    return replace(
        pool.with_record(members=tuple(sorted(members)), seen=tuple(sorted(seen))),
        silent={name: pool.silent.get(name, now) for name in sorted(offer.members - alive)},
        idle={name: pool.idle.get(name, now) for name in sorted(alive) if _idle(view, pool, name)},
        removed=_only(pool.removed, offer.members),
        news=tuple(News(Kind.NODE_GIVEN_BACK, _why_given(view, pool, name), name) for name in given),
    )


def _used_again(view: View, pool: Pool) -> Pool:
    """Without those that were to go, and that an operator has since put to use again or taken for himself."""
    used = [name for name in pool.record.leaving if name in view.nodes and not view.nodes[name].record.draining]
    if not used:
        return pool
    left = tuple(name for name in pool.record.leaving if name not in used)
    return replace(pool.with_record(leaving=left), idle=without(pool.idle, used))


def _coming(pool: Pool, offer: Offer, now: float) -> tuple[Asked, ...]:
    """As many as lack: what was asked for and did not count is no longer waited for, what nobody here asked for is."""
    lacking = max(offer.desired - len(pool.arrived.keys() & offer.members), 0)
    more = (Asked(now, known=False),) * (lacking - len(pool.coming))
    return (*pool.coming, *more)[:lacking]


def _only(times: Mapping[str, float], members: frozenset[str]) -> dict[str, float]:
    return {name: at for name, at in times.items() if name in members}


def _seen(view: View, pool: Pool, name: str) -> Pool:
    """With what a node has that has just arrived, where that is less than is said of its kind."""
    status = view.nodes[name].status
    if status is None or name in pool.record.seen:  # under a controller before
        return pool
    record = pool.record
    cpu = min(record.cpu, status.cpu) if record.cpu else status.cpu
    memory = min(record.memory, status.memory) if record.memory else status.memory
    gpus = tuple((gpu.kind, gpu.memory) for gpu in status.gpus)
    said = pool.offer.shape.gpus if pool.offer is not None else ()
    if len(gpus) < len(said) and record.fewer is None:  # one alone may be broken: it says nothing of those to come
        return pool.with_record(cpu=cpu, memory=memory, fewer=gpus)
    return pool.with_record(cpu=cpu, memory=memory, gpus=gpus, fewer=None)


def _idle(view: View, pool: Pool, name: str) -> bool:
    """Nothing runs there, starts there or is prepared there, and no operator has taken it out of use."""
    errands = any(errand.node == name for errand in pool.errands.values())
    cordoned = view.nodes[name].record.cordoned and name not in pool.record.leaving
    return not errands and not cordoned and name not in view.kept and _empty(view, name)


def _empty(view: View, name: str) -> bool:
    node = view.nodes.get(name)
    if node is None or node.status is None or any(not each.ended for each in view.on(name).values()):
        return False
    return all(final(INSTANCE, each.state) for each in node.status.instances)


def _forgotten(view: View, now: float) -> View:
    """Nodes that were given back and are silent leave the view: another one has another name."""
    pool = _pool(view)
    members = pool.offer.members if pool.offer is not None else frozenset()
    gone = [name for name in pool.record.members if name not in members and _over(view, name, now)]
    if not gone:
        return view
    left = pool.with_record(
        members=tuple(name for name in pool.record.members if name not in gone),
        leaving=tuple(name for name in pool.record.leaving if name not in gone),
    )
    return replace(view.drop_nodes(gone), pool=left)


def _over(view: View, name: str, now: float) -> bool:
    silent = name not in view.nodes or view.silent(name, now)
    return silent and all(each.ended for each in view.on(name).values())


# --- what is done -------------------------------------------------------------------------------------
def _kept(view: View, staying: list[str], starts: int) -> View:
    """What was to go stays: there is work for it."""
    for name in staying:
        view = draining.cordon(view, name, cordoned=False, drain=False)
    pool = _pool(view)
    left = tuple(name for name in pool.record.leaving if name not in staying)
    news = tuple(News(Kind.NODE_STAYS, f"{starts} start(s) wait for a node", name) for name in staying)
    made = replace(pool.with_record(leaving=left), idle=without(pool.idle, staying))
    return _put(view, replace(made, news=(*pool.news, *news)))


def _grow(view: View, wanted: int, starts: int, now: float) -> Step:
    pool, offer = _pool(view), _offer(view)
    nodes = min(offer.desired + wanted, offer.most)
    if nodes <= offer.desired or not pool.cooled(now):
        return Step(view)
    asked = (Asked(now, known=True),) * (nodes - offer.desired)
    text = f"from {offer.desired} to {nodes} node(s), for {starts} start(s) that wait; expected in {pool.boot_s:.0f} s"
    made = replace(pool, acted=now, coming=(*pool.coming, *asked), news=(*pool.news, News(Kind.POOL_GROWS, text)))
    return Step(_put(view, made), (SetDesired(nodes),))


def _staying(view: View) -> list[str]:
    """Nodes that are to go, and that the provider has not been told of."""
    pool = _pool(view)
    return [name for name in pool.record.leaving if name in pool.arrived and name not in pool.removed]


def _shrink(view: View, now: float) -> View:
    """Drain what has had nothing to do for long, the longest idle first, down to the least. While something waits,
    only what is of no use to it, and where no other one can come unless that goes: of a pool that has no more than its
    least too, since another one comes for it."""
    pool, offer, unmet = _pool(view), _offer(view), _unmet(view)
    if unmet and (pool.coming or not pool.full):
        return view
    if not pool.cooled(now) or (pool.coming and now - pool.coming[0].at < pool.timing.lost):
        return view
    leaving = [name for name in pool.record.leaving if name in offer.members]
    spare = offer.desired - len(leaving) - (0 if unmet else offer.least)
    idle = [name for name, since in pool.idle.items() if now - since >= pool.timing.idle and name not in leaving]
    idle = [name for name in idle if not unmet or _no_use(view, name, unmet)]
    going = sorted(idle, key=lambda name: (pool.idle[name], name))[: max(spare, 0)]
    if not going:
        return view
    for name in going:
        view = draining.cordon(view, name, cordoned=True, drain=True)
    news = tuple(News(Kind.NODE_LEAVING, f"idle for {now - pool.idle[name]:.0f} s", name) for name in going)
    made = pool.with_record(leaving=(*pool.record.leaving, *going))
    return _put(view, replace(made, acted=now, news=(*pool.news, *news)))


def _given_back(view: View, now: float) -> list[str]:
    """Members to be removed now: drained and empty, or silent for too long."""
    pool = _pool(view)
    members = _offer(view).members
    drained = [name for name in pool.record.leaving if name in members and _empty(view, name)]
    lost = [name for name, since in pool.silent.items() if now - since >= pool.timing.lost]
    due = sorted({*drained, *lost})
    return [name for name in due if name not in pool.removed or now - pool.removed[name] >= AGAIN_S]


def _why_given(view: View, pool: Pool, name: str) -> str:
    if name in pool.record.leaving and _empty(view, name):
        return "it is empty"
    lacks = "been heard for" if name in pool.record.seen else "come within"
    return f"it has not {lacks} {pool.timing.lost:g} s (SLLM_NODES_LOST)"


def _removing(view: View, gone: list[str], now: float) -> Step:
    pool = _pool(view)
    made = replace(pool, removed={**pool.removed, **dict.fromkeys(gone, now)})
    return Step(_put(view, made), tuple(Remove(name) for name in gone))


# --- errands ------------------------------------------------------------------------------------------
def sent(view: View, name: str, errand: Errand | None) -> View:
    """``view`` with work that is no instance; None: it is done."""
    if view.pool is None:
        return view
    rest = without(view.pool.errands, [name])
    return _put(view, replace(view.pool, errands={**rest, name: errand} if errand is not None else rest))


def _put(view: View, pool: Pool) -> View:
    return replace(view, pool=pool)


def _pool(view: View) -> Pool:
    assert view.pool is not None
    return view.pool


def _offer(view: View) -> Offer:
    offer = _pool(view).offer
    assert offer is not None
    return offer

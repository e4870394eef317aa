"""Room by letting running inference go on elsewhere: which instances, where to, and how long that takes
(ServerlessLLM, section 6.2). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

import msgspec

from sllm_runtime.control.fits import ANY_GPU, Capacity, Need, alike, choose_gpus, short, suits
from sllm_runtime.control.placement import Migrate, Request, may_start
from sllm_runtime.control.scheduling.crowd import NOBODY, Others, goes_without
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.moves import MOST_MOVES, Amounts, Movable, Moves, Target, search
from sllm_runtime.control.scheduling.rooms import CLOSE_S, Room, Start, by_time, quickest
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import Instance, Key, Move, Node, View

SETTLED_S: Final = 30.0
"""No instance is moved sooner after it was moved or took over what was, nor preempted sooner after it became ready: its
calls may have been preempted before. Of one of a controller before nobody knows what befell it."""
MOST_SERVERS: Final = 4
MOST_LOOKED: Final = 64
"""Servers of which it is asked whether moving could make room there."""
_MILLI: Final = 1000
_Held: TypeAlias = tuple[Key, tuple[str, ...]]
"""A version and the kinds of the accelerators that an instance of it holds."""
_Kinds: TypeAlias = tuple[tuple[str, int], ...]
"""Accelerators of a kind that have so many bytes at least: where for each of these no more are taken than there are,
each who is moved gets its own (Hall's condition; what suits one who asks for more suits who asks for less)."""


@dataclass(frozen=True, slots=True)
class Moving:
    """What a search goes by, beside the start it is for."""

    request: Request
    view: View
    servers: Servers
    now: float
    moved: Set[str]
    """Instances that are left alone."""
    settled_s: float
    others: Others
    """As in ``Start``: nothing is moved to where they would go without a place."""
    _needs: dict[_Held, Need | None] = field(default_factory=dict)
    """What a version needs elsewhere; None: that cannot be said."""
    _looked: dict[tuple[_Held, int], tuple[float, list[Room]]] = field(default_factory=dict)
    """The rooms for a version that were looked for: so many of them, within so many seconds."""

    @classmethod
    def of(
        cls, request: Request, view: View, servers: Servers, now: float, settled_s: float, others: Others = NOBODY
    ) -> Moving:
        """Of one decision."""
        return cls(request, view, servers, now, _moved(view, now, settled_s), settled_s, others)

    def movable(self, server: Server) -> list[Instance]:
        """Who of ``server`` may be moved now."""
        view, moved, until = self.view, self.moved, self.now - self.settled_s
        return [i for i in server.working if i.record.instance not in moved and _settled(view, i, until)]

    def stoppable(self, server: Server) -> list[Instance]:
        """Who of ``server`` may be stopped now; nothing that is more urgent, which would be served before it."""
        until, most = self.now - self.settled_s, self.request.manifest.priority
        there = (each for each in self.movable(server) if each.manifest.priority <= most)
        return [instance for instance in there if _there_since(instance) <= until]

    def going(self, server: Server, within: float) -> dict[str, Going]:
        """Who of ``server`` may be moved now, and could start somewhere else in less than ``within`` seconds, by
        name."""
        found = {}
        for instance in self.movable(server):
            name = instance.record.instance
            held = (instance.key, server.kinds.get(name, ()))
            if held not in self._needs:
                asks = self.servers.need(self.view, instance.key, instance.manifest)
                self._needs[held] = alike(asks, server.held.get(name, ()))
            need = self._needs[held]
            if need is None:
                continue
            rooms = self._rooms(held, need, 2, within)
            if rooms and (len(rooms) > 1 or rooms[0].server is not server):
                found[name] = Going(instance, need, held)
        return found

    def rooms(self, going: Going, server: Server, count: int, within: float) -> list[Room]:
        """Up to ``count`` rooms for who goes from ``server``, on other servers: all that take less than ``within``
        seconds, quickest first, and perhaps others."""
        found = self._rooms(going.held, going.need, count + 1, within)
        return [room for room in found if room.server is not server][:count]

    def _rooms(self, held: _Held, need: Need, count: int, within: float) -> list[Room]:
        """Looked for once for each version: a cluster runs many instances of few."""
        known = self._looked.get((held, count))
        if known is None or known[0] < within:
            known = self._looked[held, count] = (within, self._quickest(held[0], need, count, within))
        return known[1]

    def _quickest(self, key: Key, need: Need, count: int, within: float) -> list[Room]:
        view, others = self.view, self.others
        may, servers = may_start(view, key, self.now), self.servers.of(view)

        def alone(node: Node) -> bool:
            return may(node) and not goes_without(servers[node.record.node], need, others)

        start = Start(key, need, view.model_of(key), view.learned, alone if others else may)
        return quickest(start, self.servers, count, within)


class Going(NamedTuple):
    """An instance that may be moved, and what it needs elsewhere, where it has accelerators of the kinds that it holds
    here."""

    instance: Instance
    need: Need
    held: _Held


def _settled(view: View, instance: Instance, until: float) -> bool:
    """Whether it is known not to have been moved since ``until``, but for what ``_moved`` says, and not on trial."""
    return (not instance.adopted or _there_since(instance) <= until) and instance.key not in view.trials


def _there_since(instance: Instance) -> float:
    return instance.ready_at if instance.ready_at is not None else instance.placed


def _moved(view: View, now: float, settled_s: float) -> Set[str]:
    """Instances that are in a migration, or were lately."""
    lately = (each for each in view.migrations.values() if each.ended is None or now - each.ended < settled_s)
    return view.moves.keys() | {name for each in lately for name in (each.source, each.destination)}


def under_way(view: View, request: Request) -> list[Move]:
    """Moves that make room for this version already."""
    return [move for move in view.moves.values() if move.by == request.key]


def quickest_move(moving: Moving, start: Start, best: float) -> tuple[float, Migrate] | None:
    """The server where it starts soonest after running instances were moved off it, if that is before ``best``. Looked
    for on the MOST_SERVERS where it would start soonest were they empty, of those where moving could make room in
    time."""
    found: tuple[float, Migrate] | None = None
    limit, servers, searched = best, moving.servers, 0
    for guess, server in islice(by_time(start, servers, servers.busy, 0.0, best), MOST_LOOKED):
        if guess.seconds >= limit - CLOSE_S or searched == MOST_SERVERS:
            break
        cost = guess.seconds + start.delay_s(server, guess.seconds)
        going = moving.going(server, limit - cost)
        if not going:
            continue
        lacks = tuple(_lacks(moving, start.need, server, [each.instance for each in going.values()]))
        searched += bool(lacks)
        moves = _off(moving, server, going, lacks, limit - cost)
        if moves is None or not moves.chosen or cost + moves.seconds >= limit:
            continue
        limit = cost + moves.seconds
        found = (limit, Migrate(server.name, _promised(moving, going, moves), guess.after(moves.seconds)))
    return found


def _promised(moving: Moving, going: Mapping[str, Going], moves: Moves) -> tuple[Move, ...]:
    """With the accelerators that each gets: who asks for the largest comes first, so that none is left without."""
    servers = moving.servers.of(moving.view)
    made, left = [], {target.server: servers[target.server].free for _, target in moves.chosen}
    for name, target in sorted(moves.chosen, key=lambda each: -going[each[0]].need.gpu_memory):
        there = left[target.server]
        fitting = choose_gpus(going[name].need, there)
        gpus = fitting[1] if fitting is not None else ()
        still = tuple(gpu for gpu in there.gpus if gpu.index not in gpus)
        left[target.server] = msgspec.structs.replace(there, gpus=still)
        made.append(Move(name, target.server, target.seconds, moving.request.key, moving.now, gpus))
    return tuple(made)


def fewest_removed(moving: Moving, start: Start, server: Server) -> tuple[str, ...]:
    """Instances of ``server`` that could be stopped so that it fits there: the fewest, those first that have worked
    least; empty if that does not help."""
    for lack in _lacks(moving, start.need, server, moving.stoppable(server), in_turn=True):
        left, chosen = lack.amounts, []
        for instance, gives in lack.useful:
            if _helps(gives, left):
                left = tuple(short - back for short, back in zip(left, gives, strict=True))
                chosen.append(instance.record.instance)
        return tuple(chosen)
    return ()


@dataclass(frozen=True, slots=True)
class Lack:
    """What a server lacks for a start, and who could give some of it back there, who has worked least first."""

    amounts: Amounts
    useful: tuple[tuple[Instance, Amounts], ...]

    @property
    def alone(self) -> bool:
        """Whether each of them would be enough by itself."""
        short = [(k, lack) for k, lack in enumerate(self.amounts) if lack > 0]
        return all([gives[k] >= lack for _, gives in self.useful for k, lack in short])


def _lacks(
    moving: Moving, need: Need, server: Server, there: list[Instance], *, in_turn: bool = False
) -> Iterator[Lack]:
    """By the rank of accelerators, where the going of all of ``there`` would do. ``in_turn``: each gives what it does
    when those before it have gone."""
    asks = need.labels or need.container or need.python
    if asks and short(replace(need, memory=0, cpu=0.0, gpus=()), server.free):
        return
    if need.cpu > server.free.each + 1e-9:  # nobody's going would do
        return
    now, view, servers = moving.now, moving.view, moving.servers
    there.sort(key=lambda instance: (instance.busy_s(now), instance.record.instance))
    needs = [servers.need(view, instance.key, instance.manifest) for instance in there]
    memory = _given_back(need, needs, server.free, in_turn=in_turn)
    for kind, count in need.gpus or ((ANY_GPU, 0),):
        spare = sum(suits(gpu, kind, need.gpu_memory) for gpu in server.free.gpus)
        wanted = _amounts(need.takes(server.free), need.cpu, count)
        has = _amounts(server.free.memory, server.free.cpu, spare)
        lacking = tuple(want - have for want, have in zip(wanted, has, strict=True))
        useful = []
        for instance, its, nbytes in zip(there, needs, memory, strict=True):
            held = server.held.get(instance.record.instance, ())
            gives = _amounts(nbytes, its.cpu, sum([suits(gpu, kind, need.gpu_memory) for gpu in held]))
            if _helps(gives, lacking):
                useful.append((instance, gives))
        if useful and all(sum(gives[k] for _, gives in useful) >= lack for k, lack in enumerate(lacking)):
            yield Lack(lacking, tuple(useful))


def _given_back(need: Need, needs: Sequence[Need], there: Capacity, *, in_turn: bool) -> list[int]:
    """Bytes of memory by which ``need`` lacks less for each of ``needs`` that leaves: a model is given back by the last
    that uses it, and not for a start that uses it too."""
    if not there.shared:
        return [its.memory for its in needs]
    used = {digest for its in needs for digest in its.weights} & there.shared.keys()
    users = Counter({digest: there.shared[digest].instances for digest in used})
    found = []
    for its in needs:
        stays = [digest for digest in its.weights if users[digest] > (digest not in need.weights)]
        found.append(its.memory - sum(its.weights[digest] for digest in stays))
        if in_turn:
            users.subtract(its.weights.keys())
    return found


def _off(
    moving: Moving, server: Server, going: Mapping[str, Going], lacks: Iterable[Lack], within: float
) -> Moves | None:
    """The quickest moves that give ``server`` what it lacks, if they take less than ``within`` seconds."""
    kinds = tuple({(each.need.gpus[0][0], each.need.gpu_memory): None for each in going.values() if each.need.gpus})
    for lack in lacks:
        movable = _movables(moving, server, going, lack, kinds, within)
        servers = moving.servers.of(moving.view)
        names = {target.server for each in movable for target in each.targets}
        free = {name: _free(servers[name], kinds) for name in names}
        found = search(lack.amounts, movable, free)
        if found is not None:
            return found if found.seconds < within else None
    return None


def _helps(gives: Amounts, lacking: Amounts) -> bool:
    return any([back > 0 and lack > 0 for back, lack in zip(gives, lacking, strict=True)])


def _movables(
    moving: Moving, server: Server, going: Mapping[str, Going], lack: Lack, kinds: _Kinds, within: float
) -> list[Movable]:
    """With as many targets each as others could take from it. Where any one of them is enough one target is, and only
    if it is quicker than those before."""
    alone, useful = lack.alone, lack.useful[:MOST_MOVES]
    found = []
    for instance, gives in useful:
        name = instance.record.instance
        targets = _targets(moving, server, going[name], kinds, 1 if alone else len(useful), within)
        if targets:
            found.append(Movable(name, gives, targets))
            within = targets[0].seconds if alone else within
    return found


def _targets(
    moving: Moving, server: Server, going: Going, kinds: _Kinds, count: int, within: float
) -> tuple[Target, ...]:
    """The servers it could go to in less than ``within`` seconds: an instance of it is started there while it
    works on here, its calls go on there, and it gives back what it held."""
    carried = carried_s(moving.view, going.instance, moving.now)
    targets = []
    for room in moving.rooms(going, server, count, within):
        seconds = room.estimate.seconds + carried
        if seconds < within:
            targets.append(Target(room.server.name, _taken(going.need, room.server, kinds), seconds))
    return tuple(targets)


def carried_s(view: View, instance: Instance, now: float) -> float:
    """Until its calls go on at another one, which is ready, and it has given back what it held."""
    model = view.model_of(instance.key)
    resume = view.learned.resume_s(model.digest if model is not None else "", instance.tokens(now))
    return resume + view.learned.release_s(instance.key)


def _taken(need: Need, server: Server, kinds: _Kinds) -> Amounts:
    """What an instance that is moved to it takes there."""
    ((kind, count),) = need.gpus or (("", 0),)
    gpus = [count if kind == name and need.gpu_memory >= nbytes else 0 for name, nbytes in kinds]
    return _amounts(need.takes(server.free), need.cpu, *gpus)


def _free(server: Server, kinds: _Kinds) -> Amounts:
    """What it has left for instances that are moved to it."""
    gpus = [sum([gpu.memory >= nbytes for gpu in server.spare.get(kind.lower(), ())]) for kind, nbytes in kinds]
    return _amounts(server.free.memory, server.free.cpu, *gpus)


def _amounts(memory: int, cpu: float, *gpus: int) -> Amounts:
    return (memory, round(cpu * _MILLI), *gpus)

"""Room by letting running inference go on elsewhere: which instances, where to, and how long that takes
(ServerlessLLM, section 6.2). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from sllm_runtime.control.fits import ANY_GPU, Capacity, Need, short, suits
from sllm_runtime.control.placement import Migrate, Request
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.moves import MOST_MOVES, Amounts, Movable, Moves, Target, search
from sllm_runtime.control.scheduling.rooms import CLOSE_S, Room, Start, by_time, quickest
from sllm_runtime.control.scheduling.servers import Server, at_work
from sllm_runtime.control.view import Instance, Key, Move, View

SETTLED_S: Final = 30.0
"""No instance is moved or preempted sooner after it became ready, which is also when it took over what was moved."""
MOST_SERVERS: Final = 4
_MILLI: Final = 1000


@dataclass(frozen=True, slots=True)
class Moving:
    """What a search goes by, beside the start it is for."""

    request: Request
    view: View
    servers: Servers
    now: float
    moved: Set[str]
    """Instances that are left alone."""
    _elsewhere: dict[tuple[Key, frozenset[str], int], list[Room]] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, view: View, servers: Servers, now: float) -> Moving:
        """Of one decision."""
        return cls(request, view, servers, now, _moved(view, now))

    def elsewhere(self, instance: Instance, server: Server, count: int) -> list[Room]:
        """Up to ``count`` rooms for ``instance`` of ``server`` on other servers, on accelerators of its kind: on others
        the same model draws other tokens. Looked for once for each version: a cluster runs many instances of few."""
        kinds = frozenset(gpu.kind for gpu in server.held.get(instance.record.instance, ()))
        asked = (instance.key, kinds, count)
        rooms = self._elsewhere.get(asked)
        if rooms is None:
            rooms = self._elsewhere[asked] = self._rooms(instance, kinds, count + 1)
        return [room for room in rooms if room.server is not server][:count]

    def _rooms(self, instance: Instance, kinds: frozenset[str], count: int) -> list[Room]:
        view, servers, key = self.view, self.servers, instance.key
        need, may = servers.need(view, key, instance.manifest), servers.may(view, key, self.now)
        start = Start(key, need, view.model_of(key), view.learned, lambda other: kinds <= other.kinds and may(other))
        return quickest(start, servers, count)


def removable(view: View, instance: Instance, now: float) -> bool:
    """Whether its running calls could go on elsewhere now: it is engine-backed and resumable, has been ready for
    SETTLED_S, and nothing is being done to it."""
    return at_work(instance) and _settled(view, instance, now) and instance.record.instance not in _moved(view, now)


def _settled(view: View, instance: Instance, now: float) -> bool:
    since = instance.ready_at if instance.ready_at is not None else instance.placed
    return now - since >= SETTLED_S and instance.key not in view.trials


def _moved(view: View, now: float) -> Set[str]:
    """Instances that are in a migration, or were lately."""
    lately = (each for each in view.migrations.values() if each.ended is None or now - each.ended < SETTLED_S)
    return view.moves.keys() | {name for each in lately for name in (each.source, each.destination)}


def under_way(view: View, request: Request) -> list[Move]:
    """Moves that make room for this version already."""
    return [move for move in view.moves.values() if move.by == request.key]


def quickest_move(moving: Moving, start: Start, best: float) -> tuple[float, Migrate] | None:
    """The server where it starts soonest after running instances were moved off it, if that is before ``best``. Looked
    for on the MOST_SERVERS where it would start soonest were they empty."""
    found: tuple[float, Migrate] | None = None
    limit, servers = best, moving.servers
    for guess, server in islice(by_time(start, servers, servers.busy, 0.0, best), MOST_SERVERS):
        if guess.seconds >= limit - CLOSE_S:
            break
        moves = _off(moving, start, server, limit - guess.seconds)
        if moves is None or not moves.chosen or guess.seconds + moves.seconds >= limit:
            continue
        limit = guess.seconds + moves.seconds
        made = tuple(_move(name, target, moving) for name, target in moves.chosen)
        found = (limit, Migrate(server.name, made, replace(guess, release=moves.seconds)))
    return found


def _move(name: str, target: Target, moving: Moving) -> Move:
    return Move(name, target.server, target.seconds, moving.request.key, moving.now)


def fewest_removed(moving: Moving, start: Start, server: Server) -> tuple[str, ...]:
    """Instances of ``server`` that could be stopped so that it fits there: the fewest, those first that have worked
    least; empty if that does not help."""
    for lack in _lacks(moving, start.need, server, in_turn=True):
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
        return all(back >= lack for _, gives in self.useful for back, lack in zip(gives, self.amounts, strict=True))


def _lacks(moving: Moving, need: Need, server: Server, *, in_turn: bool = False) -> Iterator[Lack]:
    """By the rank of accelerators, where moving everything that can be moved would do. ``in_turn``: each gives what it
    does when those before it have gone."""
    asks = need.labels or need.container or need.python
    if asks and short(replace(need, memory=0, cpu=0.0, gpus=()), server.free):
        return
    now, view, servers, moved = moving.now, moving.view, moving.servers, moving.moved
    there = [i for i in server.working if i.record.instance not in moved and _settled(view, i, now)]
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
            gives = _amounts(nbytes, its.cpu, sum(suits(gpu, kind, need.gpu_memory) for gpu in held))
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


def _off(moving: Moving, start: Start, server: Server, within: float) -> Moves | None:
    """The quickest moves that make room on ``server``, if they take less than ``within`` seconds."""
    for lack in _lacks(moving, start.need, server):
        movable = _movables(moving, server, lack, within)
        servers = moving.servers.of(moving.view)
        free = {target.server: _free(servers[target.server]) for each in movable for target in each.targets}
        found = search(lack.amounts, movable, free)
        if found is not None:
            return found if found.seconds < within else None
    return None


def _helps(gives: Amounts, lacking: Amounts) -> bool:
    return any(back > 0 and lack > 0 for back, lack in zip(gives, lacking, strict=True))


def _movables(moving: Moving, server: Server, lack: Lack, within: float) -> list[Movable]:
    """With as many targets each as others could take from it. Where any one of them is enough one target is, and only
    if it is quicker than those before."""
    alone, useful = lack.alone, lack.useful[:MOST_MOVES]
    found = []
    for instance, gives in useful:
        movable = _movable(moving, server, instance, gives, 1 if alone else len(useful), within)
        if movable.targets:
            found.append(movable)
            within = movable.targets[0].seconds if alone else within
    return found


def _movable(moving: Moving, server: Server, instance: Instance, gives: Amounts, count: int, within: float) -> Movable:
    """It with the servers it could go to in less than ``within`` seconds: an instance of it is started there while it
    works on here, its calls go on there, and it gives back what it held."""
    view = moving.view
    model = view.model_of(instance.key)
    resume = view.learned.resume_s(model.digest if model is not None else "", instance.tokens(moving.now))
    release = view.learned.release_s(instance.key)
    targets = []
    for room in moving.elsewhere(instance, server, count):
        seconds = room.estimate.seconds + resume + release
        if seconds < within:
            need = moving.servers.need(view, instance.key, instance.manifest)
            takes = _amounts(need.takes(room.server.free), need.cpu, len(room.gpus))
            targets.append(Target(room.server.name, takes, seconds))
    return Movable(instance.record.instance, gives, tuple(targets))


def _free(server: Server) -> Amounts:
    """What it has left for instances that are moved to it. Accelerators of all kinds count alike: each target has been
    found to have its own."""
    return _amounts(server.free.memory, server.free.cpu, len(server.free.gpus))


def _amounts(memory: int, cpu: float, gpus: int) -> Amounts:
    return (memory, round(cpu * _MILLI), gpus)

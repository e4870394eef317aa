"""Room by letting running inference go on elsewhere: which instances, where to, and how long that takes
(ServerlessLLM, section 6.2). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from sllm_runtime.control.fits import ANY_GPU, Need, short, suits
from sllm_runtime.control.placement import Migrate, Request
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.moves import MOST_MOVES, Amounts, Movable, Moves, Target, search
from sllm_runtime.control.scheduling.rooms import CLOSE_S, Start, by_time, quickest
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import Instance, Move, View

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


def removable(view: View, instance: Instance, now: float) -> bool:
    """Whether its running calls could go on elsewhere now: it is engine-backed and resumable, has been ready for
    SETTLED_S, and nothing is being done to it."""
    if not instance.ready or not instance.running or instance.key in view.trials:
        return False
    if not instance.carries:
        return False
    since = instance.ready_at if instance.ready_at is not None else instance.placed
    return now - since >= SETTLED_S and _left_alone(view, instance.record.instance, now)


def _left_alone(view: View, name: str, now: float) -> bool:
    """Whether it is in no migration, nor was lately."""
    lately = (each for each in view.migrations.values() if each.ended is None or now - each.ended < SETTLED_S)
    return name not in view.moves and not any(name in (each.source, each.destination) for each in lately)


def under_way(view: View, request: Request) -> list[Move]:
    """Moves that make room for this version already."""
    return [move for move in view.moves.values() if move.by == request.key]


def quickest_move(moving: Moving, start: Start, best: float) -> tuple[float, Migrate] | None:
    """The server where it starts soonest after running instances were moved off it, if that is before ``best``. Looked
    for on the MOST_SERVERS where it would start soonest were they empty."""
    found: tuple[float, Migrate] | None = None
    limit, servers = best, moving.servers
    for guess, server in by_time(start, servers, servers.busy, 0.0, best)[:MOST_SERVERS]:
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
    running_s = moving.view.instances[name].busy_s(moving.now)
    return Move(name, target.server, target.seconds, moving.request.key, moving.now, running_s)


def fewest_removed(moving: Moving, start: Start, server: Server) -> tuple[str, ...]:
    """Instances of ``server`` that could be stopped so that it fits there: the fewest, those first that have worked
    least; empty if that does not help."""
    for lack in _lacks(moving, start.need, server):
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


def _lacks(moving: Moving, need: Need, server: Server) -> Iterator[Lack]:
    """By the rank of accelerators, where moving everything that can be moved would do."""
    asks = need.labels or need.container or need.python
    if asks and short(replace(need, memory=0, cpu=0.0, gpus=()), server.free):
        return
    now, view, servers = moving.now, moving.view, moving.servers
    there = [instance for instance in server.instances.values() if removable(view, instance, now)]
    there.sort(key=lambda instance: (instance.busy_s(now), instance.record.instance))
    needs = [servers.need(view, instance.key, instance.manifest) for instance in there]
    for kind, count in need.gpus or ((ANY_GPU, 0),):
        spare = sum(suits(gpu, kind, need.gpu_memory) for gpu in server.free.gpus)
        wanted, free = _amounts(need.memory, need.cpu, count), _amounts(server.free.memory, server.free.cpu, spare)
        lacking = tuple(want - have for want, have in zip(wanted, free, strict=True))
        useful = []
        for instance, its in zip(there, needs, strict=True):
            held = server.held.get(instance.record.instance, ())
            gives = _amounts(its.memory, its.cpu, sum(suits(gpu, kind, need.gpu_memory) for gpu in held))
            if _helps(gives, lacking):
                useful.append((instance, gives))
        if useful and all(sum(gives[k] for _, gives in useful) >= lack for k, lack in enumerate(lacking)):
            yield Lack(lacking, tuple(useful))


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
    """It with the servers it could go to: an instance of it is started there while it works on here. On accelerators of
    another kind the same model draws other tokens."""
    view, servers, key = moving.view, moving.servers, instance.key
    may = servers.may(view, key, moving.now)
    need = servers.need(view, key, instance.manifest)
    kinds = frozenset(gpu.kind for gpu in server.held.get(instance.record.instance, ()))
    model = view.model_of(key)
    resume = view.learned.resume_s(model.digest if model is not None else "", instance.busy_s(moving.now))
    start = Start(
        key, need, model, view.learned, lambda other: other is not server and kinds <= other.kinds and may(other)
    )
    rooms = quickest(start, servers, count, within - resume)
    targets = (
        Target(room.server.name, _amounts(need.memory, need.cpu, len(room.gpus)), room.estimate.seconds + resume)
        for room in rooms
    )
    return Movable(instance.record.instance, gives, tuple(targets))


def _free(server: Server) -> Amounts:
    """What it has left for instances that are moved to it. Accelerators of all kinds count alike: each target has been
    found to have its own."""
    return _amounts(server.free.memory, server.free.cpu, len(server.free.gpus))


def _amounts(memory: int, cpu: float, gpus: int) -> Amounts:
    return (memory, round(cpu * _MILLI), gpus)

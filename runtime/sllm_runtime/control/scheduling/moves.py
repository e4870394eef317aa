"""Which running instances to move off a server, and where to, so that something fits: the least migration time in all.

The dynamic programme of ServerlessLLM, section 6.2, with the places that the moved ones take counted as well. Pure
numbers: it knows neither functions nor nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Amounts: TypeAlias = tuple[int, ...]
"""How much of each resource, in an order that the caller has fixed: bytes, thousandths of a CPU, accelerators."""
MOST_MOVES: Final = 8
"""Instances that are considered for one search: as many as a server has accelerators. Those that are cheapest to move
come first."""


@dataclass(frozen=True, slots=True)
class Target:
    """A place that an instance can be moved to: it takes ``takes`` of ``server`` and the move lasts ``seconds``."""

    server: str
    takes: Amounts
    seconds: float


@dataclass(frozen=True, slots=True)
class Movable:
    """An instance that can be moved: what it gives back where it runs, and where it could go."""

    name: str
    gives: Amounts
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """Instance → target, and the sum of their seconds."""

    seconds: float
    chosen: tuple[tuple[str, Target], ...]


_State: TypeAlias = tuple[Amounts, tuple[tuple[str, Amounts], ...]]
"""What is still lacking, and what of which server the moves so far take."""


def search(lacking: Amounts, movable: Sequence[Movable], free: Mapping[str, Amounts]) -> Moves | None:
    """The moves of least total time that give ``lacking`` back. ``free``: what each target server has left. None:
    there are none. Exact for up to ``MOST_MOVES`` movable instances."""
    lacking = tuple(max(amount, 0) for amount in lacking)
    chosen = _considered(movable, free)
    states: dict[_State, Moves] = {(lacking, ()): Moves(0.0, ())}
    best: Moves | None = None if any(lacking) else Moves(0.0, ())
    for each in chosen:
        for (lack, used), before in tuple(states.items()):
            for target in each.targets:
                seconds = before.seconds + target.seconds
                if best is not None and seconds >= best.seconds:
                    break  # targets are sorted: the others take longer
                taken = _take(used, target, free)
                if taken is None:
                    continue
                state = (_less(lack, each.gives), taken)
                made = Moves(seconds, (*before.chosen, (each.name, target)))
                if not any(state[0]):
                    best = made
                elif state not in states or seconds < states[state].seconds:
                    states[state] = made
    return best


def _considered(movable: Iterable[Movable], free: Mapping[str, Amounts]) -> list[Movable]:
    """Those that can go somewhere, with as many servers as can matter: m instances take at most m - 1 others' places,
    so one of an instance's m quickest servers is always left to it."""
    able = []
    for each in movable:
        fitting = (target for target in each.targets if _fits(target.takes, free.get(target.server)))
        targets = tuple(sorted(fitting, key=lambda target: (target.seconds, target.server)))
        if targets:
            able.append(Movable(each.name, each.gives, targets))
    able.sort(key=lambda each: (each.targets[0].seconds, each.name))
    able = able[:MOST_MOVES]
    return [Movable(each.name, each.gives, _quickest(each.targets, len(able))) for each in able]


def _quickest(targets: Sequence[Target], servers: int) -> tuple[Target, ...]:
    """The targets on the first ``servers`` different servers."""
    names = list(dict.fromkeys(target.server for target in targets))[:servers]
    return tuple(target for target in targets if target.server in names)


def _fits(takes: Amounts, free: Amounts | None) -> bool:
    return free is not None and all(amount <= there for amount, there in zip(takes, free, strict=True))


def _less(lack: Amounts, gives: Amounts) -> Amounts:
    return tuple(max(amount - back, 0) for amount, back in zip(lack, gives, strict=True))


def _take(
    used: tuple[tuple[str, Amounts], ...], target: Target, free: Mapping[str, Amounts]
) -> tuple[tuple[str, Amounts], ...] | None:
    """``used`` with the target's place taken as well; None if that is more than there is."""
    taken = dict(used)
    before = taken.get(target.server)
    after = tuple(map(sum, zip(before, target.takes, strict=True))) if before else target.takes
    if not _fits(after, free[target.server]):
        return None
    taken[target.server] = after
    return tuple(sorted(taken.items()))

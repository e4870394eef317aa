"""The search for migrations, against trying everything."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.control.scheduling.moves import MOST_MOVES, Amounts, Movable, Target, search
from tests.fixtures.examples import examples

SERVERS = ("a", "b", "c")


def brute_force(lacking: Amounts, movable: Sequence[Movable], free: Mapping[str, Amounts]) -> float | None:
    """Every instance stays or goes to one of its targets that has room for it then."""
    if not movable:
        return 0.0 if all(amount <= 0 for amount in lacking) else None
    first, *rest = movable
    found = [brute_force(lacking, rest, free)]
    lack = tuple(amount - back for amount, back in zip(lacking, first.gives, strict=True))
    for target in first.targets:
        left = tuple(there - taken for there, taken in zip(free[target.server], target.takes, strict=True))
        if min(left) >= 0:
            others = brute_force(lack, rest, {**free, target.server: left})
            found.append(others if others is None else target.seconds + others)
    return min((seconds for seconds in found if seconds is not None), default=None)


def cluster(rng: random.Random) -> tuple[Amounts, list[Movable], dict[str, Amounts]]:
    """What is lacking, what may move, and what is free. Drawn by hand: thousands of them take a second or two."""

    def amounts() -> Amounts:
        return rng.randint(0, 3), rng.randint(0, 6)

    def targets() -> tuple[Target, ...]:
        servers = rng.sample(SERVERS, rng.randint(0, len(SERVERS)))
        return tuple(Target(server, amounts(), float(rng.randint(0, 20))) for server in servers)

    movable = [Movable(f"i{n}", amounts(), targets()) for n in range(rng.randint(0, MOST_MOVES))]
    return amounts(), movable, {server: amounts() for server in SERVERS}


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_the_search_finds_what_trying_everything_finds(seed: int) -> None:
    """On thirty clusters of each seed."""
    rng = random.Random(seed)
    for _ in range(30):
        lacking, movable, free = cluster(rng)
        found = search(lacking, movable, free)
        assert (found.seconds if found else None) == brute_force(lacking, movable, free), (lacking, movable, free)
        if found is None:
            continue
        gives = {each.name: each.gives for each in movable}
        assert len({name for name, _ in found.chosen}) == len(found.chosen)
        for k, amount in enumerate(lacking):
            assert sum(gives[name][k] for name, _ in found.chosen) >= amount
        for server, there in free.items():
            for k, amount in enumerate(there):
                assert sum(target.takes[k] for _, target in found.chosen if target.server == server) <= amount


def test_nothing_lacking_moves_nothing() -> None:
    found = search((0, 0), [Movable("i", (1, 1), (Target("a", (1, 1), 1.0),))], {"a": (1, 1)})
    assert found is not None
    assert not found.chosen


def test_two_that_want_the_same_place_share_out() -> None:
    here = Target("a", (1, 0), 1.0)
    movable = [Movable("x", (1, 0), (here, Target("b", (1, 0), 5.0))), Movable("y", (1, 0), (here,))]
    found = search((2, 0), movable, {"a": (1, 0), "b": (1, 0)})
    assert found is not None
    assert {name: target.server for name, target in found.chosen} == {"x": "b", "y": "a"}


def test_what_has_come_as_far_in_less_time_is_gone_on_from() -> None:
    """``x`` is looked at first, and gives as much as ``y``, which goes to ``b`` sooner; ``z`` has to go to ``a``."""
    movable = [
        Movable("x", (1,), (Target("a", (1,), 1.0), Target("b", (1,), 10.0))),
        Movable("y", (1,), (Target("b", (1,), 3.0),)),
        Movable("z", (2,), (Target("a", (1,), 5.0),)),
    ]
    found = search((3,), movable, {"a": (1,), "b": (1,)})
    assert found is not None
    assert ({name for name, _ in found.chosen}, found.seconds) == ({"y", "z"}, 8.0)


def test_of_more_than_are_looked_at_the_quickest_to_move_are() -> None:
    movable = [Movable(f"i{n:02}", (1,), (Target("a", (1,), float(20 - n)),)) for n in range(MOST_MOVES + 4)]
    found = search((2,), movable, {"a": (20,)})
    assert found is not None
    assert {name for name, _ in found.chosen} == {"i10", "i11"}

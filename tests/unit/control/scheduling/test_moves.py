"""The search for migrations, against trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.control.scheduling.moves import Amounts, Movable, Target, search
from tests.fixtures.examples import examples

SERVERS = ("a", "b", "c")


def brute_force(lacking: Amounts, movable: Sequence[Movable], free: Mapping[str, Amounts]) -> float | None:
    """Every instance stays or goes to one of its targets."""
    best: float | None = None
    for choice in itertools.product(*((None, *each.targets) for each in movable)):
        left = {server: list(amounts) for server, amounts in free.items()}
        lack, seconds = list(lacking), 0.0
        for each, target in zip(movable, choice, strict=True):
            if target is None:
                continue
            seconds += target.seconds
            lack = [amount - back for amount, back in zip(lack, each.gives, strict=True)]
            left[target.server] = [a - b for a, b in zip(left[target.server], target.takes, strict=True)]
        fits = all(amount >= 0 for amounts in left.values() for amount in amounts)
        if fits and all(amount <= 0 for amount in lack) and (best is None or seconds < best):
            best = seconds
    return best


amounts = st.tuples(st.integers(0, 3), st.integers(0, 6))
targets = st.builds(Target, st.sampled_from(SERVERS), amounts, st.integers(0, 20).map(float))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Amounts, list[Movable], dict[str, Amounts]]:
    count = draw(st.integers(0, 5))
    movable = [
        Movable(f"i{n}", draw(amounts), tuple(draw(st.lists(targets, max_size=4, unique_by=lambda t: t.server))))
        for n in range(count)
    ]
    return draw(amounts), movable, {server: draw(amounts) for server in SERVERS}


@settings(max_examples=examples(3000))
@given(clusters())
def test_the_search_finds_what_trying_everything_finds(
    cluster: tuple[Amounts, list[Movable], dict[str, Amounts]],
) -> None:
    lacking, movable, free = cluster
    found = search(lacking, movable, free)
    assert (found.seconds if found else None) == brute_force(lacking, movable, free)
    if found is None:
        return
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

"""What was learned outlives its controller."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control.scheduling.learned import Learned, Recent
from sllm_runtime.control.scheduling.line import NO_MOVES, Line
from sllm_runtime.control.scheduling.remembered import MOST, learned, record
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.limits import MAX_MESSAGE
from sllm_runtime.protocol.records import LearnedRecord

micros = st.integers(0, 10**9).map(lambda number: number / 1e6)
versions = st.tuples(st.sampled_from(["chat", "coder"]), st.integers(1, 3))
recents = st.lists(micros, min_size=1, max_size=9).map(lambda seconds: Recent.of(tuple(seconds)))
lines = st.builds(lambda x, y: NO_MOVES.after(x, y).after(x + 1.0, y), micros, micros)


def least(known: float, *recents: Recent) -> float:
    return min(known, *(min(recent.seconds) for recent in recents), known)


@st.composite
def known(draw: st.DrawFn) -> Learned:
    sandbox = draw(st.dictionaries(st.tuples(st.sampled_from(["n1", "n2"]), st.booleans()), recents))
    release = draw(st.dictionaries(st.none() | versions, recents))
    tiers = st.sampled_from(["none", "dram", "ssd", "remote"])
    fresh = Learned()
    return Learned(
        sandbox=sandbox,
        disk=draw(st.dictionaries(st.sampled_from(["", "n1", "n2"]), recents)),
        imports=draw(st.dictionaries(versions, recents)),
        setup=draw(st.dictionaries(versions, recents)),
        rest=draw(st.dictionaries(st.tuples(st.none() | versions, tiers), recents)),
        lead=draw(st.dictionaries(st.tuples(st.none() | versions, tiers), recents)),
        release=release,
        moves=draw(st.dictionaries(st.sampled_from(["sha256:a", "sha256:b"]), lines)),
        least=least(fresh.least, *sandbox.values()),
        least_release=least(fresh.least_release, *release.values()),
    )


@given(known())
def test_all_of_it_is_as_it_was(before: Learned) -> None:
    """But how often versions were started, which is kept as their models' popularity."""
    stored = codec.from_json(LearnedRecord, codec.to_json(record(replace(before, starts={("chat", 1): 3}))))
    assert learned(stored) == before


def test_it_fits_one_message_and_the_newest_are_kept() -> None:
    rng = random.Random(1)
    many = {(f"{number:063}", 1): Recent.of(tuple(rng.uniform(10, 99) for _ in range(9))) for number in range(MOST + 9)}
    moves = {f"sha256:{number:064}": Line(*(rng.random() for _ in range(7))) for number in range(MOST + 9)}
    released: dict[tuple[str, int] | None, Recent] = dict(many.items())
    most = Learned(
        sandbox={(f"{number:063}", True): recent for number, recent in enumerate(many.values())},
        disk={f"{number:063}": recent for number, recent in enumerate(many.values())},
        imports=many,
        setup=many,
        rest={(key, "remote"): recent for key, recent in many.items()},
        lead={(key, "remote"): recent for key, recent in many.items()},
        release=released,
        calls=many,
        moves=moves,
    )
    stored = record(most)
    assert len(codec.to_json(stored)) < MAX_MESSAGE
    assert [each.function for each in stored.imports] == [f"{number:063}" for number in range(9, MOST + 9)]

"""Plans of which each looks for so many places only, and who has its turn in which."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control import migration
from sllm_runtime.control.changes import touched
from sllm_runtime.control.placement import Decision, Request
from sllm_runtime.control.plan import Context, Plan, plan
from sllm_runtime.control.routes import answer, so_far
from sllm_runtime.control.scheduling.policies import StartupTime
from sllm_runtime.control.turns import FIRST, MOST, Turns
from sllm_runtime.control.view import NOT_YET, Claim, Key, Refusal, View
from sllm_runtime.protocol.ctl import Acquire
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node

M = model("m", 2 * GB)
CLAIMED = "busy-on-near-0"


@dataclass
class Asked:
    """The default policy, which remembers for whom it was asked."""

    policy: StartupTime = field(default_factory=StartupTime)
    keys: list[Key] = field(default_factory=list)

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        self.keys.append(request.key)
        return self.policy.place(request, view, now, rng)


def planned(view: View, now: float = NOW) -> tuple[Plan, list[Key]]:
    asked = Asked()
    return plan(view, Context(now=now, wall=0.0, policy=asked, rng=random.Random(len(view.instances)))), asked.keys


def crowded(count: int, **fields: Any) -> View:
    """So many versions of which each lacks an instance, and one accelerator, which works."""
    view = function(cluster(node("near", models=(M.digest,)), models=(M,)), "busy")[0]
    view = idle(view, "busy", "near", running=1)
    for number in range(count):
        view = function(view, f"f{number:03}", **fields)[0].put_waiting((f"f{number:03}", 1), "gw", 1)
    return view


def names(first: int, end: int) -> list[Key]:
    return [(f"f{number:03}", 1) for number in range(first, end)]


def test_each_plan_looks_for_so_many_places_until_all_have_had_their_turn() -> None:
    view, rest = crowded(150), MOST - FIRST
    made, asked = planned(view)
    assert (asked, made.more) == (names(0, MOST), True)
    assert made.view.pending.keys() | made.view.unlooked == {*names(0, 150)}, "who asks is told that it waits"
    assert made.view.unlooked == {*names(MOST, 150)}
    assert made.view.why(("f149", 1)) == NOT_YET
    last = MOST
    while made.more:
        made, asked = planned(made.view)
        assert asked == names(0, FIRST) + names(last, min(last + rest, 150)), "who comes first, and whose turn it is"
        last += rest
    assert last >= 150
    assert not made.view.unlooked
    assert not made.view.looked
    assert planned(made.view)[1] == names(0, MOST), "and again"


def test_that_it_was_not_its_turn_is_no_answer() -> None:
    """A gateway that is told that nothing can be started sends callers away."""
    last: Key = ("f149", 1)
    asks = Acquire(function=last[0], version=last[1], gateway="gw", waiting=1, pending=False)
    made = planned(crowded(150))[0]
    assert made.view.why(last) == NOT_YET
    assert answer(made.view, asks, NOW) is None
    assert so_far(made.view, asks).pending == ""
    while last in made.view.unlooked:
        before, made = made.view, planned(made.view)[0]
    told = answer(made.view, asks, NOW)
    assert told is not None
    assert told.pending.startswith("all capacity is in use")
    assert last[0] in touched(before, made.view), "who waits is woken"


def test_who_comes_where_the_first_places_end_is_looked_at_as_often_as_who_comes_behind() -> None:
    turns: Turns[int] = Turns(View(), frozenset())
    turns.looked(0, FIRST - 1)
    assert turns.places(1) == MOST - FIRST
    turns.looked(1)
    assert turns.places(2) == MOST - FIRST
    again: Turns[int] = Turns(View(), frozenset({1}))
    again.looked(0, FIRST - 1)
    assert again.places(1) == 1, "it has had its turn"


def test_few_are_all_looked_at_in_each_plan() -> None:
    view = crowded(MOST)
    for _ in range(3):
        made, asked = planned(view)
        assert (asked, made.more) == (names(0, MOST), False)
        view = made.view


def test_who_is_decided_about_twice_has_two_of_the_places() -> None:
    """Where a start of it has failed is asked, too, where no other node has room."""
    view = crowded(MOST)
    bars = {(key, "near"): Refusal(NOW + 60.0, "a start failed there", yields=NOW) for key in names(0, MOST)}
    _, asked = planned(replace(view, refused=bars))
    assert asked == [key for key in names(0, MOST // 2) for _ in range(2)]


def test_who_comes_first_does_not_wait_for_its_turn() -> None:
    made, _ = planned(crowded(150))
    view = function(made.view, "urgent", priority=10)[0].put_waiting(("urgent", 1), "gw", 1)
    made, asked = planned(view)
    assert asked[0] == ("urgent", 1)


def waits_for_its_place(count: int) -> View:
    """``late``, which has been looked at last of more than a plan looks at, waits for the end of a call."""
    view = crowded(count)
    view = function(view, "late", M)[0].put_waiting(("late", 1), "gw", 1)
    view = replace(view, learned=view.learned.called(("busy", 1), 0.5))
    view = replace(view, versions={key: each for key, each in view.versions.items() if key[0] in ("busy", "late")})
    made, asked = planned(view)
    assert asked == [("late", 1)]
    assert made.view.claims[CLAIMED].by == ("late", 1)
    return made.view


def beside(view: View, count: int) -> View:
    """With so many that have waited for longer."""
    crowd = crowded(count)
    return replace(view, versions={**crowd.versions, **view.versions}, functions={**crowd.functions, **view.functions})


def test_who_is_passed_goes_on_waiting_for_what_it_waited_for() -> None:
    waited = waits_for_its_place(MOST)
    view = beside(waited, MOST)
    urgent = {key: replace(waited.put_off[("late", 1)], since=NOW - 9) for key in names(0, MOST)}
    view = replace(view, put_off={**view.put_off, **urgent})
    made, asked = planned(view, NOW + 1)
    assert asked == names(0, MOST)
    assert made.view.claims == {CLAIMED: waited.claims[CLAIMED]}
    assert made.view.why(("late", 1)) == waited.why(("late", 1)) != NOT_YET
    assert made.view.put_off[("late", 1)].last == NOW + 1, "it has not given up"
    assert planned(made.view, NOW + 1)[1] == [*names(0, FIRST), ("late", 1)]


def test_who_comes_before_takes_the_place_that_one_who_is_passed_had_claimed() -> None:
    view = waits_for_its_place(MOST)
    view = beside(view, MOST)
    urgent = {key: replace(view.put_off[("late", 1)], since=NOW - 9) for key in names(0, MOST)}
    view = function(replace(view, put_off={**view.put_off, **urgent}), "urgent", M, priority=1)[0]
    made, asked = planned(view.put_waiting(("urgent", 1), "gw", 1))
    assert ("late", 1) not in asked
    assert made.view.claims[CLAIMED].by == ("urgent", 1)


def test_what_is_claimed_of_an_instance_that_has_gone_is_forgotten() -> None:
    view = waits_for_its_place(MOST)
    turns: Turns[Key] = Turns(view, frozenset(), most=0, first=0)
    assert turns.places(("late", 1)) == 0
    _, after = turns.passed(replace(view, instances=view.instances.without([CLAIMED]), claims={}))
    assert not after.claims


def test_of_a_version_that_wants_many_the_next_plan_starts_more() -> None:
    view = cluster(*(node(f"n{number}", gpus=8) for number in range(20)))
    view = function(view, "wide", min_instances=100, max_instances=100)[0]
    view = function(view, "other")[0].put_waiting(("other", 1), "gw", 1)
    counts, more = [], True
    while more:
        made, _ = planned(view)
        view, more = made.view, made.more
        counts.append(len(view.of(("wide", 1))))
        assert len(view.of(("other", 1))) == 1, "another one has its turn"
    assert counts[-1] == 100
    assert all(after - before <= MOST for before, after in zip([0, *counts], counts, strict=False))


def test_of_what_lacks_a_place_however_many_no_plan_follows_at_once_for_ever() -> None:
    view, plans = crowded(1, concurrency=1, max_instances=500).put_waiting(("f000", 1), "gw", 400), 0
    made = planned(view)[0]
    while made.more and plans < 20:
        made, plans = planned(made.view)[0], plans + 1
    assert plans < 20


@given(
    wanted=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    most=st.integers(2, 8),
    first=st.integers(0, 4),
    shuffled=st.randoms(use_true_random=False),
)
def test_everybody_has_its_turn(wanted: list[int], most: int, first: int, shuffled: random.Random) -> None:
    """In whatever order they come in each plan: nobody is looked at again, but for those that come first, before all
    have been, and no plan looks for more places than it may."""
    first = min(first, most - 1)
    left, taken = set(range(len(wanted))), frozenset[int]()
    for _ in range(len(wanted) * 5 + 1):
        turns = Turns(View(), taken, most=most, first=first)
        order, made = list(range(len(wanted))), 0
        shuffled.shuffle(order)
        for who in order:
            places = turns.places(who)
            if not places:
                continue
            assert made < first or who not in taken
            count = min(places, wanted[who])
            turns.looked(who, count)
            made += count
            left.discard(who)
        assert made <= most
        passed, _ = turns.passed(View())
        assert len(passed) + len({who for who in order if who not in passed}) == len(order)
        taken = turns.taken
        if not turns.more:
            break
    assert not left
    assert not taken


def test_migrations_have_their_turns_too() -> None:
    """Those of a plan that looks for fewer places than they need: each is asked about, and its claims are kept."""
    view = replace(View(), claims={"x": Claim(1.0, "source")}, instances=waits_for_its_place(1).instances)
    view = replace(view, claims={CLAIMED: Claim(1.0, "source")})
    turns: Turns[str] = Turns(view, frozenset(), most=1, first=0)
    assert turns.places("other") == 1
    turns.looked("other")
    assert turns.places("source") == 0
    assert turns.more
    who, after = turns.passed(replace(view, claims={}))
    assert (who, after.claims) == (["source"], view.claims)
    assert turns.taken == {"other"}


def test_a_plan_looks_for_so_many_places_of_migrations() -> None:
    """Of which each looks for its own: the rest in turn, and who is passed keeps what it has claimed."""
    count = MOST + 6
    view = cluster(node("late"), *(node(f"n{number}") for number in range(count)), models=(M,))
    view = function(view, "chat", M, engine=True, model="/m", max_instances=count)[0]
    for number in range(count):
        view = idle(view, "chat", f"n{number}", running=1, carries=True)
    sources = list(view.instances)
    view = function(view, "other", M)[0]
    view = idle(view, "other", "late", running=1)
    for source in sources:
        view = migration.ask(view, source, "", NOW)
    held = "other-on-late-0"
    view = replace(view, claims={held: Claim(inf, sources[-1])})
    made, asked = planned(view)
    assert asked == [("chat", 1)] * MOST
    assert made.view.looked_for == {*sources[:MOST]}
    assert made.more
    assert made.view.claims[held].by == sources[-1]
    made, asked = planned(made.view)
    assert asked == [("chat", 1)] * (FIRST + 6)
    assert not made.view.looked_for
    assert not made.more

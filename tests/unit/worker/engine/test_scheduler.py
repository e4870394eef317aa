"""Scheduler and pages: no page is lost, nobody starves, every bound holds, whatever comes in whatever order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sllm_runtime.protocol.errors import QueueFull
from sllm_runtime.worker.engine.ours.pages import PAGE, ROOT, Pages, page_hash, pages_for
from sllm_runtime.worker.engine.ours.scheduler import STARVED, TRANSITIONS, Limits, Scheduler, Sequence, State
from tests.unit.worker.engine.driver import request


def step(scheduler: Scheduler) -> list[Any]:
    """Compute a step; those that sample get a token."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        sequence = chunk.sequence
        assert chunk.start == sequence.computed
        assert chunk.count > 0
        assert pages_for(chunk.start + chunk.count) <= len(sequence.pages)
        scheduler.computed(chunk)
        if chunk.samples:
            sequence.tokens.append(len(sequence.tokens))
    return chunks


class Machine(RuleBasedStateMachine):
    @initialize(total=st.integers(4, 12), running=st.integers(1, 5), prefill=st.integers(1, 300))
    def begin(self, total: int, running: int, prefill: int) -> None:
        limits = Limits(running=running, waiting=6, prefill=prefill, quantum=max(1, prefill // 2))
        self.scheduler = Scheduler(Pages(total), limits)
        self.most = total * PAGE
        self.all: list[Sequence] = []

    @rule(size=st.integers(1, 500), kind=st.integers(0, 1), held=st.booleans())
    def add(self, size: int, kind: int, held: bool) -> None:
        prompt = [kind, *range(1, min(size, self.most - 1))]  # many share a prefix
        if len(self.scheduler.waiting) >= 6:
            with pytest.raises(QueueFull):
                self.scheduler.add(request(len(self.all), prompt))
        else:
            self.all.append(self.scheduler.add(replace(request(len(self.all), prompt), held=held)))

    @rule(at=st.integers(0, 10), count=st.integers(1, 40))
    def feed(self, at: int, count: int) -> None:
        alive = [each for each in self.all if each.state is not State.DONE and len(each.tokens) + count < self.most]
        if alive:
            sequence = alive[at % len(alive)]
            self.scheduler.feed(sequence, tuple(range(len(sequence.tokens), len(sequence.tokens) + count)))

    @rule(at=st.integers(0, 10))
    def release(self, at: int) -> None:
        alive = [sequence for sequence in self.all if sequence.state is not State.DONE]
        if alive:
            self.scheduler.release(alive[at % len(alive)])

    @rule(at=st.integers(0, 10))
    def hold(self, at: int) -> None:
        alive = [sequence for sequence in self.all if sequence.state is not State.DONE]
        if alive:
            self.scheduler.hold(alive[at % len(alive)])

    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.busy:
                chunks = step(self.scheduler)
                assert chunks or not self.scheduler.busy, "there is work, and no step does any"
                assert not any(chunk.samples and chunk.sequence.held for chunk in chunks), "it is held"
                assert len({chunk.sequence.request.id for chunk in chunks}) == len(chunks)
                prefilled = sum(chunk.count for chunk in chunks if chunk.count > 1)
                assert prefilled <= self.scheduler.limits.prefill
            for sequence in list(self.scheduler.running):
                if sequence.produced >= 30 or len(sequence.tokens) >= self.most:
                    self.scheduler.remove(sequence)

    @rule(at=st.integers(0, 10))
    def cancel(self, at: int) -> None:
        alive = [sequence for sequence in self.all if sequence.state is not State.DONE]
        if alive:
            self.scheduler.remove(alive[at % len(alive)])

    @rule()
    def sleep(self) -> None:
        self.scheduler.preempt_all()
        self.scheduler.pages.drop_cached()
        assert self.scheduler.pages.available == self.scheduler.pages.total

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert len(self.scheduler.running) <= self.scheduler.limits.running
            held = [sequence for sequence in self.scheduler.running if sequence.state is State.HELD]
            assert all(each.held and each.wanted <= each.computed + 1 <= len(each.tokens) + 1 for each in held)
            if not self.scheduler.busy:
                left = {sequence.state for sequence in self.all}
                assert left <= {State.HELD, State.WAITING, State.DONE}
                assert State.HELD in left or State.WAITING not in left, "somebody waits for nobody"

    def teardown(self) -> None:
        """Whatever was queued comes to its end, when it is let."""
        if hasattr(self, "scheduler"):
            for sequence in self.all:
                if sequence.state is not State.DONE:
                    self.scheduler.release(sequence)
            for _ in range(20_000):
                if not self.scheduler.busy:
                    break
                self.steps(1)
            assert all(sequence.state is State.DONE for sequence in self.all)
            assert self.scheduler.pages.held == 0


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestScheduler = Machine.TestCase


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    scheduler = Scheduler(Pages(100), Limits(prefill=64, quantum=32))
    long, short = scheduler.add(request(1, range(5000))), scheduler.add(request(2, range(7000, 7030)))
    step(scheduler)
    step(scheduler)
    assert short.produced >= 1
    assert long.produced == 0
    while not long.produced:
        assert next(chunk.sequence for chunk in step(scheduler)) is short, "decodes never wait"


def test_a_short_prompt_is_not_stuck_behind_several_long_ones() -> None:
    """Together they would take all of each step."""
    scheduler = Scheduler(Pages(200), Limits(prefill=64, quantum=32))
    long = [scheduler.add(request(number, range(5000 * number, 5000 * number + 3000))) for number in range(3)]
    for _ in range(12):
        step(scheduler)
    short = scheduler.add(request(9, range(90_000, 90_030)))
    step(scheduler)
    assert short.produced == 1
    assert not any(each.produced for each in long)


def test_long_prompts_that_come_together_are_done_one_after_the_other() -> None:
    """Turn by turn all of them would be done at the end."""
    scheduler = Scheduler(Pages(200), Limits(prefill=64, quantum=32))
    long = [scheduler.add(request(number, range(5000 * number, 5000 * number + 960))) for number in range(6)]
    done = [0] * len(long)
    for number in range(1, 200):
        step(scheduler)
        done = [at or (number if each.produced else 0) for at, each in zip(done, long, strict=True)]
    assert done == sorted(done)
    assert sum(done) / len(done) < 0.8 * max(done)


def test_a_long_prompt_has_a_chunk_in_every_second_step_once_it_was_passed() -> None:
    """Those that have less left, and come without end, would take all of each (0064)."""
    scheduler = Scheduler(Pages(200), Limits(prefill=64, quantum=32))
    long, short = scheduler.add(request(0, range(3000))), list[Sequence]()
    step(scheduler)
    steps = 4 * STARVED
    for number in range(1, steps):
        first = 10_000 + 100 * number
        short += [scheduler.add(request(number, range(at, at + 32))) for at in (first, first + 50)]
        step(scheduler)
        if number < STARVED - 1:
            assert long.computed == 64, "the others take all"
        for each in [each for each in short if each.produced]:
            scheduler.remove(each)
            short.remove(each)
    chunks = (long.computed - 64) // 32
    assert (steps - STARVED) // 2 - 1 <= chunks <= (steps - STARVED) // 2 + 1, chunks


def beside_callers(steps: int, coming: dict[int, tuple[int, int]], most: int = 60) -> list[Sequence]:
    """``most`` callers that ask for 200 tokens again as soon as they are answered: their prompts alone are all that a
    step computes. ``coming``: the prompts that come in a step, by number and length; until the last has its first
    token."""
    scheduler, asked, callers, others = Scheduler(Pages(40_000), Limits()), 0, list[Sequence](), list[Sequence]()
    for taken in range(steps):
        while len(callers) < most:
            asked += 1
            callers.append(scheduler.add(request(asked, range(1000 * asked, 1000 * asked + 200))))
        if taken in coming:
            number, length = coming[taken]
            others.append(scheduler.add(request(10**6 + number, range(number * 10**8, number * 10**8 + length))))
        step(scheduler)
        for each in [each for each in callers if each.produced >= 30]:
            scheduler.remove(each)
            callers.remove(each)
        if len(others) == len(coming) and others[-1].produced:
            break
    return others


def test_many_callers_with_short_prompts_do_not_keep_a_long_one_from_its_first_token() -> None:
    (long,) = beside_callers(400, {100: (1, 8000)})
    assert long.produced, f"{long.computed} of its 8000 tokens in 300 steps"


def test_a_prompt_of_some_length_does_not_wait_until_a_very_long_one_is_done() -> None:
    """Both are passed by the callers; one has three chunks left, the other 250."""
    _, some = beside_callers(360, {100: (1, 32_000), 160: (2, 300)})
    assert some.produced, f"{some.computed} of its 300 tokens in 200 steps"


def test_one_between_is_not_passed_by_both() -> None:
    """Among those that the callers pass are always one of 32,000, which was passed for longest, and one of 300, which
    has the least left; one of 3,000 is neither."""
    fresh = {step: (number, 300) for number, step in enumerate(range(60, 760, 4), 3)}
    _, between, *_ = beside_callers(760, {40: (1, 32_000), 50: (2, 3000), **fresh}, most=50)
    assert between.produced, f"{between.computed} of its 3000 tokens in 710 steps"


def test_who_begins_takes_no_page_that_those_before_will_need() -> None:
    scheduler = Scheduler(Pages(5), Limits(prefill=2 * PAGE, quantum=PAGE))
    first, second = (scheduler.add(request(at, range(9000 * at, 9000 * at + 3 * PAGE - 5))) for at in range(2))
    while not first.produced:
        step(scheduler)
        assert second.state is State.WAITING
    scheduler.remove(first)
    while not second.produced:
        step(scheduler)
    assert scheduler.preempted == 0


def test_the_youngest_gives_its_pages_up_and_comes_back_first() -> None:
    scheduler = Scheduler(Pages(4), Limits(prefill=1000, quantum=1000))
    old, young = scheduler.add(request(1, range(2 * PAGE))), scheduler.add(request(2, range(1000, 1000 + 2 * PAGE - 5)))
    later = scheduler.add(request(3, range(5)))
    step(scheduler)
    step(scheduler)
    assert young.state is State.WAITING
    assert list(scheduler.waiting) == [young, later]
    assert scheduler.preempted == 1
    assert old.produced == 2
    scheduler.remove(old)
    chunks = step(scheduler)
    assert {chunk.sequence: chunk.start for chunk in chunks} == {young: PAGE, later: 0}, (
        "its first page was still there"
    )
    assert young.cached == 0, "it computed that itself"


@pytest.mark.parametrize("retell", [False, True])
def test_what_is_held_is_computed(retell: bool) -> None:
    """Also what it is fed; nothing is to be done then, until it is released. But for its last token, where that row is
    to tell of the next one's probability."""
    scheduler = Scheduler(Pages(4), Limits(prefill=64))
    sequence = scheduler.add(replace(request(1, range(100)), held=True, retell=retell))
    assert [chunk.count for _ in range(2) for chunk in step(scheduler)] == [64, 36 - retell]
    assert (sequence.state, scheduler.busy, scheduler.rested()) == (State.HELD, False, [sequence])
    scheduler.feed(sequence, (100, 101, 102))
    at = 100 - retell
    assert (scheduler.busy, [(chunk.start, chunk.count) for chunk in step(scheduler)]) == (True, [(at, 3)])
    assert (sequence.state, scheduler.busy, scheduler.rested()) == (State.HELD, False, [sequence])
    scheduler.feed(sequence, (103, 104))
    scheduler.release(sequence)
    assert [(chunk.start, chunk.count) for chunk in step(scheduler)] == [(at + 3, 2 + retell)]
    assert (sequence.state, sequence.produced, scheduler.rested()) == (State.DECODE, 6, []), "five fed, one drawn"


def test_what_was_held_and_is_fed_nothing_draws_from_its_last_row() -> None:
    scheduler = Scheduler(Pages(4), Limits())
    sequence = scheduler.add(replace(request(1, range(100)), held=True))
    step(scheduler)
    scheduler.feed(sequence, ())
    assert not scheduler.busy
    scheduler.release(sequence)
    assert [(chunk.start, chunk.count) for chunk in step(scheduler)] == [(99, 1)]
    assert (sequence.state, sequence.produced) == (State.DECODE, 1)


def test_what_is_held_while_it_draws_draws_no_more() -> None:
    scheduler = Scheduler(Pages(4), Limits())
    sequence, other = scheduler.add(request(1, range(100))), scheduler.add(request(2, range(9)))
    step(scheduler)
    scheduler.hold(sequence)
    assert [chunk.sequence for chunk in step(scheduler)] == [other]
    assert (sequence.state, sequence.produced, scheduler.rested()) == (State.HELD, 1, [sequence])
    scheduler.release(sequence)
    assert [chunk.sequence for chunk in step(scheduler)] == [sequence, other]
    assert (sequence.state, sequence.produced) == (State.DECODE, 2)


def test_what_is_held_in_a_step_takes_what_that_draws() -> None:
    scheduler = Scheduler(Pages(4), Limits())
    sequence = scheduler.add(request(1, range(100)))
    (chunk,) = scheduler.schedule(2)
    scheduler.computed(chunk)
    scheduler.hold(sequence)
    assert (scheduler.schedule(2), sequence.state) == ([], State.DECODE)
    sequence.tokens.append(100)
    assert (scheduler.schedule(2), sequence.state, scheduler.busy) == ([], State.HELD, False)


def test_what_is_held_when_nothing_else_is_left_to_prefill_rests() -> None:
    scheduler = Scheduler(Pages(4), Limits(prefill=99))
    sequence = scheduler.add(replace(request(1, range(100)), retell=True))
    step(scheduler)
    assert sequence.state is State.PREFILL
    scheduler.hold(sequence)
    assert (sequence.state, scheduler.busy, scheduler.rested()) == (State.HELD, False, [sequence])


def test_one_that_is_let_before_it_is_told_of_does_not_rest() -> None:
    scheduler = Scheduler(Pages(4), Limits(prefill=99))
    sequence = scheduler.add(replace(request(1, range(100)), retell=True))
    step(scheduler)
    scheduler.hold(sequence)
    scheduler.release(sequence)
    assert (sequence.state, scheduler.rested()) == (State.DECODE, []), "it draws on"


def test_who_comes_when_all_others_are_held_is_computed() -> None:
    """The last step had nothing to do, and nobody lets them: nothing else makes it look again."""
    scheduler = Scheduler(Pages(4), Limits())
    held = scheduler.add(request(1, range(100)))
    step(scheduler)
    scheduler.hold(held)
    assert (step(scheduler), held.state, scheduler.busy) == ([], State.HELD, False)
    comes = scheduler.add(request(2, range(9)))
    assert scheduler.busy
    assert [chunk.sequence for chunk in step(scheduler)] == [comes]


def test_a_prompt_of_one_token_is_held_before_any_step() -> None:
    scheduler = Scheduler(Pages(4), Limits())
    sequence = scheduler.add(replace(request(1, [5]), held=True, retell=True))
    assert (scheduler.schedule(), scheduler.rested(), scheduler.busy) == ([], [sequence], False)
    scheduler.release(sequence)
    step(scheduler)
    assert sequence.produced == 1


def test_who_waits_for_the_room_of_one_that_is_held_is_not_looked_at_again_and_again() -> None:
    scheduler = Scheduler(Pages(1), Limits())
    held, waits = scheduler.add(replace(request(1, range(9)), held=True)), scheduler.add(request(2, range(50, 59)))
    step(scheduler)
    assert scheduler.schedule() == []
    assert (held.state, waits.state, scheduler.busy) == (State.HELD, State.WAITING, False)
    scheduler.remove(held)
    assert scheduler.busy
    assert [chunk.sequence for chunk in step(scheduler)] == [waits]


def test_a_state_moves_only_as_the_table_says() -> None:
    sequence = Scheduler(Pages(1), Limits()).add(request(1))
    with pytest.raises(ValueError, match="cannot go from waiting to decode"):
        sequence.move(State.DECODE)
    assert set(TRANSITIONS) == set(State)


def test_least_recently_used_pages_go_first() -> None:
    pages = Pages(3)
    tokens = list(range(2 * PAGE + 1))
    first = page_hash(ROOT, tokens[:PAGE])
    keys = [first, page_hash(first, tokens[PAGE : 2 * PAGE])]
    held = [pages.take(), pages.take()]
    assert held == [0, 1]
    pages.keep(0, first)
    pages.keep(1, keys[1])
    pages.release([0, 1])
    assert (pages.cached, pages.held) == (2, 0)
    assert list(Sequence(request(1, tokens), tokens).lacking()) == keys
    assert pages.find(keys) == [0, 1]
    whole = Sequence(request(2, tokens[: 2 * PAGE]), tokens[: 2 * PAGE])
    assert pages.find(whole.lacking()) == [0], "one token at least is computed"
    pages.release([0, 1])
    pages.release([0])
    assert [pages.take(), pages.take()] == [2, 1], "free ones first, then a sequence's end before its beginning"
    assert pages.find(keys) == [0]
    assert pages.take() is None


def test_those_that_come_together_compute_what_they_share_once() -> None:
    scheduler = Scheduler(Pages(4000), Limits())
    common = range(24 * PAGE)
    for number in range(48):
        scheduler.add(request(number, [*common, 10_000 + number]))
    computed = 0
    while not all(each.produced for each in [*scheduler.running, *scheduler.waiting]):
        computed += sum(chunk.count for chunk in step(scheduler))
    assert computed < 3 * len(common) + 48 * 40, computed


@pytest.mark.parametrize("long", [3, 30, 62])
def test_a_short_prompt_passes_any_number_of_long_ones(long: int) -> None:
    for at in (10, 40, 70, 100):
        scheduler = Scheduler(Pages(100_000), Limits())
        for number in range(long):
            scheduler.add(request(number, range(100_000 * number, 100_000 * number + 150 * PAGE)))
        for _ in range(at):
            step(scheduler)
        short, taken = scheduler.add(request(999, range(9_000_000, 9_000_030))), 0
        while not short.produced:
            step(scheduler)
            taken += 1
        assert taken <= 2, (at, taken)


def test_who_gave_its_pages_up_before_it_computed_any_has_found_what_it_finds() -> None:
    scheduler = Scheduler(Pages(40), Limits(prefill=PAGE, quantum=PAGE))
    scheduler.add(request(1, range(10 * PAGE)))
    second = scheduler.add(request(2, [*range(10 * PAGE), 5]))
    while second.state is State.WAITING:
        assert second not in [chunk.sequence for chunk in step(scheduler)]
    scheduler.preempt_all()
    computed = 0
    while not second.produced:
        computed += sum(chunk.count for chunk in step(scheduler) if chunk.sequence is second)
    assert second.cached == len(second.request.prompt) - computed, (second.cached, computed)

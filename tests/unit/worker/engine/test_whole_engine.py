"""The whole engine against a plain model: a runner whose K and V are the hashes of what stands before. Whatever is
asked in whatever order, every row sees what its own tokens would have made, and every id is told once."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sllm_runtime.protocol.errors import QueueFull
from sllm_runtime.worker.engine.base import Event, Request
from sllm_runtime.worker.engine.ours.batch import decodes_first
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.pages import PAGE
from sllm_runtime.worker.engine.ours.runner import sampled
from sllm_runtime.worker.engine.ours.scheduler import Limits, State
from sllm_runtime.worker.engine.sampling import reported
from tests.unit.worker.engine.driver import request

V = 24
EOS = 0
ROOTS = {None: 11, "one": 12, "two": 13}


@cache
def row(state: int) -> Any:
    made = np.random.default_rng(state & (2**63 - 1)).standard_normal(V).astype(np.float32)
    made[EOS] -= 1.2
    return made


def after(state: int, token: int) -> int:
    return hash((state, token))


class Lora:
    def get(self, name: str | None) -> Any:
        return None if name is None else SimpleNamespace(root=name.encode(), name=name)


class Kv:
    def __init__(self, pages: int) -> None:
        self.at: list[list[int | None]] = [[None] * PAGE for _ in range(pages)]

    def clear(self, page: int) -> None:
        self.at[page] = [None] * PAGE

    def read(self, page: int) -> Any:
        return list(self.at[page])

    def fill(self, page: int, content: Any) -> None:
        self.at[page] = list(content)


@dataclass
class Launched:
    parts: list[Any]
    fresh: list[int]


class Plain:
    """A runner. What is at a position is the hash of all tokens up to it; a row of logits follows from that."""

    layer_ranges = rehearses = True
    lora = True

    def __init__(self, depth: int, total: int, limits: Limits) -> None:
        self.depth, self.total, self.limits = depth, total, limits
        self.kv: Any = None
        self._steps: deque[Launched] = deque()
        self._done: deque[Any] = deque()
        self.head = self._head if depth == 1 else None
        self.fail = 0
        self.rows: list[int] = []
        self.computed: dict[int, set[int]] = {}

    def room(self, kv_bytes: int) -> int:
        return self.total

    def wake(self, pages: int) -> None:
        self.kv = Kv(pages)

    def sleep(self) -> None:
        self._compute_all()
        self.kv = None

    def launch(self, chunks: Any, fresh: Any) -> Any:
        assert chunks
        if self.fail == 1:
            self.fail = 0
            self._steps.clear()
            self._done.clear()
            raise RuntimeError("it fails before it began")
        parts, prefilled, count = [], 0, 0
        for chunk in decodes_first(chunks):
            sequence = chunk.sequence
            rehearsed = sequence.state is State.HELD  # its last row, once more
            assert (chunk.start, chunk.count > 0) == (sequence.computed - rehearsed, True)
            root = ROOTS[None if sequence.adapter is None else sequence.adapter.name]
            parts.append((root, list(sequence.tokens), chunk.start, chunk.count, list(sequence.pages), chunk.samples))
            self.computed.setdefault(sequence.request.id, set()).update(range(chunk.start, chunk.start + chunk.count))
            prefilled += chunk.count if sequence.state is State.PREFILL else 0
            count += chunk.count
            assert not (chunk.samples and sequence.held)
        assert prefilled <= self.limits.prefill
        assert count <= self.limits.prefill + self.limits.running
        assert len({chunk.sequence.request.id for chunk in chunks}) == len(chunks)
        self._steps.append(Launched(parts, list(fresh)))
        if self.depth == 1:
            self._compute_all()
        if self.fail == 2:
            self.fail = 0
            self._steps.clear()
            self._done.clear()
            raise RuntimeError("it fails when it is done")
        return sampled(chunks)

    def _compute_all(self) -> None:
        while self._steps:
            self._compute(self._steps.popleft())

    def _compute(self, step: Launched) -> None:
        assert self.kv is not None
        for page in step.fresh:
            self.kv.clear(page)
        wanted, self.rows = [], []
        for root, tokens, start, count, pages, samples in step.parts:
            state = root
            for position in range(start + count):
                state = after(state, tokens[position])
                there = self.kv.at[pages[position // PAGE]]
                if position < start:
                    assert there[position % PAGE] == state, (position, start, "a page is used that is not computed")
                else:
                    old = there[position % PAGE]
                    assert old is None or old == state, (position, "a page of somebody else is written")
                    there[position % PAGE] = state
                    self.rows.append(state)
            if samples:
                wanted.append(row(state))
        self._done.append(torch.from_numpy(np.stack(wanted)) if wanted else None)

    def collect(self) -> Any:
        if not self._done:
            self._compute(self._steps.popleft())
        return self._done.popleft()

    def _head(self, rows: Any) -> torch.Tensor:
        return torch.from_numpy(np.stack([row(self.rows[at]) for at in rows]))

    def close(self) -> None:
        pass


@cache
def oracle(prompt: tuple[int, ...], root: int, most: int) -> tuple[tuple[int, ...], tuple[Any, ...], str]:
    """Output (without what ends it), rows, finish."""
    state = root
    for token in prompt:
        state = after(state, token)
    ids: list[int] = []
    rows: list[Any] = []
    while len(ids) < most:
        token = int(row(state).argmax())
        if token == EOS:
            return tuple(ids), tuple(rows), "stop"
        rows.append(row(state))
        ids.append(token)
        state = after(state, token)
    return tuple(ids), tuple(rows), "length"


def prompt_rows(prompt: tuple[int, ...], root: int) -> list[Any]:
    state, found = root, []
    for token in prompt[:-1]:
        state = after(state, token)
        found.append(row(state))
    return found


class Expected:
    """What a request is to be told."""

    def __init__(self, asked: Request, context: int) -> None:
        self.asked = asked
        self.root = ROOTS[asked.lora]
        most = min(asked.sampling.max_tokens, context - len(asked.prompt))
        self.ids, self.rows, self.finish = oracle(asked.prompt, self.root, most)
        self.at = 0 if asked.retell else len(asked.emitted)
        self.known = len(asked.emitted)
        self.spoken = False
        self.rests = False
        self.held = asked.held
        self.preempted = False

    def event(self, event: Event, computed: set[int]) -> bool:
        """Whether it ended."""
        assert event.error is None
        if event.rests:
            assert self.held
            assert self.at >= self.known, "it rests, and not all is told"
            self.rests = True
            return False
        sampling = self.asked.sampling
        if sampling.prompt_logprobs is not None and not self.spoken:
            rows = prompt_rows(self.asked.prompt, self.root)
            want = tuple(
                reported(each, token, sampling.prompt_logprobs)
                for each, token in zip(rows, self.asked.prompt[1:], strict=True)
            )
            assert event.prompt == want
        else:
            assert event.prompt == ()
        if event.ids:  # else it was fed to its end, maybe before it computed its prompt
            truth = len(self.asked.prompt) - len([at for at in computed if at < len(self.asked.prompt)])
            if not self.spoken and not self.preempted and computed:
                assert event.cached == truth, (event.cached, truth)
        self.spoken = True
        for token in event.ids:
            assert token == self.ids[self.at], (self.at, token, self.ids[self.at])
            if sampling.logprobs is not None:
                assert event.logprobs == (reported(self.rows[self.at], token, sampling.logprobs),)
            self.at += 1
        self.known = max(self.known, self.at)
        if event.finish is not None:
            assert event.finish == self.finish
            assert self.at == len(self.ids), (self.at, len(self.ids))
        return event.finish is not None


class Machine(RuleBasedStateMachine):
    """Requests that share prefixes, fed, held, moved with their pages, cancelled; an engine that sleeps, and fails."""

    @initialize(
        total=st.integers(4, 14), running=st.integers(1, 6), prefill=st.sampled_from([1, 7, 64, 128, 200, 256, 300]),
        share=st.sampled_from([1, 2, 4]), depth=st.sampled_from([1, 1, 1, 2, 3]),
    )  # fmt: skip
    def begin(self, total: int, running: int, prefill: int, share: int, depth: int) -> None:
        limits = Limits(running=running, waiting=8, prefill=prefill, quantum=max(1, prefill // share))
        self.runner = Plain(depth, total, limits)
        decoder: Any = SimpleNamespace(
            vocabulary=V, context=700, lora=Lora(),
            backend=SimpleNamespace(shared=False, bound="memory", broken=lambda: ""),
        )  # fmt: skip
        self.core = OurEngine(decoder, frozenset({EOS}), EXACT, 1, proven=True, limits=limits, runner=self.runner)
        self.alive: dict[int, Expected] = {}
        self.pages: list[Any] = []
        self.number = 0
        self.asleep = False

    @rule(
        size=st.sampled_from([1, 2, 60, 127, 128, 129, 130, 200, 255, 256, 257, 300, 384, 385, 400, 513, 640]),
        kind=st.integers(0, 1), other=st.sampled_from([None, None, 0, 100, 130, 256]),
        lora=st.sampled_from([None, None, None, "one", "two"]), most=st.sampled_from([0, 1, 2, 5, 30, 140, 300]),
        emitted=st.sampled_from([0, 0, 0, 1, 3, 50, 128, 300]), held=st.sampled_from([False, False, False, True]),
        retell=st.booleans(), logprobs=st.sampled_from([None, None, 0, 2]),
        scores=st.sampled_from([None, None, None, 1]),
    )  # fmt: skip
    def add(self, size: int, kind: int, other: Any, lora: Any, most: int, emitted: int, held: bool, retell: bool,
            logprobs: Any, scores: Any) -> None:  # fmt: skip
        one = self.runner.depth == 1
        base = np.random.default_rng(kind).integers(1, V, 700).tolist()
        if other is not None:
            base[other:] = np.random.default_rng(100 + other).integers(1, V, 700 - other).tolist()
        prompt = tuple(base[: min(size, self.core.max_context - 1)])
        retell = one and retell
        if not retell:
            logprobs = logprobs if emitted == 0 else None
        asked = replace(
            request(self.number, prompt, max_tokens=most, logprobs=logprobs,
                    prompt_logprobs=scores if one and (retell or not emitted) else None),
            lora=lora, held=held, retell=retell,
        )  # fmt: skip
        ids = oracle(prompt, ROOTS[lora], min(most, self.core.max_context - len(prompt)))[0]
        asked = replace(asked, emitted=ids[:emitted])
        try:
            self.core.add(asked)
        except QueueFull:
            return
        self.alive[self.number] = Expected(asked, self.core.max_context)
        self.number += 1

    def pick(self, at: int) -> int | None:
        numbers = list(self.alive)
        return numbers[at % len(numbers)] if numbers else None

    @rule(at=st.integers(0, 10), back=st.integers(0, 3), count=st.sampled_from([0, 1, 2, 9, 60, 128, 300]))
    def feed(self, at: int, back: int, count: int) -> None:
        number = self.pick(at)
        if number is None:
            return
        each = self.alive[number]
        first = max(0, each.known - back)
        ids = each.ids[first : first + count]
        new = self.core.feed(number, first, ids)
        scored = each.asked.sampling.scored and not each.asked.retell
        if scored:
            assert new == ()
            return
        have = each.known
        assert new == each.ids[have : max(have, first + len(ids))], (new, have, first, len(ids))
        each.known += len(new)
        if not each.asked.retell:
            each.at = each.known
        if new:
            each.rests = False

    @rule(at=st.integers(0, 10))
    def hold(self, at: int) -> None:
        number = self.pick(at)
        if number is not None:
            self.core.hold(number)
            self.alive[number].held = True

    @rule(at=st.integers(0, 10))
    def release(self, at: int) -> None:
        number = self.pick(at)
        if number is not None:
            self.core.release(number)
            self.alive[number].held = self.alive[number].rests = False

    @rule(at=st.integers(0, 10))
    def cancel(self, at: int) -> None:
        number = self.pick(at)
        if number is not None:
            self.core.cancel(number)
            del self.alive[number]

    def one(self) -> None:
        before = self.core.scheduler.preempted
        held = list(self.core.scheduler.running)
        try:
            events = self.core.step()
        except RuntimeError:
            for number in self.alive:
                self.core.cancel(number)
            self.alive.clear()
            return
        if self.core.scheduler.preempted != before:
            for sequence in [*held, *self.core.scheduler.waiting, *self.core.scheduler.running]:
                if sequence.request.id in self.alive:
                    self.alive[sequence.request.id].preempted = True
        for event in events:
            if event.request in self.alive:
                each = self.alive[event.request]
                if each.event(event, self.runner.computed.get(event.request, set())):
                    del self.alive[event.request]
            else:
                raise AssertionError(f"an event of one that is gone: {event}")

    @rule(count=st.integers(1, 30))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.core.busy:
                self.one()

    @rule(how=st.integers(1, 2))
    def fails(self, how: int) -> None:
        if self.runner.depth == 1:
            self.runner.fail = how

    @rule()
    def sleep(self) -> None:
        for each in self.alive.values():
            each.preempted = True
        self.core.sleep()
        self.asleep = True

    @rule()
    def wake(self) -> None:
        self.core.wake()
        self.asleep = False

    @rule(at=st.integers(0, 10))
    def export(self, at: int) -> None:
        number = self.pick(at)
        if number in self.core._sequences and self.runner.depth == 1:
            self.pages.append((self.core.export_pages(number), self.alive[number].asked.lora))

    @rule(at=st.integers(0, 10))
    def bring(self, at: int) -> None:
        if self.pages and not self.asleep:
            pages, lora = self.pages[at % len(self.pages)]
            self.core.import_pages(pages, lora)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.scheduler.check()
        assert set(self.core._sequences) | set(self.core._complete) == set(self.alive)
        if self.core._awake and not self.core.busy:
            for number, sequence in self.core._sequences.items():
                each = self.alive[number]
                if sequence.state is State.HELD:
                    assert each.held
                    assert each.rests, "it rests, and nobody was told"
                    assert each.at >= each.known
                else:
                    assert sequence.state is State.WAITING
                    assert any(one.state is State.HELD for one in self.core.scheduler.running)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.wake()
        self.runner.fail = 0
        for number in list(self.alive):
            self.core.release(number)
            self.alive[number].held = False
        for _ in range(30_000):
            if not self.core.busy:
                break
            self.one()
        assert not self.alive
        assert self.core.scheduler.pages.held == 0


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestEngine = Machine.TestCase


def play(seed: int) -> None:
    """Calls that share a prefix, come and go; every second has a whole number of pages."""
    r, core = random.Random(seed), Machine.__new__(Machine)
    steps = (r.choice([64, 128, 200, 256, 256]), r.choice([1, 2, 2]), r.choice([1, 1, 2]))
    Machine.begin(core, r.choice([5, 8, 14, 30]), r.randint(2, 8), *steps)
    for _ in range(60):
        how = r.random()
        if how < 0.3:
            Machine.add(
                core, r.choice([128, 129, 256, 256, 257, 384, 385, 513]), 0, r.choice([None, None, None, 256, 130]),
                r.choice([None] * 5 + ["one"]), r.choice([0, 1, 2, 5, 30, 140]), r.choice([0, 0, 1, 3, 128]),
                r.random() < 0.1, r.random() < 0.4, r.choice([None, 0]), r.choice([None] * 7 + [1]),
            )  # fmt: skip
        elif how < 0.8:
            Machine.steps(core, r.randint(1, 4))
        elif how < 0.84:
            Machine.cancel(core, r.randint(0, 9))
        elif how < 0.89:
            Machine.feed(core, r.randint(0, 9), r.randint(0, 3), r.choice([1, 9, 128]))
        elif how < 0.92:
            Machine.hold(core, r.randint(0, 9))
        elif how < 0.97:
            Machine.release(core, r.randint(0, 9))
        elif how < 0.98:
            Machine.sleep(core)
            Machine.wake(core)
        elif how < 0.99:
            Machine.fails(core, r.randint(1, 2))
        Machine.agrees(core)
    Machine.teardown(core)


def test_calls_that_share_prefixes_come_and_go() -> None:
    for seed in range(60):
        play(seed)

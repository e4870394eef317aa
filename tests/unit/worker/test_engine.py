"""The engine: against transformers' own generate, its sampling, its text, its loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import Cancelled, ContextLengthExceeded, FunctionError, InvalidRequest, Unavailable
from sllm_runtime.worker.engine.admission import end_ids, max_context
from sllm_runtime.worker.engine.base import Event, Mask, Request, Sampling
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.sampling import Seen, choose
from sllm_runtime.worker.engine.scripted import ScriptedEngine
from sllm_runtime.worker.engine.sinks import AsyncSink, Mailbox, Piece, ThreadSink
from sllm_runtime.worker.engine.text import Detokenizer, StopMatcher
from sllm_runtime.worker.engine.transformers_engine import TransformersEngine
from tests.fixtures.models import BUILDERS

PROMPT = tuple(range(5, 17))


@cache
def module(name: str = "llama") -> Any:
    torch.manual_seed(0)
    return BUILDERS[name]().eval()


def engine(name: str = "llama", eos: frozenset[int] = frozenset()) -> TransformersEngine:
    return TransformersEngine(module(name), eos, 128, 101)


def run(core: TransformersEngine, *requests: Request) -> dict[int, list[Event]]:
    for request in requests:
        core.add(request)
    events: dict[int, list[Event]] = {request.id: [] for request in requests}
    while core.busy:
        for event in core.step():
            events[event.request].append(event)
    return events


def ids(events: Sequence[Event]) -> tuple[int, ...]:
    return tuple(number for event in events for number in event.ids)


def request(number: int = 0, *, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    return Request(id=number, prompt=prompt, sampling=Sampling(**{"max_tokens": 12, **sampling}))


@pytest.mark.parametrize("name", ["llama", "tied_llama", "qwen3", "mistral", "gemma", "phi", "mixtral", "gpt2", "opt"])
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    # Random models repeat themselves; a penalty makes every token count.
    events = run(engine(name, frozenset({2})), request(repetition_penalty=1.3, min_tokens=12))[0]
    model = module(name)
    settings = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=12, min_new_tokens=12, do_sample=False, repetition_penalty=1.3, pad_token_id=0, eos_token_id=2
    )
    expected = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), generation_config=settings
    )
    assert ids(events) == tuple(expected[0, len(PROMPT) :].tolist())
    assert events[-1].finish == "length"


def test_requests_do_not_disturb_each_other() -> None:
    alone = [ids(run(engine(), request(n, prompt=PROMPT[n:], temperature=1.0, seed=n))[n]) for n in range(4)]
    together = run(engine(), *(request(n, prompt=PROMPT[n:], temperature=1.0, seed=n) for n in range(4)))
    assert [ids(together[n]) for n in range(4)] == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resume_goes_on_at_every_position(temperature: float) -> None:
    whole = ids(run(engine(), request(temperature=temperature, seed=3, presence_penalty=0.5))[0])
    for at in range(len(whole) + 1):
        first = replace(request(temperature=temperature, seed=3, presence_penalty=0.5), emitted=whole[:at])
        events = run(engine(), first)[0]
        assert whole[:at] + ids(events) == whole
        assert events[-1].finish == "length"


def test_ends() -> None:
    whole = ids(run(engine(), request())[0])
    stopped = run(engine(eos=frozenset({whole[3]})), request())[0]
    at = whole.index(whole[3])
    assert (ids(stopped), stopped[-1].finish) == (whole[:at], "stop")
    assert ids(run(engine(eos=frozenset({whole[3]})), request(ignore_eos=True))[0]) == whole
    assert ids(run(engine(), request(stop_ids=(whole[3],)))[0]) == whole[:at]
    longer = run(engine(eos=frozenset({whole[0]})), request(min_tokens=5))[0]
    assert len(ids(longer)) >= 5
    assert whole[0] not in ids(longer)[:5]


def test_the_context_is_an_end() -> None:
    events = run(engine(), request(prompt=tuple([7] * 120), max_tokens=50))[0]
    assert (len(ids(events)), events[-1].finish) == (8, "length")


def test_refusals_name_the_field() -> None:
    with pytest.raises(ContextLengthExceeded):
        engine().add(request(prompt=tuple([7] * 128)))
    with pytest.raises(InvalidRequest, match="empty"):
        engine().add(request(prompt=()))
    with pytest.raises(InvalidRequest, match="101") as caught:
        engine().add(request(logit_bias={101: 1.0}))
    assert caught.value.field == "logit_bias"


def test_cancel_and_export() -> None:
    core = engine()
    core.add(request(1))
    core.add(request(2))
    core.step()
    core.step()
    exported = core.export(1)
    assert len(exported.ids) == 2
    core.cancel(1)
    core.cancel(1)
    assert {event.request for event in core.step()} == {2}
    moved = run(engine(), replace(exported.request, emitted=exported.ids))[1]
    assert exported.ids + ids(moved) == ids(run(engine(), request())[0])


def test_nan_fails_its_own_request_by_name() -> None:
    core = engine()
    torch.manual_seed(0)
    core.module = BUILDERS["llama"]().eval()
    with torch.no_grad():
        core.module.model.embed_tokens.weight[99] = float("nan")
    events = run(core, request(1), request(2, prompt=(5, 99)))
    assert isinstance(events[2][-1].error, FunctionError)
    assert "NaN" in str(events[2][-1].error)
    assert ids(events[1]) == ids(run(engine(), request())[0])


def test_configurations() -> None:
    assert max_context({"n_positions": 7}) == 7
    assert max_context({"text_config": {"max_position_embeddings": 9}}) == 9
    assert end_ids({"eos_token_id": 2}, None, 9) == {2}
    assert end_ids({"eos_token_id": 2}, b'{"eos_token_id": [3, 4]}', 9) == {3, 4}
    assert end_ids({}, None, 9) == frozenset()
    assert end_ids({"eos_token_id": [-1, 8, 9, 10]}, None, 9) == {8}, "no row has logits of the others"


# --- sampling ---------------------------------------------------------------------------------------
ROWS = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40).map(lambda row: np.array(row, dtype=np.float32))


@given(ROWS, st.integers(0, 50), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_only_kept_tokens_are_drawn(row: Any, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    before = row.copy()
    token = choose(row, sampling, (0,), ()).id
    assert np.array_equal(row, before)
    if top_k:
        assert row[token] >= np.sort(row)[-min(top_k, len(row))]
    odds = np.exp(row.astype(np.float64) - row.max())
    assert odds[token] >= min_p * (1 - 1e-5)
    above = odds[row > row[token]].sum() / odds.sum()
    assert above <= top_p + 1e-5


@given(ROWS, st.integers(0, 100), st.integers(0, 1000))
def test_a_draw_depends_on_seed_choice_and_position_alone(row: Any, seed: int, position: int) -> None:
    sampling = Sampling(temperature=0.7, seed=seed)
    output = tuple([0] * position)
    assert choose(row, sampling, (0,), output, 1) == choose(row, sampling, (1, 1), output, 1)


def test_draws_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    drawn = [choose(row, Sampling(temperature=1.0, seed=seed), (0,), ()).id for seed in range(4000)]
    assert np.allclose(np.bincount(drawn) / 4000, [0.5, 0.3, 0.2], atol=0.03)
    cold = [choose(row, Sampling(temperature=0.01, seed=seed), (0,), ()).id for seed in range(100)]
    assert cold == [0] * 100


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = np.linspace(-40.0, 40.0, 100, dtype=np.float32)[::-1].copy()
    row[7], row[0] = 41.0, 40.0
    assert {choose(row, Sampling(temperature=temperature, seed=seed), (), ()).id for seed in range(20)} == {7}


def test_penalties_and_bias() -> None:
    row = np.array([1.0, 0.9, -1.0], dtype=np.float32)
    assert choose(row, Sampling(repetition_penalty=2.0), (0,), ()).id == 1
    assert choose(row, Sampling(presence_penalty=0.5), (0,), ()).id == 0, "the prompt does not count"
    assert choose(row, Sampling(presence_penalty=0.5), (), (0,)).id == 1
    assert choose(row, Sampling(frequency_penalty=0.06), (), (0,)).id == 0
    assert choose(row, Sampling(frequency_penalty=0.06), (), (0, 0)).id == 1
    assert choose(row, Sampling(logit_bias={2: 100.0}), (), ()).id == 2


PENALTIES = st.sampled_from([(1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -0.7), (0.8, 0.3, 0.1)])
FEW = st.lists(st.integers(0, 9), max_size=8)


@given(PENALTIES, FEW, st.lists(FEW, min_size=1, max_size=6), FEW)
def test_what_was_seen_is_kept_and_counted_once(
    penalties: tuple[float, float, float], prompt: list[int], parts: list[list[int]], others: list[int]
) -> None:
    """Ids come one by one, many together, and others in their place: tokens are what they are without anything kept."""
    repetition, presence, frequency = penalties
    sampling = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    row, seen = np.random.default_rng(0).standard_normal(10).astype(np.float32), Seen(prompt)
    outputs = [*accumulate(parts, add), [*parts[0], *others], [*others, *parts[0]]]
    for output in outputs:
        scored = _scores(row, sampling, prompt, output)
        assert choose(row, sampling, prompt, output, seen=seen).id == scored.argmax()
        assert choose(row, sampling, prompt, output).id == scored.argmax()
        assert sorted(seen.ids) == sorted({*prompt, *output})
        assert dict(zip(seen.drawn, seen.counts, strict=True)) == Counter(output)


def _scores(row: Any, sampling: Sampling, prompt: list[int], output: list[int]) -> Any:
    """By what a penalty is."""
    scores = row.copy()
    for token in {*prompt, *output}:
        penalty = np.float32(sampling.repetition_penalty)
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= np.float32(sampling.presence_penalty + sampling.frequency_penalty * count)
    return scores


def test_log_probabilities() -> None:
    row = np.array([2.0, 1.0, 0.0, -1.0], dtype=np.float32)
    expected = torch.log_softmax(torch.tensor(row, dtype=torch.float64), 0).tolist()
    picked = choose(row, Sampling(logprobs=2), (), ())
    assert picked.logprob == pytest.approx(expected[0])
    assert [token for token, _ in picked.top] == [0, 1]
    assert [logprob for _, logprob in picked.top] == pytest.approx(expected[:2])
    assert choose(row, Sampling(logprobs=10), (), ()).top[-1][0] == 3


# --- text -------------------------------------------------------------------------------------------
class Bytes:
    """A tokenizer with a token for each byte."""

    def decode(self, numbers: Sequence[int]) -> str:
        return bytes(numbers).decode(errors="replace")


@given(st.text(max_size=60), st.text(max_size=10))
def test_pieces_are_the_text_and_never_half_a_character(text: str, context: str) -> None:
    detokenizer = Detokenizer(Bytes(), list(context.encode()))
    pieces = [detokenizer.feed([number]) for number in text.encode()]
    assert "".join([*pieces, detokenizer.flush()]) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def test_broken_utf8_comes_out_in_the_end() -> None:
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.feed([0x41, 0xE2, 0x82]) == "A"
    assert detokenizer.flush() == "\ufffd"


@given(st.lists(st.text("abc", max_size=4), max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_across_borders(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown += text
        assert not any(stop in shown for stop in stops)
        if stopped:
            break
    shown += matcher.flush()
    whole = "".join(pieces)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert stopped == bool(found)
    assert whole.startswith(shown)
    if not found:
        assert shown == whole
    elif all(len(piece) <= 1 for piece in pieces):
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)


# --- loop -------------------------------------------------------------------------------------------
class Letters:
    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(chr(32 + number % 90) for number in numbers)


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    one = EngineLoop(engine(), Letters())
    one.start()
    yield one
    one.close()


def text_of(loop: EngineLoop, one: Request) -> str:
    sink = ThreadSink()
    loop.submit(one, sink)
    return "".join(piece.text for piece in sink)


def test_a_stop_string_ends_a_request_before_it(loop: EngineLoop) -> None:
    whole = text_of(loop, request(repetition_penalty=1.5))
    assert text_of(loop, request(repetition_penalty=1.5, stop=(whole[4:6],))) == whole[: whole.index(whole[4:6])]
    assert not loop.engine.busy


def test_a_resumed_text_begins_with_what_was_emitted(loop: EngineLoop) -> None:
    whole = text_of(loop, request())
    first = ids(run(engine(), request())[0])[:5]
    assert text_of(loop, replace(request(), emitted=first)) == whole


def test_how_many_tokens_the_longest_request_has(loop: EngineLoop) -> None:
    """Prompt and output, what was drawn elsewhere included."""

    class Watching(ThreadSink):
        def put(self, piece: Piece) -> None:
            told.extend(piece.ids)
            seen.append((loop.context, len(PROMPT) + len(told)))
            super().put(piece)

    told: list[int] = []
    seen: list[tuple[int, int]] = []
    sink = Watching()
    loop.submit(replace(request(), emitted=ids(run(engine(), request())[0])[:5]), sink)
    assert len("".join(piece.text for piece in sink)) == 12
    *running, (at_the_end, _) = seen
    assert len(running) == 11
    assert all(said == there for said, there in running)
    assert at_the_end == 0


class Rule:
    """Allows all; counts how often it was given up."""

    field = "regex"

    def __init__(self) -> None:
        self.forgotten = 0

    def allowed(self, output: Sequence[int]) -> Mask:
        return np.ones(101, np.bool_)

    def forget(self) -> None:
        self.forgotten += 1


def test_what_a_rule_keeps_is_given_up_when_its_output_ends(loop: EngineLoop) -> None:
    """However long whoever asked keeps the rule."""
    rule, stopped, cancelled = Rule(), Rule(), Rule()
    whole = text_of(loop, replace(request(), constraints=(rule,)))
    text_of(loop, replace(request(stop=(whole[3],)), constraints=(stopped,)))
    sink = ThreadSink()
    number = loop.submit(replace(request(max_tokens=100), constraints=(cancelled,)), sink)
    next(iter(sink))
    loop.cancel(number, Cancelled("enough"))
    with pytest.raises(Cancelled):
        list(sink)
    assert (rule.forgotten, stopped.forgotten, cancelled.forgotten) == (1, 1, 1)


def test_who_comes_from_elsewhere_keeps_nobody_waiting_for_all_of_them() -> None:
    class Noting(ThreadSink):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def put(self, piece: Piece) -> None:
            order.append(self.name)
            super().put(piece)

    order: list[str] = []
    one = EngineLoop(ScriptedEngine(), Letters())
    sinks = [Noting(name) for name in "abcdef"]
    one.submit(request(), sinks[0])
    for sink in sinks[1:]:
        one.submit(replace(request(max_tokens=1001), emitted=tuple(range(17, 1017))), sink)
    one.start()
    pieces = ["".join(piece.text for piece in sink) for sink in sinks]
    one.close()
    assert [len(text) for text in pieces] == [12, *[1001] * 5]
    assert len(set(pieces[1:])) == 1
    firsts = sorted("abcdef", key=order.index)
    assert firsts.index("a") == 2, "between the second that came and the third"


def test_refusals_and_cancellations_reach_the_sink(loop: EngineLoop) -> None:
    sink = ThreadSink()
    loop.submit(request(prompt=()), sink)
    with pytest.raises(InvalidRequest):
        list(sink)
    sink = ThreadSink()
    number = loop.submit(request(max_tokens=100), sink)
    pieces = iter(sink)
    next(pieces)
    loop.cancel(number, Cancelled("enough"))
    with pytest.raises(Cancelled):
        list(pieces)


def test_what_breaks_one_request_leaves_the_loop_alive(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: Any, numbers: Sequence[int]) -> str:
        raise OverflowError("out of range")

    with monkeypatch.context() as patched:
        patched.setattr(Letters, "decode", broken)
        with pytest.raises(Exception, match="OverflowError"):
            text_of(loop, request())
    with pytest.raises(InvalidRequest, match="-1"):
        text_of(loop, request(prompt=(-1,)))
    with pytest.raises(InvalidRequest):
        text_of(loop, request(prompt=(2**70,)))
    assert len(text_of(loop, request())) == 12
    assert not loop.engine.busy


def test_close_ends_who_waits() -> None:
    one = EngineLoop(engine(), Letters())
    one.start()
    sink = ThreadSink()
    one.submit(request(max_tokens=100), sink)
    one.close()
    with pytest.raises(Unavailable):
        list(sink)
    with pytest.raises(Unavailable):
        one.submit(request(), sink)


def test_who_came_just_before_the_close_hears_of_it() -> None:
    """However much those before have to be told first."""
    one = EngineLoop(ScriptedEngine(), Letters())
    sinks = [Told() for _ in range(3)]
    for sink in sinks:
        one.submit(replace(request(max_tokens=1001), emitted=tuple(range(17, 1017))), sink)
    one.close()
    one.start()
    one.close()
    assert all(sink.pieces and isinstance(sink.pieces[-1].error, Unavailable) for sink in sinks)


class Told(ThreadSink):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []

    def put(self, piece: Piece) -> None:
        self.pieces.append(piece)


async def test_coroutines_get_their_pieces(loop: EngineLoop) -> None:
    mailbox = Mailbox(asyncio.get_running_loop())

    async def text(number: int) -> str:
        sink = AsyncSink(mailbox)
        loop.submit(request(prompt=PROMPT[number:]), sink)
        return "".join([piece.text async for piece in sink])

    found = await asyncio.gather(*(text(number) for number in range(3)))
    assert found == [await asyncio.to_thread(text_of, loop, request(prompt=PROMPT[n:])) for n in range(3)]


def test_a_bug_of_the_engine_fails_those_who_wait(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: Any) -> list[Event]:
        raise ZeroDivisionError("bug")

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "step", broken)
        with pytest.raises(Exception, match="ZeroDivisionError: bug"):
            text_of(loop, request())
        assert not loop.engine.busy, "it computes for nobody"
    assert text_of(loop, request())

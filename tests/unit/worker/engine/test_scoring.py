"""Log probabilities of a prompt's own tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.worker.engine.admission import refuse_scores
from sllm_runtime.worker.engine.base import Engine, Event, Request
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.transformers_engine import TransformersEngine
from tests.fixtures.families import family
from tests.unit.worker.engine.driver import engine, finish, page_bytes, request, run


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_a_prompts_log_probabilities_are_those_of_its_tokens(kind: str) -> None:
    """Whatever else is in the batch, found in the cache, preempted or put to sleep: they are told once, at first."""
    prompt = [number * 7 % 90 + 3 for number in range(300)]
    with torch.inference_mode():
        logits = family("llama")(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate(prompt[1:])]
    core: Engine = engine() if kind == "ours" else TransformersEngine(family("llama"), frozenset(), 512, 101)
    run(core, request(1, prompt))
    core.add(request(2, prompt, prompt_logprobs=1))
    core.add(request(3, prompt, prompt_logprobs=0, max_tokens=0))
    core.add(request(4, range(5, 17)))
    begun = {event.request: [event] for event in core.step()}
    core.sleep()
    core.wake()
    events = finish(core, begun)
    for number in (2, 3):
        first, *others = events[number]
        assert [choice.id for choice in first.prompt] == prompt[1:]
        assert [choice.logprob for choice in first.prompt] == pytest.approx(expected, abs=1e-4)
        assert not any(event.prompt for event in others)
    assert all(choice.top[0][1] >= choice.logprob for choice in events[2][0].prompt)
    assert [(event.ids, event.finish) for event in events[3]] == [((), "length")]
    assert not any(event.prompt for event in events[4])


def test_prompts_that_are_scored_share_too_little_memory() -> None:
    prompt = [number * 7 % 90 + 3 for number in range(250)]
    alone = finish_one(engine(), request(0, prompt, prompt_logprobs=2, max_tokens=20))
    core = engine(kv=4 * page_bytes(), prefill=60, quantum=32)
    for number in range(3):
        core.add(request(number, prompt, prompt_logprobs=2, max_tokens=20))
    events = finish(core)
    assert core.stats().preempted
    for number in range(3):
        assert replace(events[number][0], request=0, cached=0) == replace(alone, cached=0)


def finish_one(core: OurEngine, asked: Request) -> Event:
    """The first of its events."""
    core.add(asked)
    return finish(core)[asked.id][0]


def test_an_engine_that_keeps_no_rows_refuses_by_name() -> None:
    refuse_scores(request())
    with pytest.raises(InvalidRequest) as caught:
        refuse_scores(request(prompt_logprobs=0))
    assert caught.value.field == "logprobs"

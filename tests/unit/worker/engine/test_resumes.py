"""A call goes on wherever it stopped, with the same tokens and log probabilities: at every position, with every option
of sampling, in both dtypes, on one thread and on two, at the level that an instance takes there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from sllm_loaderd.convert.directory import convert_directory
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.worker.engine.base import Event, Finish, Request, TokenChoice
from sllm_runtime.worker.engine.choice import recognise
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.scheduler import Limits
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors
from tests.fixtures.loaderd import ignore
from tests.unit.worker.engine import driver
from tests.unit.worker.engine.driver import MIB, exact, finish, request

MODEL = Path(__file__).parents[4] / "functions" / "coder" / "model"
ENDS = frozenset({17, 40, 71})
"""Of a hundred tokens, so that what is drawn ends now and then."""
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2},
    "temperature": {"temperature": 0.8, "seed": 3},
    "filters": {"temperature": 1.2, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 1},
    "repetition": {"repetition_penalty": 1.3, "logprobs": 2},
    "penalties": {"temperature": 0.5, "seed": 5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {9: 2.0, 11: -100.0}, "min_tokens": 8},
    "ends": {"temperature": 1.5, "seed": 6, "min_tokens": 10},
    "stop ids": {"temperature": 1.5, "seed": 7, "stop_ids": (5, 60, 90), "min_tokens": 4},
    "no ends": {"temperature": 1.5, "seed": 8, "ignore_eos": True, "logprobs": 0},
    "the prompt": {"temperature": 0.9, "seed": 9, "prompt_logprobs": 1},
}
Told = tuple[tuple[int, ...], tuple[TokenChoice, ...], tuple[TokenChoice, ...], Finish | None]
"""Ids, their log probabilities, the prompt's, and why it ended."""


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many as the test asks for, where the default here is one."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def told(events: list[Event]) -> Told:
    assert all(event.error is None for event in events), [event.error for event in events]
    return (
        tuple(number for event in events for number in event.ids),
        tuple(choice for event in events for choice in event.logprobs),
        tuple(choice for event in events for choice in event.prompt),
        events[-1].finish,
    )


def rest(whole: Told, at: int) -> Told:
    """What a resume behind its first ``at`` ids has to tell."""
    ids, logprobs, prompt, why = whole
    return ids[at:], logprobs[at:], prompt, why


def all_told(core: OurEngine, *requests: Request) -> dict[int, Told]:
    for each in requests:
        core.add(each)
    return {number: told(events) for number, events in finish(core).items()}


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resume_goes_on_at_every_position(name: str, dtype: torch.dtype, threads: int) -> None:
    first = replace(request(max_tokens=40, prompt=range(5, 101), **OPTIONS[name]), choice=threads)
    core = driver.engine(dtype=dtype, eos=ENDS, numerics=exact(dtype=dtype), proven=True, running=64)
    whole = all_told(core, first)[0]
    ids, _, _, why = whole
    assert len(ids) >= OPTIONS[name].get("min_tokens", 1)
    places = range(len(ids) + (why == "stop"))  # all that was drawn, and its end is not: it is found again
    core.scheduler.pages.drop_cached()  # what was drawn is computed again
    found = all_told(core, *(replace(first, id=at, emitted=ids[:at]) for at in places))
    for at in places:
        assert found[at] == rest(whole, at), at


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTensors:
    """The demo model as a node has it: matrices that are one product lie behind one another."""
    place = tmp_path_factory.mktemp("demo") / "model"
    convert_directory(MODEL, place, verify=ignore)
    index = open_checkpoint(place).index
    return CheckpointTensors(index, bytearray((place / "partition_0.bin").read_bytes()))


RESUMED = 30_000
"""Tokens in each of the four ways, 120,000 together."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_hundred_thousand_resumed_tokens(dtype: torch.dtype, threads: int, tensors: CheckpointTensors) -> None:
    """The demo model: streams with all options are resumed at random places, at random moments, in batches of up to 33
    that others join and leave."""
    typed = TypedTensors(tensors, dtype)
    known = recognise(json.loads((MODEL / "config.json").read_bytes()), "auto", typed, typed.shapes, dtype)
    assert known is not None
    proof = selftest.prove(known.decoder, "")
    assert proof.exact, f"no level holds in {dtype} with {threads} threads"
    core = OurEngine(known.decoder, frozenset(), proof.numerics, 512 * MIB, limits=Limits(running=33))
    draw = Random(f"{dtype} {threads}").randrange
    firsts = [
        request(n, [draw(5, 4096) for _ in range(draw(1, 300))], max_tokens=300, **list(OPTIONS.values())[n % 10])
        for n in range(30)
    ]
    whole = all_told(core, *firsts)
    core.scheduler.pages.drop_cached()
    resumed, number, places = 0, len(firsts), dict[int, tuple[int, int]]()
    events: dict[int, list[Event]] = {}
    while resumed < RESUMED or core.busy:
        if resumed < RESUMED and len(places) < 33 and not draw(6):
            for _ in range(draw(1, 34 - len(places))):
                n = draw(len(firsts))
                places[number] = (n, draw(len(whole[n][0])))
                core.add(replace(firsts[n], id=number, emitted=whole[n][0][: places[number][1]]))
                number += 1
        for event in core.step():
            events.setdefault(event.request, []).append(event)
            if event.finish is not None or event.error is not None:
                n, at = places.pop(event.request)
                found = told(events.pop(event.request))
                assert found == rest(whole[n], at), (n, at)
                resumed += len(found[0])
                if not draw(20):
                    core.scheduler.pages.drop_cached()
    core.scheduler.check()

"""Plain greedy tokens are chosen where the logits are: ids come to the CPU in their place, the same to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import FunctionError
from sllm_runtime.worker.engine.base import Request, Sampling
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.sampler import Likeliest, choose_rows, likeliest
from sllm_runtime.worker.engine.ours.scheduler import Sequence
from tests.fixtures.examples import examples
from tests.unit.worker.engine import driver, stand_in
from tests.unit.worker.engine.driver import run
from tests.unit.worker.engine.stand_in import Again

NUMBERS = st.sampled_from([0.0, -0.0, 1.5, 1.5, 7.0, -3.0, float("inf"), float("-inf"), float("nan")])


@settings(max_examples=examples(100))
@given(st.integers(1, 5).flatmap(lambda width: st.lists(st.lists(NUMBERS, min_size=width, max_size=width), min_size=1)))
def test_ties_and_nan_are_as_on_the_cpu(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    waiting = [Sequence(Request(id=at, prompt=(1,), sampling=Sampling()), [1]) for at in range(len(rows))]
    padded = torch.cat((logits, torch.zeros(1, logits.shape[1])))
    pairs = zip(
        choose_rows(Likeliest(likeliest(padded)), waiting, frozenset()),
        choose_rows(padded, waiting, frozenset()),
        strict=True,
    )
    for (found, expected), row in zip(pairs, rows, strict=True):
        if np.isnan(row).any():
            assert isinstance(found, FunctionError)
            assert isinstance(expected, FunctionError)
            assert found.message == expected.message
        else:
            assert found == expected


def told(core: OurEngine) -> Counter[type]:
    """What comes from its device in every step to come, and how often."""
    kinds: Counter[type] = Counter()
    collect = core.runner.collect

    def collected() -> Any:
        found = collect()
        kinds[type(found)] += 1
        assert isinstance(found, torch.Tensor) or found is None or found.ids.dtype == torch.int64
        return found

    core.runner.collect = collected  # type: ignore[method-assign]
    return kinds


def asked(number: int, **sampling: Any) -> Request:
    prompt = tuple((number * 7 + at * 3) % 97 + 3 for at in range(5 + number * 11 % 70))
    return driver.request(number, prompt, max_tokens=10 + number, **sampling)


def test_ids_alone_come_from_steps_that_are_greedy() -> None:
    """From those by themselves, and those that are recorded."""
    record = Again()
    core, requests = stand_in.exact(record=record), [asked(number) for number in range(3)]
    kinds = told(core)
    found = run(core, *requests)
    assert set(kinds) - {type(None)} == {Likeliest}
    assert record.replays > 0
    scored = [replace(each, sampling=replace(each.sampling, logprobs=0)) for each in requests]
    by_logits = stand_in.exact(record=record)
    kinds = told(by_logits)
    assert run(by_logits, *scored) == found
    assert set(kinds) - {type(None)} == {torch.Tensor}


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.9, "seed": 1},
        {"repetition_penalty": 1.2},
        {"logit_bias": {9: 4.0}},
        {"logprobs": 1},
    ],
    ids=str,
)
def test_a_row_that_asks_for_more_has_its_logits_and_changes_nobody(other: dict[str, Any]) -> None:
    core, greedy = stand_in.exact(), asked(1)
    kinds = told(core)
    found = run(core, greedy, asked(3, **other))
    assert kinds[torch.Tensor] > 0
    assert found == {**run(stand_in.exact(), greedy), **run(stand_in.exact(), asked(3, **other))}
    assert found == run(driver.engine(), greedy, asked(3, **other))


def test_the_ends_that_are_forbidden_first_are_heeded_by_logits() -> None:
    """Until ``min_tokens`` are out a row is not plain, from then on it is."""
    core = stand_in.exact()
    kinds = told(core)
    run(core, driver.request(1, min_tokens=6, max_tokens=12))
    assert (kinds[torch.Tensor], kinds[Likeliest]) == (6, 6)

"""Stages on the path of accelerators (``stand_in``): the bits of one device, with adapters and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fixtures.nursery import Nursery
from tests.unit.worker.engine import stand_in
from tests.unit.worker.engine.driver import finish, kept, run
from tests.unit.worker.engine.pipelines import stages
from tests.unit.worker.engine.test_lending import NAMES, mixed, put

pytestmark = pytest.mark.timeout(300)  # the first waits for the imports of another process
SCORED = [replace(each, sampling=replace(each.sampling, logprobs=0)) for each in mixed(6)]
"""One device gives their logits too, and not ids alone."""


def test_stages_with_adapters_compute_the_bits_of_one_device(nursery: Nursery) -> None:
    whole = stand_in.exact("llama", torch.bfloat16)
    put(whole, *NAMES)
    expected = kept(whole)
    tokens = run(whole, *SCORED)
    with stages(nursery, "llama", 0, 1, 3, depth=1, dtype=torch.bfloat16, accelerated=True) as made:
        assert made.core.capabilities.lora
        put(made.core, *NAMES)
        got = kept(made.core)
        assert run(made.core, *SCORED) == tokens
    assert len(got) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_rows_go_over_a_stream_too_and_what_ran_goes_on_after_a_sleep(nursery: Nursery) -> None:
    plain = [replace(each, lora=None) for each in SCORED]
    expected = run(stand_in.exact("llama"), *plain)
    with stages(nursery, "llama", 0, 2, 3, tcp=True, accelerated=True) as made:
        core = made.core
        for each in plain:
            core.add(each)
        events = {each.id: core.step() for each in plain[:1]}
        first = [event for each in events.values() for event in each]
        core.sleep()
        core.wake()
        found = finish(core, {number: [event for event in first if event.request == number] for number in expected})
    assert {number: tuple(n for event in each for n in event.ids) for number, each in found.items()} == expected

"""Ids that an output was given, by a resume or while it ran, are told with the log probabilities of drawing them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sllm_runtime.protocol.errors import FunctionError, NotDeterministic
from sllm_runtime.worker.engine.base import Engine, Event, Request
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.scripted import ScriptedEngine
from tests.fixtures.models import BUILDERS
from tests.unit.worker.engine import driver
from tests.unit.worker.engine.driver import exact, finish, ids, page_bytes, request

PROMPT = [number * 7 % 90 + 3 for number in range(140)]
OPTIONS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"logprobs": 0, "temperature": 0.8, "seed": 3, "presence_penalty": 0.4},
    {"logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.3},
    {"prompt_logprobs": 0},
]


def ours(dtype: torch.dtype = torch.float32, **options: Any) -> OurEngine:
    return driver.engine(dtype=dtype, numerics=exact(dtype=dtype), proven=True, **options)


def asked(number: int = 0, **options: Any) -> Request:
    return replace(request(number, PROMPT, max_tokens=24, **options), retell=True)


def told(events: list[Event]) -> list[Event]:
    """Without what another instance would count otherwise."""
    return [replace(event, request=0, cached=0) for event in events]


def alone(core: Engine, first: Request) -> list[Event]:
    core.add(first)
    return told(finish(core)[first.id])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_output_that_goes_on_is_told_from_its_beginning(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Wherever it is resumed, beside others of its kind, with pages found in the cache, and when nothing is left."""
    whole = alone(ours(dtype), asked(**options))
    drawn = ids(whole)
    assert len(drawn) == 24
    core = ours(dtype, prefill=96, quantum=48)
    numbers = (0, 1, 2, 9, 23, 24)
    for at in numbers:
        core.add(replace(asked(at, **options), emitted=drawn[:at]))
    events = finish(core)
    assert {at: told(events[at]) for at in numbers} == dict.fromkeys(numbers, whole)
    core.scheduler.check()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_it_is_fed_is_told_too(options: dict[str, Any]) -> None:
    """Before its first step, later, in pieces, to its end, and when it is put to sleep meanwhile."""
    whole = alone(ours(), asked(**options))
    drawn = ids(whole)
    for steps in (0, 3):
        for upto in (2, 24):
            core = ours(quantum=48, prefill=96)
            core.add(asked(**options))
            events: list[Event] = []
            for _ in range(steps):
                events += core.step()
            core.feed(0, 0, drawn[:upto])
            core.sleep()
            core.wake()
            assert told(finish(core, {0: events})[0]) == whole, (steps, upto)
            core.scheduler.check()


@pytest.mark.parametrize("core", [ours, ScriptedEngine], ids=["ours", "scripted"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_held_tells_what_it_was_given(options: dict[str, Any], core: Any) -> None:
    whole, made = alone(core(), asked(**options)), core()
    made.add(replace(asked(**options), emitted=ids(whole)[:9], held=True))
    events = finish(made)[0]
    assert (told(events[:-1]), events[-1].rests, made.busy) == (whole[:9], True, False)
    made.feed(0, 9, ids(whole)[9:12])
    more = finish(made)[0]
    assert (told(more[:-1]), more[-1].rests) == (whole[9:12], True)
    made.feed(0, 12, ids(whole)[12:14])
    made.release(0)
    assert told(finish(made)[0]) == whole[12:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_rests_is_rehearsed_once_and_tells_nothing(dtype: torch.dtype) -> None:
    """As many rows as will be drawn from, when nobody waits for a step; what is drawn later is as ever."""
    held = [replace(request(number, PROMPT[number:], max_tokens=24), held=True) for number in range(3)]
    alone = {each.id: ids(finish_one(ours(dtype), replace(each, held=False))) for each in held}
    core, launched = ours(dtype), list[list[int]]()
    launch = core.runner.launch

    def counted(chunks: Any, fresh: Any) -> Any:
        launched.append([chunk.count for chunk in chunks])
        return launch(chunks, fresh)

    core.runner.launch = counted  # type: ignore[method-assign]
    for each in held:
        core.add(each)
    finish(core)
    assert launched.pop() == [1, 1, 1]
    count = len(launched)
    for each in held:
        core.feed(each.id, 0, alone[each.id][:2])
    assert all(event.rests for events in finish(core).values() for event in events)
    assert len(launched) == count + 1, "such a step is known"
    for each in held:
        core.release(each.id)
    assert {number: alone[number][:2] + ids(events) for number, events in finish(core).items()} == alone


def finish_one(core: OurEngine, first: Request) -> list[Event]:
    core.add(first)
    return finish(core)[first.id]


def test_one_that_is_held_before_its_last_row_says_that_it_rests() -> None:
    """All that it may compute then was computed before: no step is left to say it with."""
    core = ours(prefill=len(PROMPT) - 1)
    core.add(asked(logprobs=0))
    assert core.step() == []
    core.hold(0)
    assert core.busy
    assert core.step() == [Event(request=0, rests=True)]
    assert not core.busy


def test_too_little_memory_for_all_of_them() -> None:
    first = replace(asked(logprobs=2), prompt=tuple(PROMPT[:100] * 2 + PROMPT[:45]))
    whole = alone(ours(), first)
    core = ours(kv=4 * page_bytes(), prefill=60, quantum=32)
    for number in range(3):
        core.add(replace(first, id=number, emitted=ids(whole)[:9]))
    events = finish(core)
    assert core.stats().preempted
    assert [told(events[number]) for number in range(3)] == [whole] * 3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_scripted_engine_tells_them_alike(options: dict[str, Any]) -> None:
    whole = alone(ScriptedEngine(), asked(**options))
    for at in (0, 1, 23, 24):
        assert alone(ScriptedEngine(), replace(asked(**options), emitted=ids(whole)[:at])) == whole
    core = ScriptedEngine()
    core.add(asked(**options))
    begun = core.step()
    core.feed(0, 1, ids(whole)[1:24])
    assert told(finish(core, {0: begun})[0]) == whole


def test_another_output_is_refused() -> None:
    core = ours()
    drawn = ids(alone(ours(), asked(logprobs=1)))
    core.add(asked(logprobs=1))
    core.feed(0, 0, drawn[:3])
    with pytest.raises(NotDeterministic):
        core.feed(0, 2, (drawn[2] + 1,))


def test_ids_that_a_broken_row_was_asked_about_end_it_once() -> None:
    torch.manual_seed(0)
    model = BUILDERS["llama"](max_position_embeddings=512).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    made = build("LlamaForCausalLM", model.config, model.state_dict(), torch.float32, EXACT.rows)
    core = OurEngine(made, frozenset(), EXACT, driver.MIB, proven=True)
    core.add(replace(request(1, (5, 99), emitted=(3, 4, 5), logprobs=0), retell=True))
    (event,) = finish(core)[1]
    assert isinstance(event.error, FunctionError)
    core.scheduler.check()

"""What is told again is computed, though somebody else has computed its page meanwhile."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.worker.engine.ours.pages import PAGE, Pages
from sllm_runtime.worker.engine.ours.scheduler import Limits, Scheduler
from tests.unit.worker.engine.driver import finish, ids, request
from tests.unit.worker.engine.test_retelling import alone, ours, told
from tests.unit.worker.engine.test_scheduler import step

PROMPT = [number * 7 % 90 + 3 for number in range(256)]


def test_the_first_id_is_told_where_another_has_computed_all_of_its_prompt_meanwhile() -> None:
    first = replace(request(0, PROMPT, max_tokens=12, logprobs=2), retell=True)
    whole = alone(ours(), first)
    core = ours(prefill=128, quantum=128)
    core.add(request(1, PROMPT, max_tokens=2))
    core.add(replace(first, emitted=ids(whole)[:9]))
    assert told(finish(core)[0]) == whole


def test_what_it_finds_after_it_has_begun_to_compute_is_said_to_be_found() -> None:
    scheduler = Scheduler(Pages(100), Limits(prefill=PAGE, quantum=PAGE))
    slow = scheduler.add(request(1, range(20 * PAGE)))
    computed = sum(chunk.count for chunk in step(scheduler) if chunk.sequence is slow)
    scheduler.add(request(2, range(19 * PAGE)))  # it finds a page and has less left than the first: it passes it
    while not slow.produced:
        computed += sum(chunk.count for chunk in step(scheduler) if chunk.sequence is slow)
    assert slow.cached == len(slow.request.prompt) - computed, (slow.cached, computed)


def test_of_equal_prompts_that_come_together_each_page_is_computed_once() -> None:
    scheduler = Scheduler(Pages(100), Limits(prefill=2 * PAGE, quantum=PAGE))
    both = [scheduler.add(request(number, range(16 * PAGE))) for number in range(2)]
    computed, steps = 0, 0
    while not all(sequence.produced for sequence in both):
        computed += sum(chunk.count for chunk in step(scheduler) if chunk.sequence.produced <= 1 and chunk.count > 1)
        steps += 1
    assert computed <= 18 * PAGE, computed  # the last page of each is, for its last row
    assert steps <= 18

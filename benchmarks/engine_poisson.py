"""The case of ``engine`` under load: requests of mixed lengths at random times, beside static batching by transformers.

First token: from a request's arrival. Time between tokens: between two of the same request. Static batching takes all
that wait (16 at most) once the batch before is over, pads them, and generates until the longest is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteriaList

from benchmarks.engine_models import Demo, asked, outputs, prompts
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, percentile, ratio
from benchmarks.runner import Run

BATCH: Final = 16
LOAD: Final = 0.5
"""Of the tokens a second that our engine makes of all requests at once."""
STATIC: Final = "transformers, static batches"
_PROMPT: Final = (16, 256)
_OUTPUT: Final = (8, 96)


@dataclass
class Asked:
    """One request: when it comes (seconds from the start), what it is, and when each of its tokens came."""

    at: float
    prompt: tuple[int, ...]
    tokens: int
    came: list[float] = field(default_factory=list)


def workload(count: int, rate: float, vocabulary: int, seed: int = 1) -> list[Asked]:
    """``count`` requests, ``rate`` a second on average; the same prompts whatever the rate."""
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(1.0, count)
    lengths, tokens = draw.integers(*_PROMPT, count), draw.integers(*_OUTPUT, count)
    texts = prompts(count, _PROMPT[1], vocabulary, seed)
    due = np.cumsum(gaps) / rate
    return [Asked(float(due[n]), texts[n][: int(lengths[n])], int(tokens[n])) for n in range(count)]


def measure(run: Run, case: str, demo: Demo) -> None:
    """Both systems on the same requests, in turn."""
    count, vocabulary = (12 if run.quick else 60), demo.known.decoder.vocabulary
    at_once = workload(count, 1e9, vocabulary)
    began = time.perf_counter()
    core = demo.engine()
    for number, each in enumerate(at_once):
        core.add(asked(number, each.prompt, each.tokens))
    outputs(core)
    total = sum(each.tokens for each in at_once)
    rate = LOAD * count / (time.perf_counter() - began)
    run.settings[f"{case}_requests_per_s"] = round(rate, 3)
    run.settings[f"{case}_tokens"] = total
    for number in range(run.rounds):
        for system, serve in (("sllm", _ours), (STATIC, _static)):
            done = workload(count, rate, vocabulary, seed=number)
            serve(demo, done)
            _take(run, case, system, done)
    for what in ("ttft", "tbt"):
        for percent in (50, 99):
            pair = [run.case(f"{case}_{what}_p{percent}", system) for system in (STATIC, "sllm")]
            aim = f"{case}_{what}_p{percent}: {STATIC} / sllm"
            if what == "ttft":
                run.aims.append(Aim(aim, ratio(*pair, least=run.least), at_least=1.0))


def _take(run: Run, case: str, system: str, done: Sequence[Asked]) -> None:
    """Percentiles over all requests of one round, each a sample. Raises ``ProgramFailed`` if a token is missing."""
    if any(len(each.came) != each.tokens for each in done):
        raise ProgramFailed(f"{system} did not give each request all its tokens")
    first = [(each.came[0] - each.at) * 1e3 for each in done]
    between = [(b - a) * 1e3 for each in done for a, b in zip(each.came, each.came[1:], strict=False)]
    for what, times in (("ttft", first), ("tbt", between)):
        for percent in (50, 99):
            made = run.case(f"{case}_{what}_p{percent}", system)
            made.samples.append(round(percentile(times, percent), 2))


def _ours(demo: Demo, requests: Sequence[Asked]) -> None:
    core, began, waiting = demo.engine(), time.perf_counter(), list(enumerate(requests))
    while waiting or core.busy:
        now = time.perf_counter() - began
        while waiting and waiting[0][1].at <= now:
            number, each = waiting.pop(0)
            core.add(asked(number, each.prompt, each.tokens))
        if not core.busy:
            time.sleep(waiting[0][1].at - now)
            continue
        events = core.step()
        now = time.perf_counter() - began
        for event in events:
            if event.error is not None:
                raise event.error
            requests[event.request].came += [now] * len(event.ids)


def _static(demo: Demo, requests: Sequence[Asked]) -> None:
    began, waiting = time.perf_counter(), list(requests)
    while waiting:
        now = time.perf_counter() - began
        batch = [each for each in waiting if each.at <= now][:BATCH]
        if not batch:
            time.sleep(waiting[0].at - now)
            continue
        del waiting[: len(batch)]
        _batch(demo, batch, began)


def _batch(demo: Demo, batch: Sequence[Asked], began: float) -> None:
    longest, most = max(len(each.prompt) for each in batch), max(each.tokens for each in batch)
    ids = torch.tensor([(0,) * (longest - len(each.prompt)) + each.prompt for each in batch])
    mask = torch.tensor([(0,) * (longest - len(each.prompt)) + (1,) * len(each.prompt) for each in batch])

    def came(found: Any, _scores: Any, **_: Any) -> torch.Tensor:
        now, made = time.perf_counter() - began, found.shape[1] - longest
        for each in batch:
            if made <= each.tokens:
                each.came.append(now)
        return torch.zeros(len(batch), dtype=torch.bool)

    settings: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    with torch.inference_mode():
        demo.theirs.generate(
            ids, attention_mask=mask, generation_config=settings, stopping_criteria=StoppingCriteriaList([came])
        )

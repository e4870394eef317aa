"""The case of ``engine`` under load: requests of mixed lengths at random times, beside transformers' continuous
batching and static batches.

First token: from a request's arrival. Time between tokens: between two of the same request. Continuous batching is
transformers' own, in a thread of its own, which tells when each token was made. Static batching takes all that wait (16
at most) once the batch before is over, pads them, and generates until the longest is done. All tokens are compared. Of
a round's requests, of which there are too few for a 99th percentile, the median and the worst are told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.engine_models import Demo, asked, outputs, prompts, same
from benchmarks.programs import ProgramFailed, own_usage
from benchmarks.record import TAIL, Aim, percentile, ratio, tail
from benchmarks.runner import Run, in_turn

BATCH: Final = 16
LOAD: Final = 0.5
"""Of the tokens a second that our engine makes of all requests at once."""
STATIC: Final = "transformers, static batches"
CONTINUOUS: Final = "transformers continuous batching"
_PROMPT: Final = (16, 256)
_OUTPUT: Final = (8, 96)
_BLOCKS: Final = 64
"""Of KV: by itself it takes 90 % of the memory."""
_WAIT_S: Final = 60.0


@dataclass
class Asked:
    """One request: when it comes (seconds from the start), what it is, its tokens and when each came."""

    at: float
    prompt: tuple[int, ...]
    tokens: int
    came: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def workload(count: int, rate: float, vocabulary: int, seed: int = 1) -> list[Asked]:
    """``count`` requests, ``rate`` a second on average; the same prompts whatever the rate."""
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(1.0, count)
    lengths, tokens = draw.integers(*_PROMPT, count), draw.integers(*_OUTPUT, count)
    texts = prompts(count, _PROMPT[1], vocabulary, seed)
    due = np.cumsum(gaps) / rate
    return [Asked(float(due[n]), texts[n][: int(lengths[n])], int(tokens[n])) for n in range(count)]


def measure(run: Run, case: str, demo: Demo) -> None:
    """All systems on the same requests, in turn."""
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
        told: dict[str, list[Asked]] = {}
        for system, serve in in_turn((("sllm", _ours), (CONTINUOUS, _continuous), (STATIC, _static)), number):
            done = told[system] = workload(count, rate, vocabulary, seed=number)
            cpu = time.process_time()
            serve(demo, done)
            _take(run, case, system, done, time.process_time() - cpu)
        for system in (CONTINUOUS, STATIC):
            for ours, theirs in zip(told["sllm"], told[system], strict=True):
                same(demo.theirs, ours.prompt, tuple(ours.ids), tuple(theirs.ids), rounds=True)
    for name in ("p50", "p99" if count >= TAIL else "max"):
        for other in (CONTINUOUS, STATIC):
            pair = [run.case(f"{case}_ttft_{name}", system) for system in (other, "sllm")]
            aim = f"{case}_ttft_{name}: {other} / sllm"
            run.aims.append(Aim(aim, ratio(*pair, least=run.least), at_least=1.0))


def _take(run: Run, case: str, system: str, done: Sequence[Asked], cpu_s: float) -> None:
    """Figures over all requests of one round, each a sample. Raises ``ProgramFailed`` if a token is missing."""
    if any(len(each.came) != each.tokens or len(each.ids) != each.tokens for each in done):
        raise ProgramFailed(f"{system} did not give each request all its tokens")
    mib = own_usage().pss_mib
    first = [(each.came[0] - each.at) * 1e3 for each in done]
    between = [(b - a) * 1e3 for each in done for a, b in zip(each.came, each.came[1:], strict=False)]
    for what, times in (("ttft", first), ("tbt", between)):
        for name, value in {"p50": percentile(times, 50), **tail(times)}.items():
            run.case(f"{case}_{what}_{name}", system).take(round(value, 2), cpu_s, mib)


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
            requests[event.request].ids += event.ids


def _continuous(demo: Demo, requests: Sequence[Asked]) -> None:
    settings: Any = GenerationConfig(max_new_tokens=_OUTPUT[1], do_sample=False, pad_token_id=0, eos_token_id=-1)  # type: ignore[no-untyped-call]
    serving = demo.theirs.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(num_blocks=_BLOCKS)
    )
    with serving as manager:
        began = time.perf_counter()
        for number, each in enumerate(requests):
            time.sleep(max(0.0, began + each.at - time.perf_counter()))
            manager.add_request(
                list(each.prompt), request_id=str(number), max_new_tokens=each.tokens, record_timestamps=True
            )
        left = len(requests)
        while left:
            found = manager.get_result(timeout=_WAIT_S)
            if found is None or found.error:
                raise ProgramFailed(f"{CONTINUOUS}: {found.error if found else 'nothing more comes'}")
            if found.is_finished():
                left -= 1
                each = requests[int(found.request_id)]
                each.ids = list(found.generated_tokens)
                each.came = [at - began for at in found.timestamps]


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
        found = demo.theirs.generate(
            ids, attention_mask=mask, generation_config=settings, stopping_criteria=StoppingCriteriaList([came])
        )
    for row, each in zip(found, batch, strict=True):
        each.ids = row[longest : longest + each.tokens].tolist()

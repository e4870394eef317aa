"""The cases of ``engine`` that compare tokens a second: whole batches of equal prompts, prefill and decode together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.engine_models import Agreement, Demo, Outputs, asked, outputs, prompts
from benchmarks.engine_peers import LLAMA, VLLM, Absent, Answer, Peer, llama
from benchmarks.programs import ProgramFailed, own_usage
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run, in_turn

BATCHES: Final = (1, 4, 8, 16)
FEW: Final = (1, 8)
"""Batches of quick runs."""
PROMPT: Final = 64
LONG: Final = 1024
SHORT: Final = 256
"""Instead of ``LONG`` in quick runs."""
AIMS: Final = {1: 1.3, 8: 1.5, 16: 1.5}
"""Ours over transformers' generate."""
GENERATE: Final = "transformers generate"
CONTINUOUS: Final = "transformers continuous batching"
OTHERS: Final = (GENERATE, CONTINUOUS, LLAMA, VLLM)
LIMIT: Final = "memory bandwidth"
_BLOCKS: Final = 64
SETTLE_S: Final = 1.0
"""After a peer, whose threads go on spinning for a while when there is nothing left to do."""


def measure(run: Run, name: str, demo: Demo, beside: Peer | Absent) -> None:
    """``decode_<dtype>_b<batch>`` for each batch: ours exact and fast, generate, continuous batching, llama.cpp and
    ``beside``, the limit."""
    tokens = 24 if run.quick else 128
    for batch in FEW if run.quick else BATCHES:
        case = f"decode_{name}_b{batch}"
        with run.attempt(case, "tokens/s"):
            given = prompts(batch, PROMPT, demo.known.decoder.vocabulary)
            with llama(name, batch, PROMPT + tokens) as peer:
                _compare(run, case, demo, given, tokens, [peer, beside])
            if batch in AIMS:
                value = ratio(run.case(case, "sllm"), run.case(case, GENERATE), least=run.least)
                run.aims.append(Aim(f"{case}: sllm / {GENERATE}", value, at_least=AIMS[batch]))
            run.aims.append(beside_best(run, case))
            if (value := ratio(run.case(case, "sllm"), run.case(case, "sllm fast"), least=run.least)) is not None:
                run.case(case, "sllm").extra["of_fast"] = round(value, 3)


def prefill(run: Run, name: str, demo: Demo, beside: Peer | Absent) -> None:
    """``prefill_<dtype>``: tokens a second of one long prompt, to its first token."""
    case = f"prefill_{name}"
    with run.attempt(case, "tokens/s"):
        length = SHORT if run.quick else LONG
        given = prompts(1, length, demo.known.decoder.vocabulary)
        with llama(name, 1, length) as peer:
            _alternate(run, case, demo, given, 1, length, [peer, beside])
        run.aims.append(beside_best(run, case))


def beside_best(run: Run, case: str) -> Aim:
    """Ours beside the fastest of all others that have as many samples."""
    there = [each for each in run.cases if each.case == case and each.system in OTHERS and each.samples]
    enough = [each for each in there if len(each.samples) >= run.least] or there
    best = max(enough, key=lambda each: each.median or 0.0, default=None)
    named = f" ({best.system})" if best is not None else ""
    value = ratio(run.case(case, "sllm", "tokens/s"), best, least=run.least)
    return Aim(f"{case}: sllm / best peer{named}", value, at_least=1.0)


def _compare(
    run: Run, case: str, demo: Demo, given: list[tuple[int, ...]], tokens: int, peers: Sequence[Peer | Absent]
) -> None:
    agreement = _alternate(run, case, demo, given, tokens, len(given) * tokens, peers)
    if not run.quick or len(given) == FEW[-1]:
        _continuous(run, case, demo, given, agreement.known["sllm"])
    limit = run.case(case, LIMIT, "tokens/s")
    limit.notes = "each step reads every weight once, at the rate of one sum over as many bytes"
    limit.samples += [round(len(given) * each / demo.nbytes, 1) for each in _rates(demo.nbytes, run.rounds)]


def _alternate(
    run: Run,
    case: str,
    demo: Demo,
    given: list[tuple[int, ...]],
    tokens: int,
    counted: int,
    peers: Sequence[Peer | Absent],
) -> Agreement:
    """Ours, exact and fast, generate and ``peers`` in turn, another one first in each round; ``counted`` tokens each
    time. All ids are compared, each time."""
    settings = _settings(tokens)
    ways: dict[str, Callable[[], Answer]] = {
        "sllm": partial(_timed, lambda: _ours(demo, given, tokens, exact=True)),
        "sllm fast": partial(_timed, lambda: _ours(demo, given, tokens, exact=False)),
        GENERATE: partial(_timed, lambda: _generate(demo, given, settings)),
    }
    alone = frozenset(ways)
    for peer in peers:
        made = run.case(case, peer.name, "tokens/s")
        if isinstance(peer, Absent):
            made.not_run = peer.reason
        else:
            made.notes, ways[peer.name] = peer.notes, partial(peer.ask, given, tokens)
    agreement = Agreement(demo.theirs, given)
    exactly = {"sllm"} if demo.dtype is torch.bfloat16 else alone
    for number in range(-1, run.rounds):  # the first one is not counted
        for system, way in in_turn(tuple(ways.items()), max(number, 0)):
            made = run.case(case, system, "tokens/s")
            if made.not_run:
                continue
            try:
                found = way()
                agreement.hold(system, found.outputs, rounds=system not in exactly)
            except ProgramFailed as error:
                if system in alone:
                    raise
                made.samples.clear()  # what a peer fails for is a result
                made.not_run = str(error)[:300]
                continue
            if number >= 0:
                made.take(round(counted / found.seconds, 1), found.cpu_s, found.mib)
            if system not in alone:
                time.sleep(SETTLE_S)
    return agreement


def _timed(way: Callable[[], Outputs]) -> Answer:
    """In this process, whose memory has the model as ours and as transformers'."""
    cpu, began = time.process_time(), time.perf_counter()
    found = way()
    return Answer(time.perf_counter() - began, time.process_time() - cpu, own_usage().pss_mib, found)


def _settings(tokens: int) -> Any:
    made: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return made


def _ours(demo: Demo, given: list[tuple[int, ...]], tokens: int, *, exact: bool) -> Outputs:
    core = demo.engine(exact=exact)
    for number, prompt in enumerate(given):
        core.add(asked(number, prompt, tokens))
    return outputs(core)


def _generate(demo: Demo, given: list[tuple[int, ...]], settings: Any) -> Outputs:
    ids = torch.tensor(given)
    with torch.inference_mode():
        found = demo.theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return {number: tuple(row[ids.shape[1] :].tolist()) for number, row in enumerate(found)}


def _continuous(run: Run, case: str, demo: Demo, given: list[tuple[int, ...]], reference: Outputs) -> None:
    """With fewer tokens, and once in quick runs, for the largest batch alone."""
    made = run.case(case, CONTINUOUS, "tokens/s")
    tokens = 16 if run.quick else 32
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    agreement = Agreement(demo.theirs, given, {"sllm": {number: ids[:tokens] for number, ids in reference.items()}})
    for _ in range(1 if run.quick else run.rounds):
        try:
            found = _timed(partial(_in_batches, demo, given, tokens))
            agreement.hold(CONTINUOUS, found.outputs, rounds=True)
        except Exception as error:  # a peer may raise anything; that it cannot run is a result
            made.samples.clear()
            made.not_run = f"{type(error).__name__}: {error}"[:300]
            return
        made.take(round(tokens * len(given) / found.seconds, 1), found.cpu_s, found.mib)
    made.notes = (
        f"{tokens} tokens each, its start included, {_BLOCKS} blocks of KV: by itself it takes 90 % of the memory"
    )


def _in_batches(demo: Demo, given: list[tuple[int, ...]], tokens: int) -> Outputs:
    found = demo.theirs.generate_batch(
        [list(prompt) for prompt in given],
        generation_config=_settings(tokens),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=_BLOCKS),
    )
    said = {tuple(each.prompt_ids): tuple(each.generated_tokens) for each in found.values()}
    return {number: said.get(prompt, ()) for number, prompt in enumerate(given)}


def _rates(nbytes: int, count: int) -> list[float]:
    """Bytes a second of a sum over ``nbytes``, which may stay in the processor's cache as the weights may."""
    data = torch.ones(nbytes // 4)
    found = []
    for _ in range(count + 1):
        began = time.perf_counter()
        data.sum()
        found.append(nbytes / (time.perf_counter() - began))
    return found[1:]

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

from benchmarks.engine_models import Demo, asked, outputs, prompts
from benchmarks.engine_peers import Answer, Peer, llama
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, Case, ratio
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
LIMIT: Final = "memory bandwidth"
_BLOCKS: Final = 64
SETTLE_S: Final = 1.0
"""After a peer, whose threads go on spinning for a while when there is nothing left to do."""
Outputs = dict[int, tuple[int, ...]]


def measure(run: Run, name: str, demo: Demo, beside: Sequence[Peer]) -> None:
    """``decode_<dtype>_b<batch>`` for each batch: ours exact and fast, generate, continuous batching, llama.cpp and
    ``beside``, the limit."""
    tokens = 24 if run.quick else 128
    for batch in FEW if run.quick else BATCHES:
        case = f"decode_{name}_b{batch}"
        with run.attempt(case, "tokens/s"):
            given = prompts(batch, PROMPT, demo.known.decoder.vocabulary)
            with llama(run, case, name, batch, PROMPT + tokens) as peers:
                _compare(run, case, demo, given, tokens, [*peers, *beside])
            if batch in AIMS:
                _aim(run, case, "sllm", GENERATE, AIMS[batch])
            _aim(run, case, "sllm", "sllm fast", None)


def prefill(run: Run, name: str, demo: Demo, beside: Sequence[Peer]) -> None:
    """``prefill_<dtype>``: tokens a second of one long prompt, to its first token."""
    case = f"prefill_{name}"
    with run.attempt(case, "tokens/s"):
        length = SHORT if run.quick else LONG
        given = prompts(1, length, demo.known.decoder.vocabulary)
        with llama(run, case, name, 1, length) as peers:
            _alternate(run, case, demo, given, 1, length, [*peers, *beside])


def _compare(run: Run, case: str, demo: Demo, given: list[tuple[int, ...]], tokens: int, peers: Sequence[Peer]) -> None:
    reference = _alternate(run, case, demo, given, tokens, len(given) * tokens, peers)
    if not run.quick or len(given) == FEW[-1]:
        _continuous(run, case, demo, given, reference)
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
    peers: Sequence[Peer],
) -> Outputs:
    """Ours, exact and fast, and generate in turn, another one first in each round, then ``peers``; ``counted`` tokens
    each time; ours' outputs."""
    settings = _settings(tokens)
    ways: dict[str, Callable[[], Answer]] = {
        "sllm": partial(_timed, lambda: _ours(demo, given, tokens, exact=True)),
        "sllm fast": partial(_timed, lambda: _ours(demo, given, tokens, exact=False)),
        GENERATE: partial(_timed, lambda: _generate(demo, given, settings)),
    }
    reference: Outputs = {}
    for number in range(-1, run.rounds):
        for system, way in in_turn(tuple(ways.items()), max(number, 0)):
            found = way()
            if number < 0:
                reference = reference or found.outputs
                _same(demo, given, reference, found.outputs)
            else:
                _take(run.case(case, system, "tokens/s"), counted / found.seconds, found.cpu_s)
        for peer in peers:
            _ask(run.case(case, peer.name, "tokens/s"), peer, demo, given, tokens, counted, reference, number)
            time.sleep(SETTLE_S)
    return reference


def _timed(way: Callable[[], Outputs]) -> Answer:
    cpu, began = time.process_time(), time.perf_counter()
    found = way()
    return Answer(time.perf_counter() - began, time.process_time() - cpu, found)


def _ask(
    made: Case,
    peer: Peer,
    demo: Demo,
    given: list[tuple[int, ...]],
    tokens: int,
    counted: int,
    reference: Outputs,
    number: int,
) -> None:
    """One round of a peer; the first, ``number`` -1, is not counted. What it fails for is a result."""
    if made.not_run:
        return
    try:
        found = peer.ask(given, tokens)
        if number < 0:
            _same(demo, given, reference, found.outputs, rounded=True)
        else:
            _take(made, counted / found.seconds, found.cpu_s)
    except ProgramFailed as error:
        made.samples.clear()
        made.not_run = str(error)[:300]


def _same(demo: Demo, given: list[tuple[int, ...]], ours: Outputs, theirs: Outputs, *, rounded: bool = False) -> None:
    for at, prompt in enumerate(given):
        demo.same(prompt, ours[at], theirs[at], rounded=rounded)


def _settings(tokens: int) -> Any:
    made: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return made


def _take(case: Case, value: float, cpu_s: float) -> None:
    case.samples.append(round(value, 1))
    case.cpu_s = round(cpu_s, 3)


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
    """With fewer tokens, once in quick runs, for the largest batch alone, and three times in full ones."""
    made = run.case(case, CONTINUOUS, "tokens/s")
    tokens = 16 if run.quick else 32
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    cache = ContinuousBatchingConfig(num_blocks=_BLOCKS)
    for _ in range(1 if run.quick else 3):
        began = time.perf_counter()
        try:
            found = demo.theirs.generate_batch(
                [list(prompt) for prompt in given],
                generation_config=_settings(tokens),
                continuous_batching_config=cache,
            )
        except Exception as error:  # a peer may raise anything; that it cannot run is a result
            made.not_run = f"{type(error).__name__}: {error}"[:300]
            return
        took = time.perf_counter() - began
        said = {tuple(each.prompt_ids): tuple(each.generated_tokens) for each in found.values()}
        ours = {number: ids[:tokens] for number, ids in reference.items()}
        theirs = {number: said.get(prompt, ()) for number, prompt in enumerate(given)}
        try:
            _same(demo, given, ours, theirs, rounded=True)
        except ProgramFailed as error:
            made.not_run = str(error)[:300]
            return
        made.samples.append(round(tokens * len(given) / took, 1))
    made.notes = (
        f"{tokens} tokens each, its start included, {_BLOCKS} blocks of KV: by itself it takes 90 % of the memory"
    )


def _rates(nbytes: int, count: int) -> list[float]:
    """Bytes a second of a sum over ``nbytes``, which may stay in the processor's cache as the weights may."""
    data = torch.ones(nbytes // 4)
    found = []
    for _ in range(count + 1):
        began = time.perf_counter()
        data.sum()
        found.append(nbytes / (time.perf_counter() - began))
    return found[1:]


def _aim(run: Run, case: str, over: str, under: str, least: float | None) -> None:
    value = ratio(run.case(case, over, "tokens/s"), run.case(case, under, "tokens/s"), least=run.least)
    bound = {"at_least": least} if least is not None else {}
    if bound:
        run.aims.append(Aim(f"{case}: {over} / {under}", value, **bound))
    elif value is not None:
        run.case(case, over, "tokens/s").extra["of_fast"] = round(value, 3)

"""The cases of ``engine`` with layers in several processes: what a hand-over costs, tokens/s of one and of two.

Every process computes with one thread. A pipeline's tokens are compared with those of one process. CPU seconds, added
up, and memory are of all processes that are there, those of the engines that wait included. Also the program that is a
stage: ``python -m benchmarks.engine_stages LOW HIGH BEFORE BEHIND``; without layers (LOW = HIGH) it sends
back what comes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import psutil
import torch

from benchmarks.cold_cases import MODEL
from benchmarks.engine_models import asked, converted, prompts
from benchmarks.programs import ProgramFailed, Usage, usage
from benchmarks.record import Aim, percentile
from benchmarks.runner import Run, in_turn
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.stages import Hello, LayerRange, Part, Step
from sllm_runtime.worker.engine.choice import recognise
from sllm_runtime.worker.engine.ours.edge import Edges
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.pipeline.head import Pipeline
from sllm_runtime.worker.engine.ours.pipeline.stage import Stage
from sllm_runtime.worker.tensors import TypedTensors

KV_BYTES: Final = 64 << 20
PATIENCE_S: Final = 60.0
PROMPT: Final = 64
TOKENS: Final = 128
TRIPS: Final = 1000
"""In each round; a quick run makes a tenth."""
ECHO: Final = Hello(
    fingerprint="", level="exact-4", dtype="bfloat16", hidden=256, rows=320, slots=2, layers=(LayerRange(0, 1),),
    pages=1, shared=True,
)  # fmt: skip
MOST_MS: Final = 0.3
CASES: Final = ("stages_hand_over", "stages_throughput")


def model() -> Decoder:
    """The demo model in bfloat16, the same in every process."""
    raw = json.loads((MODEL / "config.json").read_bytes())
    tensors = TypedTensors(converted(), torch.bfloat16)
    known = recognise(raw, "auto", tensors, tensors.shapes, torch.bfloat16)
    if known is None:
        raise ProgramFailed("the demo model is none of ours")
    return known.decoder


@contextlib.contextmanager
def engine(stages: int) -> Iterator[OurEngine]:
    """An engine whose layers are shared out over so many processes, this one included."""
    made = model()
    if stages == 1:
        yield OurEngine(made, frozenset(), EXACT, KV_BYTES)
        return
    borders = list(pairwise(made.count * number // stages for number in range(stages + 1)))
    pairs = [socket.socketpair() for _ in borders]
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        for number, (low, high) in enumerate(borders[1:], 1):
            fds = (pairs[number - 1][1].fileno(), pairs[number][0].fileno())
            command = [sys.executable, "-m", "benchmarks.engine_stages", *map(str, (low, high, *fds))]
            started.append(stack.enter_context(_ended(subprocess.Popen(command, pass_fds=fds))))
        edges = Edges(pairs[-1][1], pairs[0][0], patience_s=PATIENCE_S)
        for before, behind in zip([pair[0] for pair in pairs[1:]], [pair[1] for pair in pairs[:-1]], strict=True):
            before.close()
            behind.close()
        high = borders[0][1]
        head = Pipeline(made, EXACT, high, edges, depth=stages, kv_bytes=KV_BYTES, fingerprint="same")
        with contextlib.closing(head):
            yield OurEngine(made, frozenset(), EXACT, KV_BYTES, runner=head)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()


def generate(core: OurEngine, batch: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds for ``TOKENS - 1`` tokens of each request after its first, and all ids."""
    ids: list[list[int]] = [[] for _ in range(batch)]
    for number, prompt in enumerate(prompts(batch, PROMPT, core.vocabulary)):
        core.add(asked(number, prompt, TOKENS))
    began = 0.0
    while core.busy:
        for event in core.step():
            ids[event.request] += event.ids
        if not began and all(ids):
            began = time.perf_counter()
    return time.perf_counter() - began, [tuple(each) for each in ids]


def of_all() -> Usage:
    """Of this process and of those that it has started."""
    own = psutil.Process()
    return usage([own, *own.children(recursive=True)])


def measure(run: Run, cases: Sequence[str]) -> None:
    """The cases of ``CASES`` that are asked for, alternating."""
    if "stages_hand_over" in cases:
        _round_trips(run)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.ExitStack() as stack:
            cores = {count: stack.enter_context(engine(count)) for count in (1, 2, 3)}
            if "stages_hand_over" in cases:
                _hand_over(run, cores)
            if "stages_throughput" in cases:
                _throughput(run, cores)
    finally:
        torch.set_num_threads(threads)


def _round_trips(run: Run) -> None:
    """What one hand-over takes without any layer, both ends idle: half of what a step of one row takes that is
    announced, and its padded rows there and back."""
    case = run.case("stages_hand_over", "one hand-over, no layers", "ms/token")
    case.notes = "half of a way there and back; between two processes that wait for each other"
    (one, two), (three, four) = socket.socketpair(), socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.engine_stages", "0", "0", str(two.fileno()), str(three.fileno())]
    with _ended(subprocess.Popen(command, pass_fds=(two.fileno(), three.fileno()))):
        two.close()
        three.close()
        edges = Edges(four, one, patience_s=PATIENCE_S)
        with contextlib.closing(edges):
            edges.open(ECHO)
            edges.accept(PATIENCE_S)
            rows = torch.zeros(4, ECHO.hidden, dtype=torch.bfloat16)
            trips = TRIPS // 10 if run.quick else TRIPS
            for number in range(1, run.rounds + 1):
                with run.spending(of_all, case):
                    took = [_round_trip(edges, step, rows) for step in range((number - 1) * trips, number * trips)]
                case.samples.append(round(statistics.median(took) * 500, 4))
                case.extra = {"p99_ms": round(percentile(took, 99) * 500, 4)}
    value = case.median if len(case.samples) >= run.least else None
    run.aims.append(Aim("stages_hand_over: one hand-over, ms", value, at_most=MOST_MS))


def _round_trip(edges: Edges, step: int, rows: torch.Tensor) -> float:
    began = time.perf_counter()
    edges.send(Step(step, (Part(300, 1, True, (1, 2, 3)),)))
    edges.send_rows(step, rows)
    edges.receive_rows(step, len(rows))
    return time.perf_counter() - began


def echo(edges: Edges) -> None:
    """Send back what comes, until nothing does."""
    edges.accept(PATIENCE_S)
    edges.open(ECHO)
    with contextlib.suppress(InstanceLost):
        while isinstance(step := edges.receive(PATIENCE_S), Step):
            edges.send_rows(step.number, edges.receive_rows(step.number, 4))
    edges.close()


def _hand_over(run: Run, cores: dict[int, OurEngine]) -> None:
    """Time per token of one request: what stages add to one process, for each time that rows change hands."""
    case = "stages_hand_over"
    for number in range(run.rounds + 1):
        took: dict[int, float] = {}
        for count, core in in_turn(tuple(cores.items()), number):
            counted = [run.case(case, _name(count), "ms/token")] if number else []  # the first round warms up
            with run.spending(of_all, *counted):
                took[count] = _checked(core, 1, cores) * 1000 / (TOKENS - 1)
            for made in counted:
                made.samples.append(round(took[count], 4))
        for count in (2, 3) if number else ():
            added = run.case(case, f"added by {count} stages", "ms/token")
            added.samples.append(round(took[count] - took[1], 4))
            added.notes = f"rows change hands {count} times"
    added = run.case(case, "added by 2 stages", "ms/token")
    value = added.median if len(added.samples) >= run.least else None
    run.aims.append(Aim(f"{case}: added by 2 stages, ms/token", value, at_most=MOST_MS))


def _throughput(run: Run, cores: dict[int, OurEngine]) -> None:
    """Tokens/s of several requests: stages compute several steps at once."""
    for number in range(run.rounds + 1):
        for batch in (1, 8, 16):
            for count in in_turn((1, 2), number):
                counted = [run.case(f"stages_throughput_b{batch}", _name(count), "tokens/s")] if number else []
                with run.spending(of_all, *counted):
                    seconds = _checked(cores[count], batch, cores)
                for case in counted:
                    case.samples.append(round(batch * (TOKENS - 1) / seconds, 1))


_TOKENS: dict[int, list[tuple[int, ...]]] = {}


def _checked(core: OurEngine, batch: int, cores: dict[int, OurEngine]) -> float:
    seconds, ids = generate(core, batch)
    if batch not in _TOKENS:
        _TOKENS[batch] = generate(cores[1], batch)[1]
    if ids != _TOKENS[batch]:
        raise ProgramFailed("stages gave other tokens than one process")
    return seconds


def _name(count: int) -> str:
    return "sllm, one process" if count == 1 else f"sllm, {count} stages"


def stage(low: int, high: int, before: int, behind: int) -> None:
    """Be a stage until the one before ends."""
    torch.set_num_threads(1)
    edges = Edges(socket.socket(fileno=before), socket.socket(fileno=behind), patience_s=PATIENCE_S)
    if low == high:
        echo(edges)
        return
    Stage(model(), low, high, edges, kv_bytes=KV_BYTES, fingerprint="same").run()


if __name__ == "__main__":
    stage(*map(int, sys.argv[1:]))

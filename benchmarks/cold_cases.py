"""The cases of ``cold_start`` that run the coder model."""

from __future__ import annotations

import contextlib
import functools
import http.client
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import cold_peers
from benchmarks.cold_peers import First, RayServe
from benchmarks.platform import Answer, Platform
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, ROOT, Program, ProgramFailed, peers_missing
from benchmarks.record import Aim, Case, mean_with, tail
from benchmarks.runner import Run, in_turn
from benchmarks.streaming import PACED
from sllm_runtime.platform.nats_server import free_port
from sllm_runtime.protocol.timeline import Span
from sllm_runtime.worker.imports import QUIET_S

CODER: Final = ROOT / "functions" / "coder" / "function.py"
MODEL: Final = CODER.parent / "model"
PROMPT: Final = "def "
TOKENS: Final = 8
TWENTY: Final = 20
WITH_POOL: Final = ("warm_pool", "twenty")
_ARGUMENTS: Final = {"prompt": PROMPT, "max_tokens": TOKENS}
_ONE_TOKEN: Final[dict[str, object]] = {"count": 1, "interval": 0.0}
_GONE_S: Final = 5.0
NOISE_MS: Final = -100.0
"""Of a difference from a limit: what is further below has another reason, and that limit is none."""
_QUIET_TRIES: Final = 15
_IDLE_CPU_S: Final = 0.2
_STAGES: Final = ("queue", "sandbox", "convert", "import", "weights", "setup", "first_token")


@dataclass
class Check:
    """Every system's text must be the first one's."""

    text: str = ""
    by: str = ""

    def same(self, system: str, text: str) -> None:
        """Raise ``ProgramFailed`` for another text."""
        if self.by and text != self.text:
            raise ProgramFailed(f"{system} continued {PROMPT!r} with {text!r}, {self.by} with {self.text!r}")
        self.text, self.by = text, self.by or system


@dataclass
class Stages:
    """Medians of the stages over the samples of one case."""

    spans: dict[str, list[float]] = field(default_factory=dict)

    def add(self, spans: Sequence[Span]) -> None:
        for span in spans:
            if span.name in _STAGES:
                self.spans.setdefault(span.name, []).append(span.ms)

    def into(self, case: Case) -> None:
        for name in _STAGES:
            if name in self.spans:
                case.extra[f"{name}_ms"] = round(statistics.median(self.spans[name]), 2)


def with_pool(run: Run, directory: Path, cases: Sequence[str]) -> None:
    """Cases on a platform with the default pool, with the peers beside them."""
    check = Check()
    work: dict[str, Callable[[Platform], None]] = {
        "warm_pool": lambda platform: warm_pool(run, platform, directory, check),
        "twenty": lambda platform: twenty(run, platform, check),
    }
    with run.attempt("a platform with a pool"), Platform(directory / "pool") as platform:
        platform.deploy(CODER, keep_alive=0.0)
        until_quiet(platform)
        for case in cases:
            with run.attempt(case):
                work[case](platform)


def until_quiet(platform: Platform) -> None:
    """What the fork server imports while nobody asks is imported: it would be noise in the first rounds."""
    for _ in range(_QUIET_TRIES):
        before = platform.program.usage().cpu_s
        time.sleep(2 * QUIET_S)
        if platform.program.usage().cpu_s - before < _IDLE_CPU_S:
            return


def cold_call(platform: Platform, case: Case, stages: Stages, check: Check) -> None:
    """One sample of ours."""
    platform.until_cold("coder")
    answer = measured(platform, case, lambda: platform.stream("coder", _ARGUMENTS))
    stages.add(answer.spans)
    check.same("sllm", answer.text)


def measured(platform: Platform, case: Case, call: Callable[[], Answer]) -> Answer:
    """Take the sample and what it cost the platform into ``case``."""
    before = platform.program.usage()
    answer = call()
    after = platform.program.usage()
    case.take(round(answer.first_ms, 2), after.cpu_s - before.cpu_s, after.pss_mib)
    return answer


def warm_pool(run: Run, platform: Platform, directory: Path, check: Check) -> None:
    """Ours and all peers in turn, then more of ours for p99."""
    case, stages = run.case("warm_pool", "sllm"), Stages()
    with contextlib.ExitStack() as stack:
        peers = _peers(run, stack, directory)
        turns = [functools.partial(cold_call, platform, case, stages, check)]
        turns += [functools.partial(_peer, run.case("warm_pool", name), first, check) for name, first in peers.items()]
        for number in range(run.rounds):
            for turn in in_turn(turns, number):
                turn()
    while len(case.samples) < (10 if run.quick else 200):
        cold_call(platform, case, stages, check)
    stages.into(case)
    case.extra |= tail(case.samples, "_ms")
    value = case.median if len(case.samples) >= 100 else None
    run.aims.append(Aim("warm_pool: request to first token, ms (median)", value, at_most=150.0))


def _peers(run: Run, stack: contextlib.ExitStack, directory: Path) -> dict[str, Callable[[], First]]:
    found: dict[str, Callable[[], First]] = {
        "plain script": lambda: cold_peers.plain(directory, MODEL, PROMPT, TOKENS),
    }
    if reason := peers_missing():
        for name in ("ray serve", "bentoml"):
            run.case("warm_pool", name).not_run = reason
        return found
    found["bentoml"] = lambda: cold_peers.bentoml(directory, MODEL, PROMPT, TOKENS)
    run.case("warm_pool", "bentoml").notes = "does not scale to zero: the server is started for the call"
    try:
        ray = stack.enter_context(cold_peers.ray_serve(directory, MODEL))
    except ProgramFailed as error:
        run.case("warm_pool", "ray serve").not_run = str(error)
        return found
    found["ray serve"] = lambda: _ray_first(ray)
    return found


def _ray_first(ray: RayServe) -> First:
    ray.until_cold()
    return ray.first(PROMPT, TOKENS)


def _peer(case: Case, first: Callable[[], First], check: Check) -> None:
    """One sample of a peer; one that fails is listed with its reason and not asked again."""
    if case.not_run:
        return
    try:
        made = first()
    except (OSError, http.client.HTTPException, ProgramFailed) as error:
        case.not_run = f"failed: {error}"[:600]
        return
    check.same(case.system, made.text)
    take(case, made)


def take(case: Case, made: First) -> None:
    """Add it to its case."""
    case.take(round(made.first_ms, 2), made.cpu_s, made.mib)


def pool_empty(run: Run, directory: Path) -> None:
    """Nothing imported: the fork server is killed and its workers with it; the request follows at once. A platform for
    each sample, since a fork server that ends again and again is started with more and more delay."""
    case, stages, imports = run.case("pool_empty", "sllm"), Stages(), run.case("pool_empty", "bare import")
    check = Check()

    def bare(_number: int) -> None:
        take(imports, cold_peers.bare_import(directory))

    def ours(number: int) -> None:
        with Platform(directory / f"empty-{number}") as platform:
            platform.deploy(CODER, keep_alive=0.0)
            platform.until_cold("coder")
            _without_fork_server(platform)
            answer = measured(platform, case, lambda: platform.stream("coder", _ARGUMENTS))
        stages.add(answer.spans)
        check.same("sllm", answer.text)

    for number in range(run.rounds):
        for turn in in_turn((bare, ours), number):
            turn(number)
    stages.into(case)
    warm = run.case("warm_pool", "sllm").median
    value = None
    if warm is not None and len(case.samples) >= run.least and case.median and imports.median:
        value = round(case.median - imports.median - warm, 2)
    aim = "pool_empty: sllm - bare import - warm_pool, ms (medians)"
    run.aims.append(Aim(aim, value, at_least=NOISE_MS, at_most=100.0))


def _without_fork_server(platform: Platform) -> None:
    """Kill it and wait until the node has noticed."""
    zygote = platform.process("sllm-zygote")
    zygote.kill()
    until = time.monotonic() + _GONE_S
    while platform.pool_idle():
        if time.monotonic() > until:
            raise ProgramFailed("the node still counts warm sandboxes although their fork server is dead")
        time.sleep(0.002)


def without_pool(run: Run, directory: Path) -> None:
    """Each start forks its sandbox when it is asked for."""
    case, stages, check = run.case("pool_none", "sllm"), Stages(), Check()
    with Platform(directory / "none", {"SLLM_POOL_SIZE": "0"}) as platform:
        platform.deploy(CODER, keep_alive=0.0)
        until_quiet(platform)
        for _ in range(run.rounds):
            cold_call(platform, case, stages, check)
    stages.into(case)


def twenty(run: Run, platform: Platform, check: Check) -> None:
    """Twenty functions, one call each, at the same moment."""
    case, stages = run.case("twenty", "sllm"), Stages()
    names = [
        platform.deploy(CODER, name=f"coder-{number}", keep_alive=0.0, memory=256 * 2**20)
        for number in range(1, TWENTY + 1)
    ]
    every: list[float] = []
    for _ in range(run.rounds):
        platform.until_cold("coder", *names)
        before = platform.program.usage()
        answers = at_once(platform, names)
        after = platform.program.usage()
        last = round(max(answer.first_ms for answer in answers), 2)
        case.take(last, after.cpu_s - before.cpu_s, after.pss_mib)
        for answer in answers:
            every.append(answer.first_ms)
            stages.add(answer.spans)
            check.same("sllm", answer.text)
    stages.into(case)
    case.extra["each_p50_ms"], case.extra["each_min_ms"] = round(statistics.median(every), 2), round(min(every), 2)


def at_once(platform: Platform, names: Sequence[str]) -> list[Answer]:
    """Call all functions from threads that start together."""
    barrier, answers, errors = threading.Barrier(len(names)), [], []

    def call(name: str) -> None:
        try:
            barrier.wait(_GONE_S)
            answers.append(platform.stream(name, _ARGUMENTS))
        except (ProgramFailed, OSError, threading.BrokenBarrierError) as error:
            errors.append(f"{name}: {error}")

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # every call has its own deadline
    if errors:
        raise ProgramFailed(f"{len(errors)} of {len(names)} calls failed; first: {errors[0]}")
    return answers


def platform(run: Run, directory: Path) -> None:
    """From nothing until a function of one token has answered, deployed on it meanwhile: ``sllm up``, and Ray with
    Serve."""
    case, other = run.case("platform", "sllm", "s"), run.case("platform", "ray serve", "s")
    other.not_run = "left out with --quick" if run.quick else peers_missing()
    for number in range(run.rounds):
        for which, up in in_turn(((case, _sllm_up), (other, _ray_up)), number):
            up(which, directory / f"{up.__name__[1:]}-{number}")


def _sllm_up(case: Case, home: Path) -> None:
    with Platform(home) as started:
        began = started.program.began
        name = started.deploy(PACED)
        _one_token(started.stream(name, _ONE_TOKEN).text)
        took, usage = time.monotonic() - began, started.program.usage()
        case.extra["ready_s"] = round(mean_with(case.extra.get("ready_s"), len(case.samples), started.ready_s), 3)
        case.take(round(took, 3), usage.cpu_s, usage.pss_mib)


def _ray_up(case: Case, scratch: Path) -> None:
    if case.not_run:
        return
    scratch.mkdir()
    port = free_port()
    argv = [str(PEERS / "python"), str(cold_peers.SCRIPTS / "ray_stream.py"), str(port), str(scratch / "r")]
    env = {**PEER_ENVIRONMENT, "HOME": str(scratch)}
    try:
        with Program(argv, scratch / "log", env=env, cwd=scratch, own_namespace=True) as ray:
            ray.hear(cold_peers.READY_S)
            _, text = cold_peers.post_text(port, "/stream", _ONE_TOKEN)
            took, usage = time.monotonic() - ray.began, ray.usage()
            _one_token(text.lstrip('"'))
            case.take(round(took, 3), usage.cpu_s, usage.pss_mib)
    except (OSError, ProgramFailed) as error:
        case.not_run = str(error)[:600]


def _one_token(text: str) -> None:
    """Raise ``ProgramFailed`` for anything else."""
    if not re.match(r"t0@\d+\.", text):
        raise ProgramFailed(f"the one token was {text!r}")

"""The cases of ``cold_start`` that run the coder model."""

from __future__ import annotations

import contextlib
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
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, ROOT, Program, ProgramFailed, free_port, peers_missing
from benchmarks.record import Aim, Case, percentile
from benchmarks.runner import Run
from sllm_runtime.protocol.timeline import Span
from sllm_runtime.worker.imports import QUIET_S

CODER: Final = ROOT / "functions" / "coder" / "function.py"
MODEL: Final = CODER.parent / "model"
PROMPT: Final = "def "
TOKENS: Final = 8
TWENTY: Final = 20
WITH_POOL: Final = ("warm_pool", "twenty")
_ARGUMENTS: Final = {"prompt": PROMPT, "max_tokens": TOKENS}
_GONE_S: Final = 5.0
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
    with Platform(directory / "pool") as platform:
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
    case.cpu_s = round(mean_with(case.cpu_s, len(case.samples), after.cpu_s - before.cpu_s), 3)
    case.peak_rss_mib = round(max(case.peak_rss_mib or 0.0, after.pss_mib))
    case.samples.append(round(answer.first_ms, 2))
    return answer


def mean_with(mean: float | None, count: int, value: float) -> float:
    """The mean of ``count`` values and one more."""
    return ((mean or 0.0) * count + value) / (count + 1)


def warm_pool(run: Run, platform: Platform, directory: Path, check: Check) -> None:
    """Ours and all peers in turn, then more of ours for p99."""
    case, stages = run.case("warm_pool", "sllm"), Stages()
    with contextlib.ExitStack() as stack:
        peers = _peers(run, stack, directory)
        for _ in range(run.rounds):
            cold_call(platform, case, stages, check)
            for name, first in peers.items():
                _peer(run.case("warm_pool", name), first, check)
    while len(case.samples) < (10 if run.quick else 200):
        cold_call(platform, case, stages, check)
    stages.into(case)
    case.extra["p99_ms"] = percentile(case.samples, 99)
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
    except ProgramFailed as error:
        case.not_run = f"failed: {error}"[:600]
        return
    check.same(case.system, made.text)
    case.cpu_s = round(mean_with(case.cpu_s, len(case.samples), made.cpu_s), 3)
    case.samples.append(round(made.first_ms, 2))


def pool_empty(run: Run, directory: Path) -> None:
    """Nothing imported: the fork server is killed and its workers with it; the request follows at once. A platform for
    each sample, since a fork server that ends again and again is started with more and more delay."""
    case, stages, imports = run.case("pool_empty", "sllm"), Stages(), run.case("pool_empty", "bare import")
    check = Check()
    for number in range(run.rounds):
        imports.samples.append(round(cold_peers.bare_import(directory), 2))
        with Platform(directory / f"empty-{number}") as platform:
            platform.deploy(CODER, keep_alive=0.0)
            platform.until_cold("coder")
            _without_fork_server(platform)
            answer = measured(platform, case, lambda: platform.stream("coder", _ARGUMENTS))
        stages.add(answer.spans)
        check.same("sllm", answer.text)
    stages.into(case)
    warm = run.case("warm_pool", "sllm").median
    value = None
    if warm is not None and len(case.samples) >= run.least and case.median and imports.median:
        value = round(case.median - imports.median - warm, 2)
    run.aims.append(Aim("pool_empty: sllm - bare import - warm_pool, ms (medians)", value, at_most=100.0))


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
        case.cpu_s = round(mean_with(case.cpu_s, len(case.samples), platform.program.usage().cpu_s - before.cpu_s), 3)
        case.samples.append(round(max(answer.first_ms for answer in answers), 2))
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
    """``sllm up`` to ready, and Ray with Serve."""
    case, other = run.case("platform", "sllm", "s"), run.case("platform", "ray serve", "s")
    other.not_run = "left out with --quick" if run.quick else peers_missing()
    for number in range(run.rounds):
        with Platform(directory / f"up-{number}") as started:
            case.samples.append(round(started.ready_s, 3))
            usage = started.program.usage()
            case.cpu_s = round(mean_with(case.cpu_s, number, usage.cpu_s), 3)
            case.peak_rss_mib = round(max(case.peak_rss_mib or 0.0, usage.pss_mib))
        if other.not_run:
            continue
        began = time.monotonic()
        scratch = directory / f"ray-{number}"
        scratch.mkdir()
        argv = [str(PEERS / "python"), str(cold_peers.SCRIPTS / "ray_stream.py"), str(free_port()), str(scratch / "r")]
        env = {**PEER_ENVIRONMENT, "HOME": str(scratch)}
        try:
            with Program(argv, scratch / "log", env=env, cwd=scratch, own_namespace=True) as ray:
                ray.hear(cold_peers.READY_S)
                other.samples.append(round(time.monotonic() - began, 3))
        except ProgramFailed as error:
            other.not_run = str(error)[:600]

"""``python -m benchmarks.warm``: what the platform adds to a call's first token when an instance is ready.

``sllm``: from before the request's first byte is sent, over an open connection, to the first event with text at the
client. ``in process``: the same engine on the same model in one process, from the call of ``generate`` to its first
piece. Prompt ``def ``, eight tokens, greedy; one call at a time, the two in turn; both have answered calls before. The
texts are compared.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.cold_cases import CODER, MODEL, PROMPT, TOKENS, Check, Stages, mean_with
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, Program
from benchmarks.record import Aim, Case, percentile
from benchmarks.runner import Run, main

READY_S: Final = 120.0
_CALL_S: Final = 60.0
_WARM_UP: Final = 5


def measure(run: Run, _cases: Sequence[str]) -> None:
    """Calls in turn."""
    with tempfile.TemporaryDirectory(prefix="bw-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        argv = [sys.executable, "-m", "benchmarks.in_process", str(MODEL)]
        with Program(argv, directory / "engine.log", cwd=ROOT) as engine, Platform(directory / "p") as platform:
            platform.deploy(CODER, keep_alive=600.0)
            engine.hear(READY_S)
            with run.attempt("ttft"):
                _calls(run, platform, engine)


def _calls(run: Run, platform: Platform, engine: Program) -> None:
    http, inside = run.case("ttft", "sllm"), run.case("ttft", "in process")
    check, stages = Check(), Stages()
    count = 40 if run.quick else 300
    for number in range(-_WARM_UP, count):
        used = platform.program.usage().cpu_s, engine.usage().cpu_s
        answer = platform.stream("coder", {"prompt": PROMPT, "max_tokens": TOKENS})
        engine.say({"prompt": PROMPT, "max_tokens": TOKENS})
        said = engine.hear(_CALL_S)
        check.same("sllm", answer.text)
        check.same("in process", said["text"])
        if number >= 0:
            stages.add(answer.spans)
            _take(http, answer.first_ms, platform.program.usage().cpu_s - used[0])
            _take(inside, said["first_ms"], engine.usage().cpu_s - used[1])
    stages.into(http)
    for case in (http, inside):
        case.extra["p99_ms"] = percentile(case.samples, 99)
    enough = len(http.samples) >= 100 and http.median is not None and inside.median is not None
    value = round(http.median - inside.median, 3) if enough and http.median and inside.median else None
    run.aims.append(Aim("ttft: sllm - in process, ms (medians)", value, at_most=5.0))


def _take(case: Case, first_ms: float, cpu_s: float) -> None:
    case.cpu_s = round(mean_with(case.cpu_s, len(case.samples), cpu_s), 4)
    case.samples.append(round(first_ms, 3))


if __name__ == "__main__":
    sys.exit(main("warm", ("ttft",), measure))

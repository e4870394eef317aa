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

from benchmarks.cold_cases import CODER, MODEL, PROMPT, TOKENS, Check, Stages
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, Program, Usage
from benchmarks.record import Aim, Case, tail
from benchmarks.runner import Run, in_turn, main

READY_S: Final = 120.0
_CALL_S: Final = 60.0
_WARM_UP: Final = 5


def measure(run: Run, _cases: Sequence[str]) -> None:
    """Calls in turn."""
    with tempfile.TemporaryDirectory(prefix="bw-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        argv = [sys.executable, "-m", "benchmarks.in_process", str(MODEL)]
        log = directory / "engine.log"
        env = {"TMPDIR": name}  # where what it leaves is removed
        with (
            run.attempt("ttft"),
            Program(argv, log, env=env, cwd=ROOT) as engine,
            Platform(directory / "p") as platform,
        ):
            platform.deploy(CODER, keep_alive=600.0)
            engine.hear(READY_S)
            _calls(run, platform, engine)


def _calls(run: Run, platform: Platform, engine: Program) -> None:
    http, inside = run.case("ttft", "sllm"), run.case("ttft", "in process")
    check, stages = Check(), Stages()
    asked = {"prompt": PROMPT, "max_tokens": TOKENS}

    def ours(counted: bool) -> None:
        before = platform.program.usage()
        answer = platform.stream("coder", asked)
        check.same("sllm", answer.text)
        if counted:
            stages.add(answer.spans)
            _take(http, answer.first_ms, before, platform.program.usage())

    def theirs(counted: bool) -> None:
        before = engine.usage()
        engine.say(asked)
        said = engine.hear(_CALL_S)
        check.same("in process", said["text"])
        if counted:
            _take(inside, said["first_ms"], before, engine.usage())

    for number in range(-_WARM_UP, 40 if run.quick else 300):
        for turn in in_turn((ours, theirs), number):
            turn(number >= 0)
    stages.into(http)
    for case in (http, inside):
        case.extra |= tail(case.samples, "_ms")
    enough = len(http.samples) >= 100 and http.median is not None and inside.median is not None
    value = round(http.median - inside.median, 3) if enough and http.median and inside.median else None
    run.aims.append(Aim("ttft: sllm - in process, ms (medians)", value, at_most=5.0))


def _take(case: Case, first_ms: float, before: Usage, after: Usage) -> None:
    case.take(round(first_ms, 3), after.cpu_s - before.cpu_s, after.pss_mib)


if __name__ == "__main__":
    sys.exit(main("warm", ("ttft",), measure))

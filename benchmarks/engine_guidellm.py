"""The case of ``engine`` over OpenAI's routes: guidellm, a load generator of others, against the whole platform.

Requests of mixed lengths at random times, streamed, one instance with one thread. guidellm measures by itself, from its
send to the first token and between tokens, so its own processes' time is in the figures. Tokens are counted, not
compared: each request has to get as many as it asked for. Of the requests of a round, of which there are too few for a
99th percentile, the median and the worst are told. CPU seconds are the platform's, of a round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from benchmarks.cold_cases import CODER, MODEL
from benchmarks.platform import Platform
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, Program, ProgramFailed, Usage, peers_missing
from benchmarks.record import percentile, tail
from benchmarks.runner import Run

ROUTES: Final = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SYSTEM: Final = "sllm, by guidellm"
RATE: Final = 4.0
_PROMPT: Final = (16, 96, 256)
_OUTPUT: Final = (8, 48, 96)
"""Least, mean and most tokens."""
_REQUESTS: Final = 24
"""In each round."""
_DEADLINE_S: Final = 300.0


def measure(run: Run, case: str, directory: Path) -> None:
    """``<case>_<route>_ttft_p50`` and so on: percentiles over the requests of a round, each a sample."""
    if why := "left out with --quick: guidellm alone takes half a minute to start" if run.quick else _absent():
        run.case(case, SYSTEM).not_run = why
        return
    with Platform(directory / "platform") as platform:
        platform.deploy(CODER, name="coder", cpu=1.0, keep_alive=300.0, max_instances=1)
        platform.stream("coder", {"prompt": "def ", "max_tokens": 4})
        for name, route in ROUTES.items():
            before = platform.program.usage()
            rounds = _rounds(run, platform, route, directory)
            after = platform.program.usage()
            used = Usage((after.cpu_s - before.cpu_s) / len(rounds), after.pss_mib)
            for told in rounds:
                _take(run, f"{case}_{name}", told, used)


def _absent() -> str:
    """Why it cannot run; empty if it can."""
    if why := peers_missing():
        return why
    return "" if (PEERS / "guidellm").exists() else "no guidellm in .venv-peers; `make bench-peers` brings it"


def _rounds(run: Run, platform: Platform, route: str, directory: Path) -> list[dict[str, Any]]:
    """What guidellm tells of each round. Raises ``ProgramFailed``."""
    order = {
        "target": platform.url, "key": platform.token, "model": "coder", "route": route, "tokenizer": str(MODEL),
        "rate": RATE, "requests": _REQUESTS, "rounds": run.rounds,
        "prompt": _PROMPT, "output": _OUTPUT,
    }  # fmt: skip
    argv = (str(PEERS / "python"), str(Path(__file__).parent / "peers" / "guide.py"), json.dumps(order))
    with Program(argv, directory / "guidellm.log", env=PEER_ENVIRONMENT) as peer:
        found: list[dict[str, Any]] = peer.hear(_DEADLINE_S)["rounds"]
    return found


def _take(run: Run, case: str, told: dict[str, Any], used: Usage) -> None:
    if told["totals"]["successful"] != told["totals"]["total"]:
        raise ProgramFailed(f"{case}: not every request succeeded: {told['totals']}")
    if told["tokens"] != told["asked"]:
        raise ProgramFailed(f"{case}: {told['tokens']} tokens came where {told['asked']} were asked for")
    for what in ("ttft", "itl"):
        times = told[f"{what}_ms"]
        for name, value in {"p50": percentile(times, 50), **tail(times)}.items():
            made = run.case(f"{case}_{what}_{name}", SYSTEM)
            made.take(round(value, 2), used.cpu_s, used.pss_mib)
            made.notes = f"{RATE:g} requests a second" + ("" if what == "ttft" else "; a request's mean between tokens")

"""Cases of ``failover``: what whoever reads a stream sees when something on its way is killed.

A client reads a seeded stream of the demo model; when 50 events are here the fault strikes, and a sample is the longest
gap between two events from then on. Every stream is compared with the answer where nothing happened.
``worker``: the process that computes it. ``node``: its invoker and loaderd, with everything below them; a second node
is there, which has the model on its disk. ``gateway``: the one that runs the call and is read from, each in
turn, since a supervisor gives a process up that ends too often; the call is kept, and its client asks the other gateway
from its last event on. ``gateway_unkept``: the same of a call that nobody asked to keep. ``jetstream``: of three NATS
servers the one that leads the stream of the state, for a kept call. The supervisor stands still meanwhile: what was
killed is away until the stream has ended, however soon it would have been started again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos_client import GIVE_UP_S, Reader, Told
from benchmarks.chaos_faults import Field, gateways_of, until
from benchmarks.cold_cases import CODER
from benchmarks.heard import Heard, Sums
from benchmarks.nats_cluster import NatsCluster
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.record import Case, none_of
from benchmarks.runner import Run

STREAMS: Final = ("worker", "node", "gateway", "gateway_unkept", "jetstream")
ASK: Final = {"prompt": "class Parser", "max_tokens": 500, "temperature": 0.8, "seed": 7}
AT: Final = 50
TRIES: Final = 3
"""Faults until one meets a stream."""
KEPT: Final = ("gateway", "jetstream")
COMPONENTS: Final = {"node": ("invoker", "loaderd"), "gateway_unkept": ("gateway",)}
"""What a case kills that is not named like it."""
SETTINGS: Final = {"SLLM_PRELOAD": "engine", "SLLM_CONTROLLERS": "2"}


@dataclass(frozen=True)
class Place:
    """A platform with the demo model, the right answer, and the processes that are there while nothing happens."""

    platform: Platform
    field: Field
    function: str
    right: Sequence[Any]
    processes: Counter[str]

    def aim(self, case: str, url: str = "") -> Callable[[], None]:
        """What kills a worker, a node or the gateway of ``url``. Raises ``ProgramFailed`` if it is not there."""
        components = COMPONENTS.get(case, (case,))
        there = [[each for each in self.field.victims(name) if each.gateway in ("", url)] for name in components]
        if not all(there):
            raise ProgramFailed(f"no {' or '.join(components)} is there")
        pids = [min(victims, key=lambda victim: victim.name).pid for victims in there]

        def strike() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        return strike


def measure(run: Run, directory: Path, cases: Sequence[str]) -> None:
    """Those of STREAMS that are among the cases; ``jetstream`` on a platform of its own."""
    local = [case for case in cases if case in STREAMS and case != "jetstream"]
    with contextlib.ExitStack() as stack:
        place: Place | None = None
        for case in local:
            with run.attempt(case):
                place = place or stack.enter_context(_place(directory / f"local-{case}", {}))
                _case(run, place, case, functools.partial(place.aim, case))
    if "jetstream" in cases:
        with (
            run.attempt("jetstream"),
            NatsCluster(directory / "nats") as nats,
            _place(directory / "cluster", nats.env) as place,
        ):
            _case(run, place, "jetstream", functools.partial(_aim_at_leader, nats), nats.start_missing)


def _aim_at_leader(nats: NatsCluster, _url: str) -> Callable[[], None]:
    return functools.partial(nats.kill, nats.leader())


@contextlib.contextmanager
def _place(directory: Path, settings: dict[str, str]) -> Iterator[Place]:
    with Platform(directory, {**SETTINGS, **settings}, nodes=2, gateways=2) as platform:
        name = platform.deploy(CODER, keep_alive=3600.0, min_instances=1)
        field = Field(platform, name)
        platform.until_cold()
        place = Place(platform, field, name, platform.stream(name, ASK).values, field.processes())
        place.aim("node")()  # the other one takes the model from its source, once
        field.until_back(place.processes)
        yield place


def _case(
    run: Run,
    place: Place,
    case: str,
    aim: Callable[[str], Callable[[], None]],
    mend: Callable[[], None] | None = None,
) -> None:
    """``aim`` is told the gateway that is read from, and finds what is to be killed, which may take longer than a
    stream does; it says how."""
    found, sums = run.case(case, "sllm"), Sums()
    gateways = gateways_of(place.platform)
    try:
        for number in range(run.rounds if run.quick else 20):
            first = gateways[number % len(gateways) :] + gateways[: number % len(gateways)]
            gap = None
            for _ in range(TRIES):
                program = place.platform.program
                with run.spending(program.usage, found), program.starting_nothing():
                    gap = _gap(place, case, first, aim(first[0]), sums)
                if mend is not None:
                    mend()
                place.field.until_back(place.processes)
                if gap is not None:
                    break
            else:
                raise ProgramFailed(f"{case}: the stream had ended before the fault, {TRIES} times")
            found.samples.append(round(gap * 1e3, 1))
            run.note(f"{case}: {found.samples[-1]:g} ms")
    finally:
        judge(run, found, sums)


def judge(run: Run, found: Case, sums: Sums) -> None:
    """The zero aims of a case: of every stream that was struck, those that broke off too."""
    found.extra |= {"tokens": sums.events, "wrong": sums.wrong, "broken": sums.broken}
    for what, count in {"tokens lost, repeated or changed": sums.wrong, "streams broken off": sums.broken}.items():
        run.aims.append(none_of(f"{found.case}: {what}", count, of=sums.streams, least=run.least))


def _gap(place: Place, case: str, gateways: Sequence[str], strike: Callable[[], None], sums: Sums) -> float | None:
    """The longest time without an event from the fault on, in seconds; read from the first of ``gateways``. None: the
    stream had ended before it, as one whose first events were all late may."""
    told = Told(Heard(0), kept=case in KEPT)
    reader = Reader(gateways, place.platform.token, place.function, ASK, told, first=0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read)
        until(lambda: len(told.heard.ids) >= AT or reading.done(), "the stream does not begin")
        at = time.monotonic()
        strike()
        reading.result(GIVE_UP_S)
    sums.add(told.heard, place.right)
    if told.heard.error:  # its reader has given up: no event came from the fault on
        return time.monotonic() - at
    return told.gap(at, math.inf)

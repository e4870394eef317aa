"""``python -m benchmarks.migration``: running calls move between two nodes, back and forth, while their callers read.

Four callers stream all the time, greedy and seeded, from one instance of the demo model that computes them in one
batch; no token is delayed. ``move``: ``POST /instances/{instance}/migrate`` again and again, each carrying over what
runs then; counted is each call that moved (the gateway's own count). ``restart``: the worker is killed instead, and its
calls are resumed on a new instance from their tokens (stop and restart). ``still``: as long with neither.

Every stream is compared, event by event, with the answer of the same call where nothing happened: lost and repeated by
the events' ids, different by their values. The pause of a call is the gap between two of its events in which it went
over, by the timeline that ends its stream (the longest within one interval of that moment), in mean intervals of the
same call. Beside it, as ``longest``, and for the other cases: the longest gap from the command until it is over; in it
the destination starts, prefills, and computes on the cores that the source has.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.cold_cases import CODER
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, Case, percentile
from benchmarks.runner import Run, main
from sllm.sse import Parser
from sllm_runtime.protocol import timeline
from sllm_runtime.protocol.http import API

CALLERS: Final = 4
TOKENS: Final = 800
ASKS: Final = tuple(
    {"prompt": prompt, "max_tokens": TOKENS, "temperature": temperature, "seed": 7}
    for prompt in ("class Parser", "def ", "import os\n", "    return ")
    for temperature in (0.0, 0.8)
)
WAIT_S: Final = 60.0
STILL_S: Final = 1.0
MOVED: Final = "sllm_calls_moved_total{"


@dataclass(frozen=True)
class Window:
    """From a command until what followed from it was over, by ``time.monotonic``."""

    begin: float
    end: float


@dataclass
class Heard:
    """One stream as its caller saw it."""

    ask: int
    ids: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    moves: list[float] = field(default_factory=list)
    """When it went over to another instance."""

    @property
    def usual(self) -> float:
        """The mean gap (events that came together have none between them, so a median says nothing)."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


@dataclass
class Sums:
    """Over all streams."""

    streams: int = 0
    events: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0

    @property
    def wrong(self) -> int:
        return self.lost + self.repeated + self.different

    def add(self, heard: Heard, right: Sequence[Any]) -> None:
        """Compare one whole stream with the answer of the same call."""
        seen = set(heard.ids)
        self.streams += 1
        self.events += len(heard.ids)
        self.lost += len(set(range(len(right))) - seen)
        self.repeated += len(heard.ids) - len(seen)
        pairs = zip(heard.ids, heard.values, strict=True)
        self.different += sum(at >= len(right) or right[at] != value for at, value in pairs)


def longest(heard: Heard, windows: Sequence[Window]) -> list[float]:
    """The longest gap in each window that this stream ran through, in its mean intervals."""
    gaps = list(itertools.pairwise(heard.times))
    inside = [[b - a for a, b in gaps if b >= window.begin and a <= window.end] for window in windows]
    through = zip(windows, inside, strict=True)
    return [max(found) / heard.usual for window, found in through if found and heard.times[-1] > window.end]


def pauses(heard: Heard) -> list[float]:
    """The gap in which it went over, for each time that it did, in its mean intervals."""
    if len(heard.times) < 2:
        return []
    return longest(heard, [Window(at - heard.usual, at + heard.usual) for at in heard.moves])


def moves(heard: Heard, comment: str) -> list[float]:
    """When it went over, by the clock of its events: its first one came when the gateway had it."""
    spans = timeline.parse_comment(comment)
    first = next((span.at for span in spans if span.name == timeline.TOKENS), 0.0)
    return [heard.times[0] + (span.at - first) / 1e3 for span in spans if span.name == timeline.MOVE]


class Load:
    """The callers: threads that stream one call after the other until the end."""

    def __init__(self, platform: Platform, right: Sequence[Sequence[Any]]) -> None:
        self._platform, self._right = platform, right
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._now: dict[int, Heard] = {}
        self.heard: list[Heard] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CALLERS) as pool:
            callers = [pool.submit(self._call_on, caller) for caller in range(CALLERS)]
            try:
                yield
            finally:
                self._stop.set()
            for caller in callers:
                caller.result()

    def _call_on(self, caller: int) -> None:
        while not self._stop.is_set():
            heard = self._now[caller] = Heard(next(self._numbers) % len(ASKS))
            read(self._platform, heard)
            self.heard.append(heard)

    def until_all_hear(self) -> None:
        """Until each caller has had something since now: nothing strikes a call twice before it has said a word."""
        begin, until = time.monotonic(), time.monotonic() + WAIT_S
        while not all(heard.times and heard.times[-1] > begin for heard in list(self._now.values())):
            if time.monotonic() > until:
                raise ProgramFailed(f"a caller heard nothing for {WAIT_S:g} s")
            time.sleep(0.005)

    def sums(self) -> Sums:
        """Raises ``ProgramFailed`` if a stream broke off."""
        sums = Sums()
        for heard in self.heard:
            if heard.error:
                raise ProgramFailed(f"a stream ended with {heard.error}")
            sums.add(heard, self._right[heard.ask])
        return sums


def read(platform: Platform, heard: Heard) -> Heard:
    """One stream to its end."""
    parser = Parser()
    headers = {"Authorization": f"Bearer {platform.token}", "Accept": "text/event-stream"}
    url, body = f"{platform.url}/fn/coder", ASKS[heard.ask]
    with httpx.stream("POST", url, json=body, headers=headers, timeout=WAIT_S) as response:
        for data in response.iter_bytes():
            now = time.monotonic()
            for event in parser.feed(data):
                if event.event == "error":
                    heard.error = event.data[:300]
                elif event.comment is not None and event.comment.startswith("timeline ") and heard.times:
                    heard.moves = moves(heard, event.comment)
                elif event.comment is None and event.event == "message" and not event.done:
                    heard.ids.append(int(event.id or 0))
                    heard.values.append(json.loads(event.data))
                    heard.times.append(now)
    return heard


def ready(platform: Platform) -> dict[str, Any]:
    """The one instance that takes calls."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        found = [each for each in platform.function("coder")["instances"] if each["state"] == "READY"]
        if len(found) == 1:
            instance: dict[str, Any] = found[0]
            return instance
        time.sleep(0.01)
    raise ProgramFailed(f"not one ready instance within {WAIT_S:g} s")


def moved(platform: Platform) -> int:
    """Calls that the gateway has moved so far."""
    text = httpx.get(f"{platform.url}/metrics", headers={"Authorization": f"Bearer {platform.token}"}).text
    return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith(MOVED))


def move(platform: Platform) -> None:
    """All that runs goes to the other node."""
    instance = ready(platform)
    to = "n2" if instance["node"] == "n1" else "n1"
    path = f"{API}/instances/{instance['instance']}/migrate"
    state = ""
    while state not in ("DONE", "ABANDONED"):
        answer = platform.client.request("POST", path, json={"to": to})
        state = answer["state"]
    if state != "DONE":
        raise ProgramFailed(f"a migration was abandoned: {answer['note']}")


def restart(platform: Platform) -> None:
    """The worker dies; its calls go on at a new one."""
    old = ready(platform)["instance"]
    os.kill(platform.process(f"sllm-worker {old}").pid, signal.SIGKILL)
    while ready(platform)["instance"] == old:
        time.sleep(0.01)


def windows_of(load: Load, act: Callable[[], None], enough: Callable[[int], bool]) -> list[Window]:
    """``act`` again and again, and how long each took."""
    windows: list[Window] = []
    while not enough(len(windows)):
        load.until_all_hear()
        begin = time.monotonic()
        act()
        windows.append(Window(begin, time.monotonic()))
    return windows


def measure(run: Run, cases: Sequence[str]) -> None:
    """Each case on one platform of two nodes, one after the other."""
    wanted = 100 if run.quick else 1000
    run.settings.update(callers=CALLERS, tokens=TOKENS, migrations=wanted)
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="bm-", ignore_cleanup_errors=True))
        platform = stack.enter_context(Platform(Path(name) / "p", nodes=2))
        platform.deploy(CODER, keep_alive=600.0, concurrency=2 * CALLERS)
        right = [read(platform, Heard(ask)).values for ask in range(len(ASKS))]
        acts: dict[str, tuple[Callable[[], None], Callable[[int], bool]]] = {
            "still": (lambda: time.sleep(STILL_S), lambda count: count >= 2 * run.rounds),
            "restart": (lambda: restart(platform), lambda count: count >= run.rounds),
            "move": (lambda: move(platform), lambda _: moved(platform) >= wanted),
        }
        for case in cases:
            with run.attempt(case, "intervals"):
                _case(run, platform, case, acts[case], right)


def _case(
    run: Run,
    platform: Platform,
    name: str,
    act: tuple[Callable[[], None], Callable[[int], bool]],
    right: Sequence[Sequence[Any]],
) -> None:
    load = Load(platform, right)
    with load.running():
        windows = windows_of(load, *act)
        load.until_all_hear()
    case, sums = run.case(name, "sllm", "intervals"), load.sums()
    gaps = [round(gap, 2) for heard in load.heard for gap in longest(heard, windows)]
    case.samples = [round(gap, 2) for heard in load.heard for gap in pauses(heard)] if name == "move" else gaps
    took = statistics.median(window.end - window.begin for window in windows)
    case.extra = {"lost": sums.lost, "repeated": sums.repeated, "different": sums.different}
    case.extra |= {"streams": sums.streams, "events": sums.events, "times": len(windows), "took_s": round(took, 3)}
    if case.samples:
        case.extra["p99"] = percentile(case.samples, 99)
    if name == "move" and gaps:
        case.extra |= {"longest_p50": percentile(gaps, 50), "longest_p99": percentile(gaps, 99)}
    if name == "move":
        _judge(run, case, moved(platform))


def _judge(run: Run, case: Case, count: int) -> None:
    case.extra["calls_moved"] = count
    for what in ("lost", "repeated", "different"):
        run.aims.append(Aim(f"move: tokens {what}, {count} calls moved", case.extra[what], at_most=0))
    enough = len(case.samples) >= run.least
    run.aims.append(Aim("move: pause p50, token intervals", case.median if enough else None, at_most=2.0))
    p99 = case.extra.get("p99") if len(case.samples) >= 100 else None
    run.aims.append(Aim("move: pause p99, token intervals", p99, at_most=2.0))


if __name__ == "__main__":
    sys.exit(main("migration", ("still", "restart", "move"), measure))

"""What the cases of ``migration`` share: callers that stream from a function of two nodes, and what befalls it."""

from __future__ import annotations

import contextlib
import gc
import http.client
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from benchmarks.heard import Heard, Piece, Sums, Window, understand
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed, title
from sllm_runtime.protocol.http import API

CALLERS: Final = 4
WAIT_S: Final = 60.0
PIECE: Final = 2**16
AGAIN_S: Final = 0.05
"""A caller whose stream broke off waits so long before its next call."""
APART: Final = ("sllm-gateway", "sllm-controller", "nats-server")
"""What ``infra/terraform`` puts on other machines than instances."""
END: Final = b"data: [DONE]"
VALUE: Final = re.compile(rb"id: \d+\ndata: ")
"""In the bytes of a stream: neither progress nor a comment."""


@dataclass(frozen=True)
class Called:
    """A function on a platform of two nodes, and what its callers ask, in turn. ``anew``: they make a call anew when
    its stream breaks off."""

    platform: Platform
    function: str
    asks: Sequence[Mapping[str, Any]]
    anew: bool = False

    def right(self) -> list[Sequence[Any]]:
        """The answer of each ask where nothing happens."""
        heard = [Heard(ask) for ask in range(len(self.asks))]
        with ThreadPoolExecutor(CALLERS) as pool:
            for future in [pool.submit(receive, self, each) for each in heard]:
                future.result()
        for each in heard:
            understand(each)
        if wrong := next((each.error for each in heard if each.error), ""):
            raise ProgramFailed(f"a stream to which nothing happened ended with {wrong}")
        return [each.values for each in heard]


class Load:
    """The callers: threads that stream one call after the other until the end."""

    def __init__(self, called: Called, right: Sequence[Sequence[Any]]) -> None:
        self._called, self._right = called, right
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._now: dict[int, Heard] = {}
        self.heard: list[Heard] = []
        self.at_once = True
        """Whether no caller waited for a core (``hear_at_once``)."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            with _uncollected(), ThreadPoolExecutor(CALLERS) as pool:
                callers = [pool.submit(self._call_on, caller) for caller in range(CALLERS)]
                try:
                    yield
                finally:
                    self._stop.set()
                for caller in callers:
                    caller.result()
        finally:
            for heard in self.heard:
                understand(heard)

    def _call_on(self, caller: int) -> None:
        self.at_once = hear_at_once() and self.at_once
        while not self._stop.is_set():
            heard = self._now[caller] = Heard(next(self._numbers) % len(self._called.asks))
            receive(self._called, heard)
            self.heard.append(heard)
            if heard.error and not self._called.anew:
                self._stop.wait(AGAIN_S)

    def until_all_hear(self) -> None:
        """Until each caller has had a value since now: nothing strikes a call twice before it has said a word. That it
        waits, or who takes it, is none: a gateway lets no call go on whose instances die again and again in vain."""
        begin = time.monotonic()
        self._until(lambda each: heard_since(each, begin), "a caller heard nothing")

    def until_all_begin(self) -> None:
        """Until each caller has ended its call and hears another one: no call is struck twice."""
        old = {id(heard) for heard in self._now.values()}
        self._until(lambda each: id(each) not in old and bool(each.arrived), "a call did not end")

    def until_all_make_a_whole_call(self) -> None:
        """Until each caller has made one to which nothing happens, or which breaks off all the same."""
        for _ in range(2):  # the end of what runs, and of the next one
            old = {id(heard) for heard in self._now.values()}
            self._until(lambda each, old=old: id(each) not in old, "a call did not end")  # type: ignore[misc]

    def _until(self, holds: Callable[[Heard], bool], what: str) -> None:
        until = time.monotonic() + WAIT_S
        while len(self._now) < CALLERS or not all(holds(heard) for heard in list(self._now.values())):
            if time.monotonic() > until:
                raise ProgramFailed(f"{what} for {WAIT_S:g} s")
            time.sleep(0.005)

    def window_of(self, act: Callable[[], object]) -> Window:
        """``act``, once all callers hear something, and how long it took."""
        gc.collect(0)  # what asking left: what is kept would take longer (``_uncollected``)
        self.until_all_hear()
        begin = time.monotonic()
        act()
        return Window(begin, time.monotonic())

    def sums(self) -> Sums:
        """Of all streams."""
        return sums(self.heard, self._right)


def heard_since(heard: Heard, begin: float) -> bool:
    """Whether a value has come after ``begin``."""
    lately = itertools.takewhile(lambda piece: piece.at > begin, reversed(heard.arrived))
    return any(VALUE.search(piece.data) for piece in lately)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python looks for no garbage by itself meanwhile. All that was heard is kept, so that takes 0.1 s and more in the
    end: of a caller's thread, which has priority over what it measures, and the others wait for it as well."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def hear_at_once() -> bool:
    """This thread waits for no core, as a caller on another machine does not: what it reads when is what is measured.
    False: it has no right to that."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True


def set_apart(platform: Platform) -> bool:
    """What a cluster has on machines of its own waits for no core from now on. False: there is no right to that."""
    found = [
        process for process in platform.program.tree() if os.path.basename(title(process).partition(" ")[0]) in APART
    ]
    if not found:
        raise ProgramFailed(f"none of {', '.join(APART)} runs")
    try:
        for thread in [thread for process in found for thread in process.threads()]:
            os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def sums(heard: Sequence[Heard], right: Sequence[Sequence[Any]]) -> Sums:
    """All streams beside the answers of the same calls, those that broke off too."""
    found = Sums()
    for each in heard:
        found.add(each, right[each.ask])
    return found


def receive(called: Called, heard: Heard) -> None:
    """One stream to its end, as it arrived; ``heard.error`` says why there is none. It is understood when the measuring
    is over: who parses takes the cores that the instances want."""
    until = time.monotonic() + WAIT_S
    heard.error = _listen(called, heard, anew=False)
    while called.anew and _broken(heard) and time.monotonic() < until:
        heard.error = _listen(called, heard, anew=True)


def _listen(called: Called, heard: Heard, *, anew: bool) -> str:
    """What arrives of one call; why there was no answer, if there was none."""
    headers = {"Authorization": f"Bearer {called.platform.token}", "Accept": "text/event-stream"}
    body = json.dumps(called.asks[heard.ask])
    try:
        with contextlib.closing(called.platform.connect()) as connection:
            connection.request("POST", f"/fn/{called.function}", body, {**headers, "Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                return f"{called.function} answers {response.status}: {response.read()[:300]!r}"
            while data := response.read1(PIECE):
                heard.arrived.append(Piece(time.monotonic(), data, anew))
                anew = False
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _broken(heard: Heard) -> bool:
    """Whether it is without its end, which may have come in two pieces."""
    return END not in b"".join(piece.data for piece in heard.arrived[-2:])


def ready(called: Called) -> dict[str, Any]:
    """The one instance that takes calls."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        found = [each for each in called.platform.function(called.function)["instances"] if each["state"] == "READY"]
        if len(found) == 1:
            instance: dict[str, Any] = found[0]
            return instance
        time.sleep(0.01)
    raise ProgramFailed(f"not one ready instance within {WAIT_S:g} s")


def moved(platform: Platform) -> int:
    """Calls that the gateway has moved so far."""
    return counted(platform, "moved")


def counted(platform: Platform, what: str) -> int:
    """The gateway's count of calls that were ``moved``, or ``resumed``. Over the platform's own connections: to set up
    a client takes 40 ms of a core, which the instances want."""
    text = platform.client.text("/metrics")
    lines = [line for line in text.splitlines() if line.startswith(f"sllm_calls_{what}_total{{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def move(called: Called) -> bool:
    """All that runs goes to the other node. Whether the platform did so: it may have abandoned it."""
    instance = ready(called)
    to = "n2" if instance["node"] == "n1" else "n1"
    path = f"{API}/instances/{instance['instance']}/migrate"
    state = ""
    while state not in ("DONE", "ABANDONED"):
        state = str(called.platform.client.request("POST", path, json={"to": to})["state"])
    return state == "DONE"


def kill(called: Called) -> None:
    """The worker dies; another one takes its place, for calls that go on from their tokens or are made anew."""
    old = ready(called)["instance"]
    os.kill(called.platform.process(f"sllm-worker {old}").pid, signal.SIGKILL)
    while ready(called)["instance"] == old:
        time.sleep(0.01)

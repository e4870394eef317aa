"""What the cases of ``migration`` share: callers that stream from a function of two nodes, and what befalls it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httpx

from benchmarks.heard import Heard, Piece, Sums, Window, understand
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from sllm_runtime.protocol.http import API

CALLERS: Final = 4
WAIT_S: Final = 60.0
PIECE: Final = 2**16


@dataclass(frozen=True)
class Called:
    """A function on a platform of two nodes, and what its callers ask, in turn."""

    platform: Platform
    function: str
    asks: Sequence[Mapping[str, Any]]

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
            for heard in self.heard:
                understand(heard)

    def _call_on(self, caller: int) -> None:
        while not self._stop.is_set():
            heard = self._now[caller] = Heard(next(self._numbers) % len(self._called.asks))
            receive(self._called, heard)
            self.heard.append(heard)

    def until_all_hear(self) -> None:
        """Until each caller has had something since now: nothing strikes a call twice before it has said a word."""
        begin, until = time.monotonic(), time.monotonic() + WAIT_S
        while not all(heard.arrived and heard.arrived[-1].at > begin for heard in list(self._now.values())):
            if time.monotonic() > until:
                raise ProgramFailed(f"a caller heard nothing for {WAIT_S:g} s")
            time.sleep(0.005)

    def windows_of(self, act: Callable[[], object], enough: Callable[[int], bool]) -> list[Window]:
        """``act`` again and again, and how long each took."""
        windows: list[Window] = []
        while not enough(len(windows)):
            self.until_all_hear()
            begin = time.monotonic()
            act()
            windows.append(Window(begin, time.monotonic()))
        return windows

    def sums(self) -> Sums:
        """Raises ``ProgramFailed`` if a stream broke off."""
        return sums(self.heard, self._right)


def sums(heard: Sequence[Heard], right: Sequence[Sequence[Any]]) -> Sums:
    """All streams beside the answers of the same calls. Raises ``ProgramFailed`` if one broke off."""
    found = Sums()
    for each in heard:
        if each.error:
            raise ProgramFailed(f"a stream ended with {each.error}")
        found.add(each, right[each.ask])
    return found


def receive(called: Called, heard: Heard) -> None:
    """One stream to its end, as it arrived. It is understood when the measuring is over: who parses takes the cores
    that the instances want."""
    connection = called.platform.connect()
    headers = {"Authorization": f"Bearer {called.platform.token}", "Accept": "text/event-stream"}
    body = json.dumps(called.asks[heard.ask])
    try:
        connection.request("POST", f"/fn/{called.function}", body, {**headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise ProgramFailed(f"{called.function} answers {response.status}: {response.read()[:300]!r}")
        while data := response.read1(PIECE):
            heard.arrived.append(Piece(time.monotonic(), data))
    finally:
        connection.close()


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
    """The gateway's count of calls that were ``moved``, or ``resumed``."""
    text = httpx.get(f"{platform.url}/metrics", headers={"Authorization": f"Bearer {platform.token}"}).text
    lines = [line for line in text.splitlines() if line.startswith(f"sllm_calls_{what}_total{{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def move(called: Called) -> None:
    """All that runs goes to the other node."""
    instance = ready(called)
    to = "n2" if instance["node"] == "n1" else "n1"
    path = f"{API}/instances/{instance['instance']}/migrate"
    state = ""
    while state not in ("DONE", "ABANDONED"):
        answer = called.platform.client.request("POST", path, json={"to": to})
        state = answer["state"]
    if state != "DONE":
        raise ProgramFailed(f"a migration was abandoned: {answer['note']}")


def restart(called: Called) -> None:
    """The worker dies; its calls go on at a new one."""
    old = ready(called)["instance"]
    os.kill(called.platform.process(f"sllm-worker {old}").pid, signal.SIGKILL)
    while ready(called)["instance"] == old:
        time.sleep(0.01)

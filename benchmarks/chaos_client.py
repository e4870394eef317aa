"""The callers of ``benchmarks.chaos``: each streams one call after the other and does what a client may do when it is
cut off: it asks again at another gateway, from the last event that it has (``Last-Event-ID``)."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from benchmarks.heard import Heard
from benchmarks.programs import ProgramFailed
from sllm.sse import Parser

GIVE_UP_S: Final = 240.0
"""A call that has not ended by then never will; far beyond what the platform gives itself for anything."""
AGAIN_S: Final = 0.1
MANY: Final = 100
"""Calls that failed: nothing more is to be learnt."""
TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
"""Three times as long as a gateway is silent in a stream."""
FAILED: Final = ("FAILED", "CANCELLED")
"""States of calls of which nothing more is to be had."""
MOVED: Final = "call_moved"
UNKNOWN: Final = "call_not_found"
YOUNG_S: Final = 0.1
"""A stream of which no event came later than that after its first may not have been logged when its gateway died: one
that had begun within 20 ms is not (docs/gateway.md). It is called again."""


class Cut(Exception):
    """The answer broke off, or was refused in a way that asks for another try."""


@dataclass
class Told:
    """One call as its caller saw it. ``gateways``: those it was connected to, the last one now."""

    heard: Heard
    kept: bool
    gateways: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None
    call: str = ""
    cuts: int = 0
    """How often it was cut off."""
    again: int = 0
    """How often it was called again, since nobody knew it."""
    anew: int = 0
    """How often it was called again by somebody who cannot ask whether it runs: its gateway went before it told an id,
    and it is not kept, so that no key of its own makes it the same call."""
    done: bool = False

    def forget(self) -> None:
        """Its answer begins anew."""
        self.call, self.again = "", self.again + 1
        for had in (self.heard.ids, self.heard.values, self.heard.times):
            had.clear()

    @property
    def young(self) -> bool:
        """Whether other gateways need not know it yet."""
        times = self.heard.times
        return not self.kept and (not times or times[-1] - times[0] <= YOUNG_S)

    @property
    def running(self) -> bool:
        """Whether it is in the middle of its answer."""
        return self.ended is None and bool(self.heard.times)

    def came_upon(self, time: float) -> bool:
        """Whether it was in the middle of its answer then."""
        return bool(self.heard.times) and self.heard.times[0] <= time < self.heard.times[-1]

    def gap(self, begin: float, end: float) -> float | None:
        """The longest time without an event, in seconds, of all that touch ``begin`` to ``end``; None: it had not
        begun, or had ended."""
        pairs = itertools.pairwise(self.heard.times)
        return max((after - before for before, after in pairs if before <= end and after > begin), default=None)


class Reader:
    """Reads one call to its end. ``kept``: begun with an ``Idempotency-Key`` and ``respond-async``, so that asking
    again begins nothing twice."""

    def __init__(
        self, gateways: Sequence[str], token: str, function: str, arguments: dict[str, Any], told: Told, first: int
    ) -> None:
        self._gateways, self._token, self._at = gateways, token, first
        self._function, self._arguments, self._told = function, arguments, told
        self._key = uuid.uuid4().hex
        self._until = time.monotonic() + GIVE_UP_S

    def read(self) -> None:
        """Until it has ended; ``told.heard.error`` says why it was lost."""
        told = self._told
        while not told.done and not told.heard.error:
            url = self._gateways[self._at % len(self._gateways)]
            told.gateways.append(url)
            try:
                # Nothing is encrypted here; to be ready for it takes 25 ms of a CPU, of which the platform has need.
                with httpx.Client(base_url=url, headers=self._headers(), timeout=TIMEOUT, verify=False) as client:
                    self._step(client)
            except (Cut, httpx.TransportError) as error:
                told.cuts += 1
                told.anew += not told.kept and not told.call and _sent(error)
                self._at += 1
                self._give_up()
                time.sleep(AGAIN_S)
        told.ended = time.monotonic()

    def _give_up(self) -> bool:
        """Whether it has been tried for too long."""
        late = time.monotonic() > self._until
        if late:
            self._told.heard.error = f"not ended after {GIVE_UP_S:g} s, at {self._told.gateways[-1]}"
        return late

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Accept": "text/event-stream"}

    def _step(self, client: httpx.Client) -> None:
        """The next request."""
        told = self._told
        if told.call:
            last = {"Last-Event-ID": str(told.heard.ids[-1])} if told.heard.ids else {}
            self._stream(client, client.build_request("GET", f"/v1/calls/{told.call}/events", headers=last))
        elif told.kept:
            keep = {"Prefer": "respond-async", "Idempotency-Key": self._key}
            answer = client.post(f"/fn/{self._function}", json=self._arguments, headers=keep)
            if self._accepted(answer, 202):
                told.call = str(answer.json()["id"])
        else:
            request = client.build_request("POST", f"/fn/{self._function}", json=self._arguments)
            self._stream(client, request)

    def _accepted(self, answer: httpx.Response, status: int) -> bool:
        """Raises ``Cut`` for what may be tried again."""
        if answer.status_code == status:
            return True
        body = answer.read()
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            error = {"code": body[:200].decode(errors="replace"), "retryable": False}
        if error.get("retryable"):
            raise Cut(str(error))
        if error.get("code") == UNKNOWN and self._told.young:
            self._told.forget()
            raise Cut(str(error))
        self._told.heard.error = f"HTTP {answer.status_code}: {json.dumps(error)[:300]}"
        return False

    def _stream(self, client: httpx.Client, request: httpx.Request) -> None:
        told, parser = self._told, Parser()
        answer = client.send(request, stream=True)
        with contextlib.closing(answer):
            if not self._accepted(answer, 200):
                return
            told.call = answer.headers["sllm-call-id"]
            for data in answer.iter_bytes():  # heartbeats, at the least
                if self._give_up():
                    return
                now = time.monotonic()
                for event in parser.feed(data):
                    if event.event == "error":
                        self._broken(client, event.data)
                        return
                    if event.done:
                        told.done = True
                    elif event.comment is None and event.event == "message":
                        told.heard.ids.append(int(event.id or 0))
                        told.heard.values.append(json.loads(event.data))
                        told.heard.times.append(now)
        if not told.done:
            raise Cut("the stream ended without its end")

    def _broken(self, client: httpx.Client, data: str) -> None:
        """An error: of the call, or, where that is read from its journal, only of who reads it. Raises ``Cut`` for the
        latter: what may be asked again is read on from the last event."""
        told, error = self._told, json.loads(data)["error"]
        if error["code"] == MOVED:
            raise Cut(data)
        if error["retryable"] and (told.kept or told.cuts):
            view = client.get(f"/v1/calls/{told.call}")
            if view.status_code != 200 or view.json()["state"] not in FAILED:
                raise Cut(data)
        told.heard.error = data[:300]


def _sent(error: Exception) -> bool:
    """Whether a request that ended so may have begun something: its gateway had it, and did not refuse it."""
    never = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    return isinstance(error, httpx.TransportError) and not never


class Callers:
    """One thread each, half of them with calls that are kept. ``asks``: arguments by number."""

    def __init__(
        self, gateways: Sequence[str], token: str, function: str, asks: Sequence[dict[str, Any]], count: int
    ) -> None:
        self.gateways, self.token, self._function = gateways, token, function
        self._asks, self._count = asks, count
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._now: dict[int, Told] = {}
        self.told: list[Told] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Calls begin until the block is left, which waits for the last one's end."""
        with ThreadPoolExecutor(self._count) as pool:
            callers = [pool.submit(self._call_on, caller) for caller in range(self._count)]
            try:
                yield
            finally:
                self._stop.set()
            for each in callers:
                each.result()

    def _call_on(self, caller: int) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            told = self._now[caller] = Told(Heard(number % len(self._asks)), kept=caller % 2 == 0)
            arguments = self._asks[told.heard.ask]
            Reader(self.gateways, self.token, self._function, arguments, told, first=number + caller // 2).read()
            self.told.append(told)

    def in_flight(self, gateway: str = "") -> int:
        """Calls that are in the middle of their answers now; with ``gateway``, those read there."""
        now = list(self._now.values())
        return sum(told.running and (not gateway or told.gateways[-1] == gateway) for told in now)

    def until_all_hear(self, since: float) -> None:
        """Until each caller has had an event since then: nothing strikes a call twice before it has said a word.
        Raises ``ProgramFailed``."""
        until = time.monotonic() + GIVE_UP_S
        while not all(told.heard.times and told.heard.times[-1] > since for told in list(self._now.values())):
            errors = [told.heard.error for told in self.told if told.heard.error]
            if len(errors) > MANY:
                raise ProgramFailed(f"{len(errors)} calls have failed, the last one with {errors[-1]}")
            if time.monotonic() > until:
                silent = [told for told in self._now.values() if not told.heard.times or told.heard.times[-1] <= since]
                raise ProgramFailed(f"a caller heard nothing for {GIVE_UP_S:g} s: {_describe(silent)}")
            time.sleep(0.005)


def _describe(those: Sequence[Told]) -> str:
    return "; ".join(
        f"{told.call or 'no call'}, {'kept' if told.kept else 'plain'}, {len(told.heard.ids)} events, "
        f"{told.cuts} cuts, at {told.gateways[-1:]}"
        for told in those
    )

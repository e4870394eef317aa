"""Moves of running calls that ``benchmarks.chaos`` asks for under its faults, as ``sllm migrate`` does."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import httpx

from benchmarks.chaos_faults import Field
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.states import MIGRATION, MigrationState, final

EVERY_S: Final = 2.0
"""From the end of one to the next."""
AGAIN_S: Final = 0.2
GIVE_UP_S: Final = 60.0
"""Whoever could say what came of one has been away for too long."""
TIMEOUT_S: Final = 15.0


@dataclass
class Moves:
    """``refused``: also those that were abandoned. Of the others nobody could say what came of them."""

    asked: int = 0
    done: int = 0
    refused: int = 0

    def count(self, state: MigrationState | None) -> None:
        """One has ended so; None: nobody knows."""
        self.done += state is MigrationState.DONE
        self.refused += state is MigrationState.ABANDONED


class Mover:
    """Asks for one move after the other, of instances and to nodes that ``seed`` gives, at each gateway in turn."""

    def __init__(self, place: Field, gateways: Sequence[str], token: str, nodes: Sequence[str], seed: int) -> None:
        self._place, self._nodes, self._chance = place, nodes, random.Random(seed)
        self._urls = itertools.cycle(gateways)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._stop = threading.Event()
        self.moves = Moves()
        self.moving = False
        """Whether one is on its way."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Until the block is left."""
        thread = threading.Thread(target=self._go_on, name="moves")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _go_on(self) -> None:
        while not self._stop.wait(EVERY_S):
            if there := sorted(self._place.ready().items()):
                instance, node = self._chance.choice(there)
                self._move(instance, self._chance.choice([other for other in self._nodes if other != node]))

    def _move(self, instance: str, to: str) -> None:
        self.moves.asked += 1
        self.moving = True
        until = time.monotonic() + GIVE_UP_S
        while (state := self._ask(instance, to)) is None and time.monotonic() < until and not self._stop.wait(AGAIN_S):
            pass
        self.moving = False
        self.moves.count(state)

    def _ask(self, instance: str, to: str) -> MigrationState | None:
        """What came of it; None while it goes on, or nobody can say."""
        path = f"{next(self._urls)}{API}/instances/{instance}/migrate"
        try:
            return outcome_of(httpx.post(path, headers=self._headers, json={"to": to}, timeout=TIMEOUT_S, verify=False))
        except httpx.TransportError:
            return None


def outcome_of(answer: httpx.Response) -> MigrationState | None:
    """What an answer to ``migrate`` says came of it."""
    if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    if answer.status_code >= HTTPStatus.BAD_REQUEST:
        return MigrationState.ABANDONED
    state = MigrationState(answer.json()["state"])
    return state if final(MIGRATION, state) else None

"""What gateways tell each other of their logs over core NATS, so that it does not wait for JetStream: the server that
leads its stream may stand still, and the gateway die before another one leads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from sllm_gateway.ledger import streams
from sllm_gateway.lives import log_of
from sllm_gateway.overheard import Overheard
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import DeadlineExceeded, SllmError, Unavailable
from sllm_runtime.protocol.limits import BATCH_BYTES
from sllm_runtime.protocol.lives import AskHeard, Heard, Log

log = logging.getLogger(__name__)

ASK_S: Final = 1.0
"""A gateway that runs answers within this."""


class Hearsay:
    """What this gateway is told of other gateways' lives. ``start`` before use."""

    def __init__(self, bus: Bus, gateway: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._gateway, self._clock = bus, gateway, clock
        self._heard = Overheard()
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Listen. Raises ``Unavailable``."""
        self._subscriptions.append(await self._bus.listen(subjects.TOLD_ALL, self._told))
        self._subscriptions.append(await self._bus.serve(subjects.heard(self._gateway), AskHeard, self._asked))

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    def _told(self, subject: str, _reply: str, data: bytes) -> None:
        *_, gateway, life, number = subject.split(".")
        if gateway != self._gateway:
            self._heard.take(life, int(number), data, self._clock())

    async def _asked(self, asked: AskHeard) -> Heard:
        logs: dict[int, Log] = {}
        size = 0
        for number, data in self._heard.after(asked.life, asked.after).items():
            size += len(data)
            if logs and size > BATCH_BYTES:
                break
            logs[number] = log_of(data)
        return Heard(logs=logs)

    def last(self, life: str) -> int:
        """Number of the last message that was heard of a life's log; -1: none, or none that is kept."""
        return self._heard.last(life)

    def tells_of(self, life: str, call: str) -> bool:
        """Whether ``call`` is among the open streams of a life's log, as far as it was heard here."""
        logs = (log_of(data) for data in self._heard.after(life).values())
        return any(stream.order.call == call for stream in streams(logs))

    async def of(self, life: str, after: int, others: Iterable[str]) -> tuple[dict[int, Log], set[str]]:
        """What this gateway and those ``others`` that answer have heard of a life's log after message ``after``; and
        those that did not answer, who may have heard more."""
        names = sorted(set(others) - {self._gateway})
        found = {number: log_of(data) for number, data in self._heard.after(life, after).items()}
        answers = await asyncio.gather(*(self._ask(name, life, after) for name in names))
        for logs, _ in answers:
            found.update(logs)
        return found, {name for name, (_, answered) in zip(names, answers, strict=True) if not answered}

    async def _ask(self, gateway: str, life: str, after: int) -> tuple[dict[int, Log], bool]:
        """What it has heard; and whether it has answered to the end, if only that it cannot say."""
        found: dict[int, Log] = {}
        while True:
            question = AskHeard(life=life, after=max(found, default=after))
            try:
                answer = await self._bus.call(subjects.heard(gateway), question, Heard, timeout_s=ASK_S)
            except SllmError as error:
                log.info("gateway %s does not say what it has heard: %s", gateway, error.message)
                return found, not isinstance(error, Unavailable | DeadlineExceeded)
            if not answer.logs:
                return found, True
            found.update(answer.logs)

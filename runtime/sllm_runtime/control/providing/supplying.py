"""Asks the provider what there is, decides by ``sizing``, and tells it: while this controller leads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.providing import sizing
from sllm_runtime.control.providing.pool import Pool
from sllm_runtime.control.providing.provider import NodeProvider, Offer
from sllm_runtime.control.providing.settings import ProviderSettings
from sllm_runtime.control.providing.sizing import Action, Remove, SetDesired, Step
from sllm_runtime.control.view import View
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.records import PoolRecord

log = logging.getLogger(__name__)

STORED_S: Final = 10.0
"""Nothing is removed before the store has that it is to go: the next controller must know."""


def check(settings: Settings) -> None:
    """Raises ``InvalidRequest`` for settings that cannot work."""
    if isinstance(settings, ProviderSettings):
        settings.provider()


def supplied(settings: Settings, record: PoolRecord, loop: Loop, ledger: Ledger) -> Supplying:
    """By the provider that ``settings`` name, as the last controller left it. Raises ``InvalidRequest`` for settings
    that cannot work."""
    rules = settings if isinstance(settings, ProviderSettings) else ProviderSettings()
    return Supplying(loop, ledger, rules.provider(), Pool(rules.timing, record), rules.nodes_every)


class Supplying:
    """Does it every ``every_s`` seconds from ``start`` to ``close``; nothing without a ``provider``. ``pool``: as it is
    at the beginning."""

    def __init__(
        self,
        loop: Loop,
        ledger: Ledger,
        provider: NodeProvider | None,
        pool: Pool,
        every_s: float,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._loop, self._ledger, self._provider = loop, ledger, provider
        self._every_s, self._pause = every_s, pause
        self._problem = ""
        self._tasks = Tasks("supplying")
        if provider is not None:
            loop.change(lambda view: replace(view, pool=pool))

    def start(self) -> None:
        if self._provider is not None:
            self._tasks.start(self._run(self._provider), "supply")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, provider: NodeProvider) -> None:
        while True:
            try:
                await self._once(provider)
                self._problem = ""
            except SllmError as error:
                self._failed(error.message)
            except OSError as error:
                self._failed(f"{error.strerror or error}: {error.filename or 'of this machine'}")
            await self._pause(self._every_s)

    def _failed(self, problem: str) -> None:
        """Said once: it is tried again and again."""
        if problem != self._problem:
            log.warning("the provider of nodes: %s", problem)
        self._problem = problem

    async def _once(self, provider: NodeProvider) -> None:
        """Look, decide, act. Raises what the provider does, ``Unavailable`` where the decision cannot be stored."""
        offer = await provider.capacity()
        if not self._loop.may_act:
            return
        for action in self._decided(offer):
            if self._loop.may_act:  # no fence keeps one that was deposed meanwhile from the provider
                await self._do(provider, action)

    def _decided(self, offer: Offer) -> tuple[Action, ...]:
        made: list[Step] = []

        def step(view: View) -> View:
            made.append(sizing.step(view, offer, time.monotonic()))
            return made[-1].view

        self._loop.change(step)
        return made[-1].actions

    async def _do(self, provider: NodeProvider, action: Action) -> None:
        if isinstance(action, SetDesired):
            await provider.set_desired(action.nodes)
        elif isinstance(action, Remove):
            await self._ledger.settled(STORED_S)
            if self._loop.may_act:
                await provider.remove(action.node)

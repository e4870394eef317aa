"""Finds what a call names. What the route table does not know the controller is asked for, before anybody gets 404."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from sllm_gateway.controller import Controller
from sllm_gateway.table import RouteTable, Version
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.ctl import Locate, Located
from sllm_runtime.protocol.errors import NotFound, SllmError, Unavailable
from sllm_runtime.protocol.manifest import NAME

ASK_S = 1.0
"""A controller that does not answer in time is away: then nothing new can have been deployed."""
ROUTE_WAIT_S = 2.0
"""A route that the controller has written is here within milliseconds."""
UNKNOWN_S = 0.25
"""How long a name that nobody knows is not asked for again: so many questions a second at most for each name."""
UNKNOWN_MOST = 1024
ASKING_MOST = 16
"""Questions on their way at once, whatever the number of callers and names."""

Named = tuple[str, int | None]


class Lookup:
    """Finds versions. Callers of one name share a question; ``close`` ends those on their way."""

    def __init__(self, table: RouteTable, controller: Controller, clock: Callable[[], float]) -> None:
        self._table = table
        self._controller = controller
        self._clock = clock
        self._asking: dict[Named, asyncio.Task[bool]] = {}
        self._unknown: OrderedDict[Named, float] = OrderedDict()
        """Names the controller does not know either, with the time until which that is believed; the oldest first."""
        self._turns = asyncio.Semaphore(ASKING_MOST)
        self._tasks = Tasks("lookup")

    async def close(self) -> None:
        """End all questions. Repeatable."""
        await self._tasks.close()

    async def find(self, function: str, number: int | None = None) -> Version:
        """The version that a call goes to. Raises ``FunctionNotFound`` or ``VersionNotFound``; ``Unavailable`` if the
        controller knows it and its route does not come."""
        try:
            return self._table.find(function, number)
        except NotFound:
            if not NAME.match(function) or not await self._exists((function, number)):
                raise
        try:
            return await self._table.until_found(function, number, ROUTE_WAIT_S)
        except NotFound as error:
            raise Unavailable(f"{function!r} is deployed, and its route is not here yet; call again") from error

    def has(self, function: str) -> bool:
        """Whether a call of that name would find it here, with nobody asked."""
        try:
            self._table.find(function)
        except NotFound:
            return False
        return True

    async def _exists(self, named: Named) -> bool:
        if self._clock() < self._unknown.get(named, 0.0):
            return False
        asking = self._asking.get(named)
        if asking is None:
            asking = self._asking[named] = self._tasks.start(self._ask(named), f"locate {named[0]}")
        return await asyncio.shield(asking)

    async def _ask(self, named: Named) -> bool:
        try:
            async with self._turns:
                request = Locate(function=named[0], version=named[1])
                await self._controller.ask("locate", request, Located, timeout_s=ASK_S, wait_s=0.0)
        except SllmError:
            self._remember(named)
            return False
        finally:
            del self._asking[named]
        return True

    def _remember(self, named: Named) -> None:
        self._unknown.pop(named, None)
        self._unknown[named] = self._clock() + UNKNOWN_S
        if len(self._unknown) > UNKNOWN_MOST:
            self._unknown.popitem(last=False)

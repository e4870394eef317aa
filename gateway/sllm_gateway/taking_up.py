"""Kept calls whose gateway is no more are gone on with here, each by the one gateway that first rewrites its order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from sllm_gateway.detached import Detached, stream_of
from sllm_gateway.journal import Journal, digest, known_s
from sllm_gateway.lives import Lives
from sllm_gateway.roll import Roll
from sllm_gateway.table import RouteTable
from sllm_runtime.platform.owned import Tasks, each
from sllm_runtime.protocol.calls import CallOrder, Journaled
from sllm_runtime.protocol.errors import (
    CallMoved,
    CallNotFound,
    Draining,
    JournalExpired,
    ProtocolError,
    QueueFull,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import BODIES_STREAM

log = logging.getLogger(__name__)

AGAIN_S: Final = 1.0
AT_ONCE: Final = 16
"""Calls that are written, claimed or gone on with together: each waits for JetStream several times."""
WAITING_S: Final = 3600.0
"""An order of a function that is not known is kept for so long more."""


class TakingUp:
    """Looks at all kept calls once at the start, and each time it is asked to."""

    def __init__(
        self,
        detached: Detached,
        journal: Journal,
        table: RouteTable,
        lives: Lives,
        roll: Roll,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._detached, self._journal, self._table = detached, journal, table
        self._lives, self._roll, self._pause = lives, roll, pause
        self._due = asyncio.Event()
        self._claimed: dict[str, tuple[CallOrder, int]] = {}
        """Calls of this gateway that do not run yet, with the sequences of their orders."""
        self._tried: set[str] = set()
        """Calls whose orders may be this gateway's without its knowledge: of the write it has not heard."""
        self._left: set[str] = set()
        """What gateways that are gone have left to this one, which a list of all calls may lack: it is read from any
        server. What was asked is read from their journals: several may have written it, of whom the first counts."""
        self._tasks = Tasks("taking up")

    def start(self) -> None:
        """Begin, with what an earlier life of this gateway has left."""
        self._due.set()
        self._tasks.start(self._run(), "calls")

    async def close(self) -> None:
        await self._tasks.close()

    def look(self, left: Iterable[str]) -> None:
        """The life of a gateway is over, and has ``left`` these calls."""
        self._left |= set(left)
        self._due.set()

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._take_up()
            except Unavailable as error:
                log.info("calls of gateways that are gone wait to be taken up: %s", error.message)
                self._due.set()
            if self._due.is_set() or self._claimed:
                await self._pause(AGAIN_S)
                self._due.set()

    async def _take_up(self) -> None:
        """Raises ``Unavailable``; what was begun is gone on with in the next round."""
        listed = [known for known in (await self._journal.all()).values() if known.ended is None]
        orders = {known.order.call: known.order for known in listed if known.order is not None}
        orders |= {call: order for call, (order, _) in self._claimed.items()}

        async def see_to(call: str) -> None:
            if (order := orders.get(call) or await self._find_left(call)) is not None:
                await self._see_to(order)

        await each(sorted(orders.keys() | self._left, key=self._turn), see_to, AT_ONCE)

    def _turn(self, call: str) -> bytes:
        """Sorts calls in an order of this gateway's own: several take up what was left, and seldom meet at the same."""
        return digest(self._lives.me.life.encode(), call.encode())

    async def _find_left(self, call: str) -> CallOrder | None:
        """What was asked, of a call that the list lacks."""
        try:
            return (await self._journal.find(call))[1]
        except (CallNotFound, JournalExpired, ProtocolError) as error:
            log.info("%s", error.message, extra={"call": call})
            self._left.discard(call)
            return None

    async def _see_to(self, order: CallOrder) -> None:
        idle = order.call not in self._claimed and not self._detached.runs(order.call)
        try:
            if idle and (order.call in self._tried or await self._ownerless(order)):
                await self._claim(order)
        except ProtocolError as error:
            log.error("call is left to gateways that can read it: %s", error.message, extra={"call": order.call})
        self._left.discard(order.call)
        claimed = self._claimed.get(order.call)
        if claimed is not None and await self._go_on(*claimed):
            del self._claimed[order.call]

    async def _ownerless(self, order: CallOrder) -> bool:
        me = self._lives.me
        if not order.life:
            return order.gateway == me.gateway
        over = self._roll.over(order.life, me.life)
        if over is None and (life := await self._lives.find(order.life)) is not None:
            self._roll.heard(life)
            over = self._roll.over(order.life, me.life)
        return over is not False

    async def _claim(self, order: CallOrder) -> None:
        me = self._lives.me
        version = self._table.get(order.function, order.version)
        seconds = version.manifest.timeout + version.manifest.queue_timeout if version is not None else WAITING_S
        mine = msgspec.structs.replace(order, gateway=me.gateway, life=me.life)
        self._tried.add(order.call)
        fence = await self._journal.take_over(stream_of(order), order, mine, known_s(seconds))
        self._tried.discard(order.call)
        if fence is not None:
            self._claimed[order.call] = (mine, fence)

    async def _mine(self, order: CallOrder) -> bool:
        """Whether it is still this gateway's: then what was just read of it lacks what is stored."""
        try:
            return (await self._journal.find(order.call))[1] == order
        except (CallNotFound, JournalExpired):
            return False

    async def _go_on(self, order: CallOrder, fence: int) -> bool:
        """Whether it is done with; else there is no room for it now."""
        try:
            journaled, entries = await self._journal.now(stream_of(order), order.call)
            if journaled.ended is not None:
                return True
            if journaled.order != order:
                return not await self._mine(order)
            for part in (await self._journal.now(BODIES_STREAM, order.call))[1]:
                journaled.take(part)
            self._detached.go_on(order, journaled, Journaled().take_all(entries), fence)
        except QueueFull as error:
            log.info("call waits: %s", error.message, extra={"call": order.call})
            return False
        except Draining:  # another gateway has it
            return True
        except Unavailable:
            raise
        except SllmError as error:
            log.warning("call is given up: %s", error.message, extra={"call": order.call})
            try:
                await self._detached.end(order, CallState.FAILED, error, fence)
            except (CallMoved, JournalExpired) as problem:
                log.info("%s", problem.message)
        return True

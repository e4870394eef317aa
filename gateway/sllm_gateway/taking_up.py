"""Kept calls whose gateway is no more are gone on with here, each by the one gateway that first rewrites its order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from sllm_gateway.detached import WAITING_S, Detached, stream_of
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
        given_up: Callable[[CallOrder, SllmError], None] = lambda _order, _error: None,
    ) -> None:
        """``given_up`` is told of each call that ends here without going on, and why."""
        self._detached, self._journal, self._table = detached, journal, table
        self._lives, self._roll, self._pause, self._given_up = lives, roll, pause, given_up
        self._due = asyncio.Event()
        self._claimed: dict[str, tuple[CallOrder, int]] = {}
        """Calls of this gateway that do not run yet, with the sequences of their orders."""
        self._waiting: dict[str, CallOrder] = {}
        """Calls of nobody that there was no room for: who has room first claims them."""
        self._full: set[tuple[str, int]] = set()
        """Versions whose queues were found full in this round."""
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
            if not self._pending:
                await self._due.wait()
            anew = self._due.is_set()
            self._due.clear()
            try:
                await self._lives.recorded()  # of a life that others do not know they take what it has for nobody's
                await self._take_up(anew=anew)
            except Unavailable as error:
                log.info("calls of gateways that are gone wait to be taken up: %s", error.message)
                self._due.set()
            if self._due.is_set() or self._pending:
                await self._pause(AGAIN_S)

    @property
    def _pending(self) -> int:
        """Calls that are known and do not run yet."""
        return len(self._claimed) + len(self._waiting)

    async def _take_up(self, *, anew: bool = True) -> None:
        """Raises ``Unavailable``; what was begun is gone on with in the next round. ``anew``: all that are known are
        looked at, else those alone that are here already."""
        self._full.clear()
        pending = self._pending
        known = await self._journal.all() if anew else {}
        listed = {call: found for call, found in known.items() if found.ended is None}
        orders = self._waiting | {call: found.order for call, found in listed.items() if found.order is not None}
        orders |= {call: order for call, (order, _) in self._claimed.items()}
        # These do not wait for room: they may be such that have to end.
        pressing = {call for call, found in listed.items() if found.began is not None} | (self._left - orders.keys())
        if pending:
            pressing |= await self._journal.asked_to_cancel()

        async def see_to(call: str) -> None:
            if (order := orders.get(call) or await self._find_left(call)) is not None:
                await self._see_to(order, pressing=call in pressing)

        await each(sorted(orders.keys() | self._left, key=self._turn), see_to, AT_ONCE)
        if self._pending > pending:
            log.info("%d call(s) of gateways that are gone wait for room", self._pending)

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

    async def _see_to(self, order: CallOrder, *, pressing: bool) -> None:
        call = order.call
        idle = call not in self._claimed and not self._detached.runs(call)
        try:
            own = call in self._tried and order.life == self._lives.me.life  # a try of which no word came was stored
            waits = own or self._waiting.get(call) == order
            if idle and (waits or await self._ownerless(order)):
                if self._detached.ends(call) or (not pressing and not self._has_room(order)):
                    self._waiting[call] = order
                    self._left.discard(call)
                    return
                await self._claim(order)
        except ProtocolError as error:
            log.error("call is left to gateways that can read it: %s", error.message, extra={"call": call})
        self._waiting.pop(call, None)
        self._left.discard(call)
        claimed = self._claimed.get(call)
        if claimed is None or not (pressing or self._has_room(order)):
            return
        if await self._go_on(*claimed):
            del self._claimed[call]

    def _has_room(self, order: CallOrder) -> bool:
        """Nothing of a call is claimed or read before there is. A queue that was full stays so for a round."""
        key = (order.function, order.version)
        if key not in self._full and not self._detached.has_room(order):
            self._full.add(key)
        return key not in self._full

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
        await self._lives.recorded()  # a round may have begun in the life before
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
            log.debug("call waits: %s", error.message, extra={"call": order.call})
            self._full.add((order.function, order.version))
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
            else:
                self._given_up(order, error)
        return True

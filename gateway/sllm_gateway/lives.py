"""The records and logs of gateways' lives in JetStream: one's own is written, one that is over is taken over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from sllm_gateway.backlog import Backlog
from sllm_gateway.stored import Changed, Last, Stored
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.watch import Watch, snapshot
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.lives import BEAT_S, LIVES_AGE_S, SILENT_BEATS, Life, Log
from sllm_runtime.protocol.subjects import LIVES_STREAM, life_beat, life_log, life_told

_logger = logging.getLogger(__name__)

STILL_S: Final = BEAT_S * SILENT_BEATS / 2
"""A process that has not run for so long may have been declared dead by the time that it does."""


class Over(Exception):
    """Another gateway has declared this life over, and has its streams."""


class Aged(Over):
    """Its record is gone, and so would be that of an heir by now: only what one has made of its streams says whether
    there is one."""


class Lost(Exception):
    """What was written of this life is no longer there, and nobody has it: it is to be written anew."""


class Lives:
    """This gateway's life, and what others left. Writes go one at a time, since in a cluster a second one under way on
    the same fence is refused. Raises ``Unavailable`` as ``Stored``."""

    def __init__(
        self, bus: Bus, stored: Stored, gateway: str, random: Callable[[int], bytes], clock: Callable[[], float]
    ) -> None:
        self._bus, self._stored, self._gateway = bus, stored, gateway
        self._random, self._clock = random, clock
        self._recorded = asyncio.Event()
        """Set while others can know of this life."""
        self._turned = clock()
        """When this process is known to have run."""
        self._sure = asyncio.Event()
        """Set while no other gateway can have this life, as far as is known here."""
        self._reached = clock()
        """When this process is known to have run and to have heard something from NATS. Nodes report each second."""
        self._heard = bus.heard
        self.known = ""
        """The last life that was recorded."""
        self.begin()

    def begin(self) -> None:
        """A new life."""
        self.me = Life(life=self._random(6).hex(), gateway=self._gateway)
        self._sequence = 0
        self._backlog = Backlog()
        self._beaten = self._clock()
        self._recorded.clear()
        self._sure.clear()

    def watch(self, changed: Callable[[Life], None]) -> Watch:
        """Tell every record; not started."""

        def take(subject: str, data: bytes | None) -> None:
            if data is None:
                return
            try:
                changed(life_of(data))
            except ProtocolError as error:
                _logger.error("%s is left to gateways that can read it: %s", subject, error.message)

        return Watch(self._bus, LIVES_STREAM, life_beat(), take)

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """As ``Bus.on_reconnect``."""
        return self._bus.on_reconnect(callback)

    # --- one's own --------------------------------------------------------------------------------
    async def beat(self, *, over: bool = False) -> None:
        """This gateway lives, or has ended in order. Raises ``Over``, ``Aged`` or ``Lost``."""
        self.me = msgspec.structs.replace(self.me, beat=self.me.beat + 1, over=over)
        subject = life_beat(self.me.life)
        try:
            self._sequence = await self._stored.write(subject, self.me, where=self._unchanged)
        except Changed:
            await self._look()
        self._beaten = self._reached = self._clock()
        self.known = self.me.life
        self._recorded.set()
        self._sure.set()

    def turn(self) -> None:
        """This process runs. If it has not for a while this life may be over: ``recorded`` waits for a beat then. So
        does ``sure``, also where it heard nothing from NATS meanwhile, which may be long before its connection ends."""
        now = self._clock()
        if now - self._turned > STILL_S:
            self._recorded.clear()
        self._turned = now
        if now - self._reached > STILL_S:
            self._sure.clear()
        if self._bus.heard != self._heard:
            self._reached, self._heard = now, self._bus.heard

    async def recorded(self) -> None:
        """Wait until others can know of this life: a call of one that they do not know, or that is over, seems to have
        no gateway."""
        await self._beat_of(self._recorded)

    async def sure(self) -> None:
        """Wait until a beat has said that this life goes on, if it may be over: an heir may run its streams, at
        instances of other classes. Raises ``Unavailable``, as ``recorded``, which is enough for a new call: that one
        can wait for its place while NATS is away."""
        await self._beat_of(self._sure)

    async def _beat_of(self, event: asyncio.Event) -> None:
        self.turn()
        if event.is_set():
            return
        try:
            async with asyncio.timeout(ELECTION_S):
                await event.wait()
        except TimeoutError:
            raise Unavailable("this gateway begins a new life, which JetStream does not record; call again") from None

    @property
    def _unchanged(self) -> Last:
        """This life's record is as it was last written."""
        return Last(LIVES_STREAM, life_beat(self.me.life), self._sequence)

    async def _look(self) -> None:
        """The last beat is not the one before this."""
        there = await self._stored.last(LIVES_STREAM, life_beat(self.me.life))
        if there is None and self._clock() - self._beaten < LIVES_AGE_S / 2:
            self._sequence = 0
            raise Lost
        if there is None or life_of(there[1]).heir:
            self._recorded.clear()  # what began now would be told under a life that another gateway has
            self._sure.clear()
            raise Over if there is not None else Aged
        # It was stored and its acknowledgement lost.
        self._sequence = there[0]

    def tell(self, log: Log) -> None:
        """More of its log: the others hear it now, and it waits to be stored."""
        try:
            number, data = self._backlog.add(log)
        except ProtocolError as error:
            _logger.error("%d stream(s) would end with this gateway: %s", len(log.entries), error.message)
            return
        self._tell(number, data)

    def tell_again(self) -> None:
        """What waits to be stored: who was away from NATS has not heard it."""
        for number, data in self._backlog.waiting:
            self._tell(number, data)

    def _tell(self, number: int, data: bytes) -> None:
        try:
            self._bus.publish_now(life_told(self.me.gateway, self.me.life, number), msgspec.Raw(data))
        except Unavailable as error:  # it is stored all the same
            _logger.info("the others are not told of this gateway's log: %s", error.message)

    @property
    def connected(self) -> bool:
        """Whether others can be told now; else they are when NATS is back (``on_reconnect``)."""
        return self._bus.connected

    @property
    def behind(self) -> bool:
        """Whether something waits to be stored."""
        return self.waiting is not None

    @property
    def waiting(self) -> int | None:
        """Number of the first message that waits to be stored."""
        return self._backlog.first[0] if self._backlog.first is not None else None

    async def store(self) -> None:
        """The first of what waits. Raises ``Over``, ``Aged`` or ``Lost``."""
        if self._backlog.first is None:
            return
        number, data = self._backlog.first
        try:
            await self._stored.write(life_log(self.me.life, number), msgspec.Raw(data), where=self._unchanged)
        except Changed:
            await self._look()
            raise Lost from None
        self._backlog.stored(number)
        if self._backlog.gap:
            raise Lost

    def go_on(self) -> None:
        """Nobody has this life, which has ``Aged``: the next beat writes its record anew."""
        self._sequence = 0

    def anew(self) -> None:
        """What waits to be stored counts no more."""
        self._backlog.clear()

    # --- others' ----------------------------------------------------------------------------------
    async def find(self, life: str) -> Life | None:
        """Its record, if it is kept."""
        there = await self._stored.last(LIVES_STREAM, life_beat(life))
        return life_of(there[1]) if there is not None else None

    async def claim(self, life: Life) -> Life | None:
        """Declare it over. None: it has beaten meanwhile, or another gateway has it."""
        return await self._rewrite(life, msgspec.structs.replace(life, heir=self.me.life))

    async def claim_lost(self, life: Life) -> Life | None:
        """As ``claim``, of one whose record is gone. None: it is there again."""
        subject, new = life_beat(life.life), msgspec.structs.replace(life, heir=self.me.life)
        try:
            await self._stored.write(subject, new, where=Last(LIVES_STREAM, subject, 0))
        except Changed:
            return None
        return new

    async def settle(self, life: Life) -> Life | None:
        """All of a claimed one is taken over. None: another gateway has it by now."""
        return await self._rewrite(life, msgspec.structs.replace(life, settled=True))

    async def _rewrite(self, life: Life, new: Life) -> Life | None:
        subject = life_beat(life.life)
        there = await self._stored.last(LIVES_STREAM, subject)
        if there is None or life_of(there[1]) != life:
            return None
        try:
            await self._stored.write(subject, new, where=Last(LIVES_STREAM, subject, there[0]))
        except Changed:
            there = await self._stored.last(LIVES_STREAM, subject)
            return new if there is not None and life_of(there[1]) == new else None
        return new

    async def log_of(self, life: str) -> dict[int, Log]:
        """What is stored of it, by number. Raises ``ProtocolError``."""
        found = await snapshot(self._bus, LIVES_STREAM, life_log(life))
        return {int(subject.rpartition(".")[2]): log_of(data) for subject, data in found.items()}


def life_of(data: bytes) -> Life:
    """A life's record. Raises ``ProtocolError``, also for a schema of another release."""
    return codec.served(codec.unpack(Life, data), "the record of a gateway's life")


def log_of(data: bytes) -> Log:
    """One message of a life's log. Raises as ``life_of``."""
    return codec.served(codec.unpack(Log, data), "the log of a gateway's life")

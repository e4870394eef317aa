"""Gateways that outlive each other: this one says that it lives and logs its streams; what one that died has left is
turned into kept calls, which any gateway goes on with (``taking_up``).

What is new of its streams is told to the other gateways at once, over core NATS (``hearsay``). One task stores that,
one message at a time, since every write depends on the life's record; another looks at the others after each beat of
one's own, so that a JetStream that takes no beats declares nobody dead. Whoever takes over a life joins what is stored
of it with what anybody has heard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from sllm_gateway.call import Call
from sllm_gateway.hearsay import Hearsay
from sllm_gateway.journal import SILENT, Journal, known_s
from sllm_gateway.ledger import Ledger, streams
from sllm_gateway.lives import Aged, Lives, Lost, Over
from sllm_gateway.roll import Roll
from sllm_gateway.taking_up import AT_ONCE, TakingUp
from sllm_runtime.platform.owned import Tasks, each
from sllm_runtime.platform.watch import Watch
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.calls import JOURNAL_TTL_S, KNOWN_S, Batch, Began, BodyPart, Ended
from sllm_runtime.protocol.errors import CallNotFound, SllmError, StoreFull, Unavailable
from sllm_runtime.protocol.frames import Frame, FrameKind, Ids
from sllm_runtime.protocol.limits import MAX_PART
from sllm_runtime.protocol.lives import BEAT_S, Life, Log, Whole
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import BODIES_STREAM, JOURNAL_STREAM

log = logging.getLogger(__name__)

ORDERS_S: Final = 0.02
"""Streams that begin within this are one message."""
IDS_S: Final = 0.25
"""Ids are written so often."""
KEPT_S: Final = 3600.0
"""What is written of a stream that another gateway is to go on with stands for so long, until one does."""
COMING_S: Final = 30.0
SAID_S: Final = 10.0
"""Who lives and does not say what it has heard of a life is asked again for so long: it may be on its way back to NATS.
Far within COMING_S."""
MOST_TAKEN: Final = 64
"""Lives that were taken over are looked at for more until there are so many newer ones."""
_ID_FRAME: Final = 4096


@dataclass
class _Taken:
    """What is known of a life that was taken over."""

    last: int = -1
    """Number of the last message of its log that has been heeded."""
    calls: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    """Gateways that may have heard more of it, and have not said so."""
    until: float | None = None
    """They are asked again until then."""


class Succession:
    """``start`` before calls are admitted; ``close`` after the last has ended."""

    def __init__(
        self,
        lives: Lives,
        roll: Roll,
        ledger: Ledger,
        hearsay: Hearsay,
        journal: Journal,
        taking_up: TakingUp,
        hand_on: Callable[[Iterable[Call], str], None],
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lives, self._roll, self._ledger, self._hearsay = lives, roll, ledger, hearsay
        self._journal, self._taking_up, self._hand_on = journal, taking_up, hand_on
        self._clock, self._pause = clock, pause
        self._tasks = Tasks("succession")
        self._beaten = False
        """Since the others were last looked at."""
        self._news = asyncio.Event()
        """Set when the others are to be looked at."""
        self._told = asyncio.Event()
        """Something waits to be stored."""
        self._watch: Watch | None = None
        self._off: Callable[[], None] | None = None
        self._waiting: int | None = None
        """What waited to be stored when that was last looked at."""
        self._waiting_looked = -BEAT_S
        self._due = 0.0
        """When the next beat is."""
        self._looked = -IDS_S
        """When all streams were last looked at for ids."""
        self._taken: dict[str, _Taken] = {}
        """The last lives that were taken over here."""

    async def start(self) -> None:
        """Begin this gateway's life. Raises ``Unavailable``."""
        await self._hearsay.start()
        await self._lives.beat()
        self._watch = self._lives.watch(self._heard)
        await self._watch.start()
        self._has_beaten()
        self._off = self._lives.on_reconnect(self._lives.tell_again)
        self._tasks.start(self._again_and_again(self._tell), "log")
        self._tasks.start(self._again_and_again(self._store), "beats and log")
        self._tasks.start(self._again_and_again(self._look), "others")

    async def _again_and_again(self, turn: Callable[[], Awaitable[None]]) -> None:
        """A bug that one stream meets costs the others a while, not their next gateway."""
        while True:
            try:
                await turn()
            except Exception:
                log.exception("a bug holds up what others need to know of this gateway's streams, or it of theirs")
                await self._pause(BEAT_S)

    async def close(self) -> None:
        """End it in order: whatever is left of it (``Ledger.hand_on``) is taken over at once. Repeatable."""
        if self._watch is None:
            return
        if self._off is not None:
            self._off()
        await self._tasks.close()
        await self._hearsay.close()
        await self._watch.close()
        self._watch = None
        try:
            async with asyncio.timeout(BEAT_S):
                await self._lives.beat()  # a write that was broken off just now may have been stored
                self._tell_news(last=True)
                while self._lives.behind:
                    await self._lives.store()
                await self._lives.beat(over=True)
        except (TimeoutError, SllmError, Over, Lost) as error:
            log.info("others are not told of this gateway's end: %s", error or type(error).__name__)

    # --- this life --------------------------------------------------------------------------------
    async def _tell(self) -> None:
        self._lives.turn()
        self._tell_news()
        self._tell_again()
        await self._pause(ORDERS_S)
        await _until(self._ledger.news, IDS_S)

    def _tell_news(self, *, last: bool = False) -> None:
        now = self._clock()
        all_of_them = last or now - self._looked >= IDS_S
        if all_of_them:
            self._looked = now
        for entries in self._ledger.logs(now, begun=not all_of_them):
            self._lives.tell(entries)
            self._told.set()

    def _tell_again(self) -> None:
        """JetStream takes nothing: who was away as it was told knows of it by this alone."""
        now = self._clock()
        if now - self._waiting_looked >= BEAT_S:
            before, self._waiting, self._waiting_looked = self._waiting, self._lives.waiting, now
            if self._waiting is not None and self._waiting == before and self._lives.connected:
                self._lives.tell_again()

    async def _store(self) -> None:
        try:
            if self._clock() >= self._due:
                await self._lives.beat()
                self._has_beaten()
                self._due = self._clock() + BEAT_S
            self._told.clear()
            if self._lives.behind:
                await self._lives.store()
            else:
                await _until(self._told, self._due - self._clock())
        except SllmError as error:  # what was told is stored later
            log.info("this gateway's log waits: %s", error.message)
            await self._pause(ORDERS_S)
        except Lost:
            await self._tell_anew()
        except Over as over:
            try:
                if isinstance(over, Aged) and await self._has_all():
                    self._lives.go_on()
                    self._due = 0.0
                    await self._tell_anew()
                else:
                    await self._end_life()
            except SllmError as error:  # until then they run here
                log.info("the streams of this gateway's last life wait to be handed on: %s", error.message)
                await self._pause(ORDERS_S)

    async def _tell_anew(self) -> None:
        self._lives.anew()
        self._ledger.anew()
        await self._pause(ORDERS_S)

    async def _has_all(self) -> bool:
        """Whether it is the only gateway, and its streams are its own, of which an heir would have made kept calls.
        Another one may have taken its life over before it had any of these. Without any another life costs nothing."""
        if self._roll.living(self._lives.me.life):
            return False
        known = [call.id for call, _ in self._ledger.written()]
        return bool(known) and not any([await self._journal.has(call) for call in known])

    async def _end_life(self) -> None:
        """It has not run for so long that another gateway has its streams; they end here, and a new life begins. What
        was told of them since is known to nobody who takes them up: it is written before their callers are sent on."""
        kept: set[str] = set()
        while new := [stream for call, stream in self._ledger.written() if call.id not in kept]:
            await each(new, self._keep, AT_ONCE)
            kept |= {stream.order.call for stream in new}
        left = [call for call, _ in self._ledger.written()]
        log.warning("this gateway was silent: another one has its %d stream(s)", len(left))
        self._hand_on(left, SILENT)
        self._taking_up.look(call.id for call in left)
        self._lives.begin()
        self._ledger.anew()
        self._due = 0.0

    # --- others' ----------------------------------------------------------------------------------
    def _has_beaten(self) -> None:
        self._beaten = True
        self._news.set()

    def _heard(self, life: Life) -> None:
        """Of one that has ended in order nothing is to be waited for."""
        self._roll.heard(life)
        if life.over and not life.heir:
            self._news.set()

    def overdue(self) -> set[str]:
        """Gateways that should have beaten since."""
        return self._roll.overdue(self._lives.me.life)

    def left(self, gateway: str) -> None:
        """It has left NATS: what it leaves is taken over before its silence says so."""
        self._roll.left(gateway)
        self._news.set()

    async def _look(self) -> None:
        await self._news.wait()
        self._news.clear()
        if self._beaten and self._watch is not None and self._watch.synced.is_set():
            self._roll.beat()
        self._beaten = False
        await each(self._roll.abandoned(self._lives.me.life), self._try_to_inherit, AT_ONCE)
        for name, taken in self._taken.items():
            try:
                # It woke, and may die before it finds out what it is.
                if taken.until is not None and self._hearsay.last(name) > taken.last:
                    self._taking_up.look(await self._keep_left(name, taken))
            except SllmError as error:
                log.info("what was told of life %s, which is over, waits: %s", name, error.message)

    async def _try_to_inherit(self, life: Life) -> None:
        try:
            await self._inherit(life)
        except SllmError as error:
            log.info("what gateway %s left waits: %s", life.gateway, error.message)

    async def _inherit(self, life: Life) -> None:
        """Make what it left calls that are kept, of which each is taken up by one gateway."""
        mine = self._lives.me.life
        claimed = life if life.heir == mine else await self._lives.claim(life)
        if claimed is None and await self._lives.find(life.life) is None:
            if self._hearsay.last(life.life) >= 0:  # all of NATS was restarted: what was heard of it is not lost
                claimed = await self._lives.claim_lost(life)
            else:  # it has aged, and its log; its kept calls stand all the same
                self._roll.heard(replace(life, heir=mine, settled=True))
                self._taking_up.look(())
        if claimed is None:
            return
        taken = self._taking(life.life)
        new = await self._keep_left(life.life, taken)
        if new or taken.until is None:  # its kept calls are nobody's from the first look on
            self._taking_up.look(new)
        if taken.until is None:
            taken.until = self._clock() + SAID_S
        if taken.silent and self._clock() < taken.until:
            raise Unavailable(f"{', '.join(sorted(taken.silent))} may have heard more of it")
        log.warning("gateway %s is gone: it left %d stream(s)", life.gateway, len(taken.calls))
        now = await self._lives.settle(claimed) or await self._lives.find(life.life)
        self._roll.heard(now or replace(claimed, settled=True))

    def _taking(self, life: str) -> _Taken:
        """What is known of one that is taken over here, from the first try on."""
        if life not in self._taken:
            while len(self._taken) >= MOST_TAKEN:
                del self._taken[next(iter(self._taken))]
            self._taken[life] = _Taken()
        return self._taken[life]

    async def _keep_left(self, life: str, taken: _Taken) -> set[str]:
        """Its streams that were not among those ``taken`` before."""
        logs, taken.silent = await self._log_of(life, taken.silent)
        found = [each for each in streams(logs[n] for n in sorted(logs)) if each.order.call not in taken.calls]
        await each(found, self._keep, AT_ONCE)
        taken.last = max(logs, default=taken.last)
        new = {stream.order.call for stream in found}
        taken.calls |= new
        return new

    async def _log_of(self, life: str, silent: set[str]) -> tuple[dict[int, Log], set[str]]:
        """All that is stored of it, and what was told and is not, by number; and who has not said what it has heard.
        ``silent``: who had not the last time. It may have begun another life since."""
        logs = await self._lives.log_of(life)
        others = {other.gateway for other in self._roll.living(self._lives.me.life)} | silent
        whole = next((number for number in sorted(logs) if number + 1 not in logs), -1)  # behind it some may be lost
        heard, silent = await self._hearsay.of(life, whole, others)
        return logs | heard, silent

    async def _keep(self, stream: Whole) -> None:
        """Written once, whoever does it: the order last, which makes it a call. One whose body finds no room does not
        hold up the others."""
        call, body, ids = stream.order.call, stream.body, stream.ids
        create, keep = self._journal.create, known_s(KEPT_S)
        if await self._journal.has(call):  # it may have ended, and its body been given back
            return
        try:
            for number, start in enumerate(range(0, len(body), MAX_PART)):
                part = BodyPart(number, body[start : start + MAX_PART])
                await create(BODIES_STREAM, call, part, keep, number=number)
        except StoreFull as error:
            log.error("a stream ends with its gateway: %s", error.message, extra={"call": call})
            ended = Ended(at=stream.order.created, state=CallState.FAILED, error=error.body())
            await create(JOURNAL_STREAM, call, ended, JOURNAL_TTL_S + KNOWN_S)
            return
        if stream.epoch:
            began = Began(at=stream.order.created, numerics=stream.numerics, epoch=stream.epoch, exact=stream.exact)
            if not await create(JOURNAL_STREAM, call, began, keep):
                ids = ()  # of a drawing that the one who wrote another may not have known of: they are drawn again
        if frames := id_frames(ids):
            await create(JOURNAL_STREAM, call, Batch(0, frames), keep, number=0)
        await create(JOURNAL_STREAM, call, stream.order, keep)

    # --- readers ----------------------------------------------------------------------------------
    async def coming(self, call: str) -> None:
        """Wait while a call that nobody keeps may be one of a gateway that has died just now. Raises ``Unavailable``
        where that is not known in the end: nobody may say then that there is no such call."""
        deadline = self._clock() + COMING_S
        mine = self._lives.me
        beats: int | None = None
        """Of its gateway, when a beat of one's own that began after the question had been heard."""
        while self._clock() < deadline:
            if self._watch is None:
                break
            life = self._roll.of_call(call)
            if life is None and self._watch.synced.is_set():
                return
            if life is not None:
                if life.life == mine.life or (life.settled and not self._hearsay.tells_of(life.life, call)):
                    return
                if life.settled and await self._kept(call):
                    return
                if beats is None and self._roll.beat_of(mine.life) > mine.beat:
                    beats = self._roll.beats(life.life)
                if beats is not None and self._lives_on(life, beats):
                    return
            await self._pause(ORDERS_S)
        raise Unavailable(f"whether the gateway of {call} has died is not known yet; ask again")

    async def _kept(self, call: str) -> bool:
        """Whether its heir has written a stream of which it was told late; else it does after its next beat."""
        try:
            await self._journal.find(call)
        except CallNotFound:
            await self._pause(BEAT_S / 4)
            return False
        return True

    def _lives_on(self, life: Life, beats: int) -> bool:
        """Whether it has beaten twice: one beat may have been under way when it died."""
        return not (life.over or life.heir) and self._roll.beats(life.life) >= beats + 2


async def _until(event: asyncio.Event, most_s: float) -> None:
    """Wait for it, or for so long."""
    try:
        async with asyncio.timeout(max(0.0, most_s)):
            await event.wait()
    except TimeoutError:
        pass


def id_frames(ids: tuple[tuple[int, ...], ...]) -> tuple[Frame, ...]:
    """Recorded ids as frames of an answer, without any of its outputs."""
    return tuple(
        Frame(0, FrameKind.IDS, codec.pack(Ids(generation, first, known[first : first + _ID_FRAME])))
        for generation, known in enumerate(ids)
        for first in range(0, len(known), _ID_FRAME)
    )

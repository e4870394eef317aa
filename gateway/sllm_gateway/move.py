"""A call on its way from one instance to another: how far the other one is behind, and what of its frames is new.

Two instances of one numerics class draw the same ids for the same call, so the destination needs no more of the source
than the ids so far (ServerlessLLM, section 5.3). What it gives out is compared with what the source gave, by ids and by
hash: it can take over only as the same answer. What is done next: ``under_way``. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from sllm_gateway.binding import Binding
from sllm_gateway.resumption import VALUES, Resumption
from sllm_gateway.tempo import QUIET_S, Slowing, Tempo
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import NotDeterministic
from sllm_runtime.protocol.frames import End, Feed, Frame, FrameKind, Ids
from sllm_runtime.protocol.limits import FEED_IDS
from sllm_runtime.protocol.records import RouteEntry
from sllm_runtime.protocol.states import check

NEAR: Final = 2
"""Tokens (or outputs) that the destination may be behind when its source is told to stop."""
IN_STEP: Final = 2
"""Rounds of NEAR tokens at most after which it keeps up: the first steps of an instance take longer."""
PATIENT: Final = 5
"""Rounds after which more than NEAR will do, where the source draws more than that in a round."""
ROUNDS: Final = 12
"""Times a destination is fed; then its source stops, however far ahead it is: it is the faster one."""
TOGETHER_S: Final = 5.0
"""A call that could go over waits so long for those that are on their way to the same instance."""
BEHIND: Final = 8
"""Tokens that it may lack then: it computes them in one step."""


class Stage(StrEnum):
    """Where a call on its way stands."""

    OPENED = "opened"
    """The destination computes what it was told at its opening; the source draws."""
    FOLLOWS = "follows"
    """It has computed that, and is fed what the source draws."""
    BESIDE = "beside"
    """Both draw, the source slower than it could, until the destination is ahead."""
    HANDED = "handed"
    """The source ends its step and draws no more; a destination that draws along comes level with it."""
    OVER = "over"
    """The source is left, the destination draws: what comes from it is the caller's, but for what that has already."""


STAGES: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.OPENED: frozenset({Stage.FOLLOWS, Stage.OVER}),
    Stage.FOLLOWS: frozenset({Stage.BESIDE, Stage.HANDED, Stage.OVER}),
    Stage.BESIDE: frozenset({Stage.HANDED, Stage.OVER}),
    Stage.HANDED: frozenset({Stage.OVER}),
    Stage.OVER: frozenset(),
}
"""Over from any of them when the source has died. A call that stays where it is has no move any more."""


def leaving(entries: Sequence[RouteEntry]) -> dict[str, RouteEntry]:
    """Where the calls of an instance are to go, by its name: to one that computes the same bits."""
    known = {entry.instance: entry for entry in entries}
    return {
        entry.instance: known[entry.moves_to]
        for entry in entries
        if entry.moves_to in known and known[entry.moves_to].fingerprint == entry.fingerprint
    }


class Move:
    """The destination's ``binding``, opened with what ``kept`` had then. Raises ``NotDeterministic`` on what the source
    did not say."""

    def __init__(self, binding: Binding, kept: Resumption) -> None:
        self.binding = binding
        self.stage = Stage.OPENED
        self.rests: bool | None = None
        """Whether the destination draws nothing before it is let (``CallHead.held``); None until it has said so."""
        self.rounds = 0
        """Times it was fed."""
        self._in_step = 0
        """Of these the last ones in which it got as few tokens as are near."""
        self._let = False
        self._kept = kept
        self._told = kept.counts
        self._told_outputs = kept.delivered
        self._reached: dict[int, int] = {}
        self._closed: set[int] = set()
        """Generations that have ended there."""
        self._outputs = kept.delivered
        """Whole outputs of the answer that the destination has made or was told to leave out."""
        self._hash = kept.hashed()
        self._parts: list[Frame] = []
        """Of an output of which more is to come, unless the caller has that from the source."""
        self._ahead: list[tuple[int, Frame]] = []
        """Frames that the source has not made yet, each with the number of its output; ids and the end have none."""
        self._digests: dict[int, bytes] = {}
        """Of the outputs among them, as ``Resumption.digest_at``."""
        self._spoke = False
        self._drew = False
        """Whether it has said more than its source had."""
        self._ended = False
        self._said_at = self._since = binding.inbox.heard
        """When the destination was last heard, or told something; since when the stage is what it is."""
        self._tempo = Tempo(binding.inbox.heard)
        self._slowing: Slowing | None = None
        """Of the source, since the destination draws beside it."""
        self.outputs = 0
        """Whole outputs of the source since a step of it was last looked at."""
        self._source_rests = False
        """Whether it has said so since it was told to draw no more: with the last id of any of its generations."""

    # --- how far it is ------------------------------------------------------------------------------
    @property
    def switched(self) -> bool:
        """Whether the source is left."""
        return self.stage is Stage.OVER

    @property
    def resting(self) -> bool:
        """Whether the destination draws nothing when it has what it was told."""
        return self.rests is True and not self._let

    @property
    def computed(self) -> bool:
        """Whether the destination has computed what it was told last (of what it is told it says the last id then), or
        has ended."""
        return self._ended or (self._spoke and self._outputs >= self._told_outputs and self._has_ids)

    @property
    def _has_ids(self) -> bool:
        return all(self._reached.get(number, 0) >= count for number, count in self._told.items())

    @property
    def gap(self) -> int:
        """Tokens of the generation that is furthest behind, or outputs, that the source has and the destination not."""
        behind = (count - self._reached.get(number, 0) for number, count in self._kept.counts.items())
        return max(0, self._kept.delivered - self._outputs, *behind)

    @property
    def half(self) -> bool:
        """Whether the source is in the middle of an output."""
        return self._kept.half

    @property
    def filling(self) -> bool:
        """Whether the destination has yet to prefill what it was told at its opening. What has no ids is drawn again, a
        token a step."""
        return self.stage is Stage.OPENED and (bool(self._told) or not self._told_outputs)

    @property
    def ready(self) -> bool:
        """Whether something may be done: the destination has computed what it was told, the source is in no output."""
        return self.stage is Stage.FOLLOWS and self.computed and not self.half

    @property
    def _close(self) -> int:
        """Tokens that may be missing: NEAR, and when that is not to be had, as many as the source draws in a round."""
        return NEAR if self.rounds < PATIENT else max(NEAR, min(BEHIND, self._tempo.drawn_meanwhile))

    def near(self, now: float) -> bool:
        """Whether its source may stop: little is missing, or no further round would help."""
        if self._ended or self.rounds >= ROUNDS:
            return True
        if self.overtakes:
            return self.gap <= BEHIND and self.rounds >= IN_STEP
        if self.resting:
            return self.gap <= self._close and self._in_step >= IN_STEP
        return self.gap <= NEAR or self.impatient(now)

    def impatient(self, now: float) -> bool:
        """Whether it has waited long enough for others."""
        return self.stage is Stage.FOLLOWS and now - self._since >= TOGETHER_S

    def stuck(self, now: float) -> bool:
        """Whether it rests and lacks what no id brings: a generation has ended, and code or another one followed it."""
        if not self.resting or not self._spoke or self.computed:
            return False
        return now - self._said_at >= (QUIET_S if self._has_ids else TOGETHER_S)

    @property
    def overtakes(self) -> bool:
        """Whether messages take so long beside a token that the destination had better draw beside the source."""
        return self.resting and self._tempo.messages_slow

    def hopeless(self, now: float) -> bool:
        """Whether it does not overtake its source, which stops now."""
        return self.stage is Stage.BESIDE and self._slowing is not None and self._slowing.hopeless(now)

    def goes_over(self, now: float) -> bool:
        """Whether the destination is ahead; or the source, which stops, has told all that it drew, or has had long
        enough. One that draws along has to come level with it, one that did not overtake is fed what it lacks."""
        if self.stage is Stage.BESIDE and not self.half:
            return self._outputs > self._kept.delivered or self._ended
        if self.stage is not Stage.HANDED or self.half:
            return False
        told = self._source_rests and (self.resting or self._slowing is not None)
        level = not self.resting and not self.gap
        return told or level or self._ended or self.late(now)

    def late(self, now: float) -> bool:
        """Whether no more is waited for before it goes over, but for the rest of an output."""
        return self.stage is Stage.HANDED and now - self._since >= self._tempo.stop_s

    @property
    def level(self) -> bool:
        """Whether the destination has all that the caller has: nothing more is to be left out."""
        return self.switched and self._outputs >= self._kept.delivered

    @property
    def over(self) -> bool:
        """Whether nothing is owed to the destination either: it draws."""
        return self.level and (self._drew or self.rests is False)

    # --- the source -----------------------------------------------------------------------------------
    def heard(self, frames: Sequence[Frame], now: float) -> int:
        """The source has told more. The cost of the destination's frames that nobody waits for any more."""
        whole = sum(frame.kind in VALUES and not frame.more for frame in frames)
        self._tempo.source(whole, now)
        self.outputs += whole
        if self._slowing is not None:
            self._slowing.drew(whole)
        if self.stage is Stage.HANDED:
            told = (codec.unpack(Ids, frame.data) for frame in frames if frame.kind is FrameKind.IDS)
            self._source_rests = self._source_rests or any(not (ids.ids or ids.ended) for ids in told)
        return self._caught_up()

    def quiet(self, now: float) -> bool:
        """Whether no output of the source is waited for."""
        return self._tempo.quiet(now)

    # --- what the destination is told -----------------------------------------------------------------
    def opened(self, rests: bool, now: float) -> None:
        """It has said whether it ``rests`` when it has computed what it was told."""
        self.rests = rests
        self._look(now)

    def feed(self, now: float) -> list[Feed]:
        """The next round: what it lacks, if that is ids."""
        self.rounds += 1
        self._in_step = self._in_step + 1 if self.gap <= self._close else 0
        self._told, self._told_outputs, self._said_at = self._kept.counts, self._kept.delivered, now
        self._tempo.fed(now)
        return self.lacking()

    def lacking(self) -> list[Feed]:
        """Ids that the source has and the destination has not said, and which generations have ended: it rests, or does
        not overtake."""
        if not self.rests:
            return []
        ended = set(self._kept.ended) - self._closed
        numbers = sorted({*self._kept.counts, *ended})
        return [feed for number in numbers for feed in self._lacks(number, ended=number in ended)]

    def _lacks(self, generation: int, *, ended: bool) -> list[Feed]:
        call, epoch, known = self.binding.call, self.binding.epoch, self._kept.known(generation)
        first = self._reached.get(generation, 0)
        starts = range(first, len(known), FEED_IDS) or ((first,) if ended else ())
        cached = self._kept.cached_of(generation)
        feeds = [
            Feed(call, epoch, generation, at, tuple(known[at : at + FEED_IDS]), held=True, cached=cached)
            for at in starts
        ]
        if ended:
            feeds[-1] = msgspec.structs.replace(feeds[-1], ended=True)
        return feeds

    def hand(self, now: float) -> None:
        """The source is told to draw no more (``going``)."""
        self._go(Stage.HANDED, now)

    def beside(self, now: float) -> None:
        """The destination is let draw, and the source draws on, slower."""
        self._go(Stage.BESIDE, now)
        self._slowing = Slowing(self._tempo.interval, now)

    def slower(self) -> float:
        """Seconds that the source is to take for a token from now on; 0: as it was told."""
        if self.stage is not Stage.BESIDE or self._slowing is None:
            return 0.0
        return self._slowing.say()

    @property
    def let(self) -> bool:
        """Whether the destination was let draw."""
        return self._let

    def let_draw(self) -> list[Feed]:
        """``lacking``; and a destination that rests, or may, draws from the last of these messages on."""
        if self.rests is False:
            return []
        feeds = self.lacking()
        self._let = True
        *before, last = feeds or [Feed(self.binding.call, self.binding.epoch, 0, 0, ())]
        return [*before, msgspec.structs.replace(last, held=False)]

    def _go(self, stage: Stage, now: float) -> None:
        self.stage, self._since = check(STAGES, self.stage, stage), now

    def _look(self, now: float) -> None:
        if self.stage is Stage.OPENED and self.computed and self.rests is not None:
            self._go(Stage.FOLLOWS, now)

    # --- frames of the destination --------------------------------------------------------------------
    def take(self, frames: Sequence[Frame], now: float) -> tuple[list[Frame], int]:
        """Of frames that came, in order, those that are new to the caller (none before ``switch``), and the cost of
        those that nobody waits for. Raises also what the destination ended with before ``switch``."""
        new: list[Frame] = []
        dropped = 0
        self._said_at = now if frames else self._said_at
        for frame in frames:
            self._spoke = True
            if frame.kind is FrameKind.END:
                self._end(frame)
                self._drew = True
                new.append(frame)
            elif frame.kind is FrameKind.IDS:
                if self._drawn(codec.unpack(Ids, frame.data)):
                    self._drew = True
                    new.append(frame)
                else:
                    dropped += frame.cost
            elif self.level:
                new.append(frame)
                self._outputs += not frame.more
            else:
                dropped += self._early(frame)
        if self.switched:
            return new, dropped
        if self.computed:
            self._tempo.computed(now)
        self._look(now)
        self._ahead += [(0, frame) for frame in new]
        return [], dropped

    def compare(self) -> None:
        """What the destination said before its source did. Raises ``NotDeterministic`` if that was another answer."""
        if self._ended:
            self._compare_count()
        for number, digest in self._digests.items():
            if number <= self._kept.delivered:
                self._compare(number, digest)
        for _, frame in self._ahead:
            if frame.kind is FrameKind.IDS:
                self._drawn(codec.unpack(Ids, frame.data))

    def switch(self, now: float) -> tuple[list[Frame], int]:
        """The source is left. As ``take``, of the frames that have waited; nothing has changed where it raises."""
        self.compare()
        self._go(Stage.OVER, now)
        given = self._kept.delivered
        new = [frame for number, frame in self._ahead if not 0 < number <= given]
        dropped = sum(frame.cost for number, frame in self._ahead if 0 < number <= given) + self._caught_up()
        new += self._parts  # of one that the caller has not had
        self._parts, self._ahead = [], []
        return new, dropped

    def _end(self, frame: Frame) -> None:
        error = codec.unpack(End, frame.data).error
        if error is not None and not self.switched:
            raise error.to_error()
        self._ended = True
        if error is None and self.switched:
            self._compare_count()

    def _drawn(self, ids: Ids) -> bool:
        """Whether some of them are new, or that it has ended."""
        known = tuple(self._kept.known(ids.generation)[ids.first : ids.first + len(ids.ids)])
        if known != ids.ids[: len(known)]:
            raise NotDeterministic(f"instance {self.binding.instance} draws other ids than the one that it relieves")
        self._reached[ids.generation] = max(self._reached.get(ids.generation, 0), ids.first + len(ids.ids))
        if not ids.ended:
            return len(known) < len(ids.ids)
        self._closed.add(ids.generation)
        return len(known) < len(ids.ids) or ids.generation not in self._kept.ended

    def _early(self, frame: Frame) -> int:
        """A part of an output that the caller may have from the source. The cost of what is dropped now."""
        self._hash.update(frame.data)
        self._parts.append(frame)
        dropped = self._caught_up()
        if frame.more:
            return dropped
        self._outputs += 1
        if self._outputs <= self._kept.delivered:
            self._compare(self._outputs, self._hash.digest())
        else:
            self._digests[self._outputs] = self._hash.digest()
            self._ahead += [(self._outputs, part) for part in self._parts]
            self._parts = []
        return dropped

    def _caught_up(self) -> int:
        """The cost of parts that wait for the rest of an output which the caller has by now. They are not kept until it
        is whole: it may be larger than all that the destination may send before some of it is dropped."""
        if self._outputs >= self._kept.delivered:
            return 0
        parts, self._parts = self._parts, []
        return sum(part.cost for part in parts)

    def _compare_count(self) -> None:
        """It has ended: after all that the caller has."""
        if self._outputs < self._kept.delivered:
            text = f"instance {self.binding.instance} ended after {self._outputs} outputs, {self._kept.delivered} were"
            raise NotDeterministic(f"{text} given by the one that it relieves")

    def _compare(self, outputs: int, digest: bytes) -> None:
        if self._kept.digest_at(outputs) != digest:
            text = f"output {outputs} of instance {self.binding.instance} is not that of the one that it relieves"
            raise NotDeterministic(f"{text}; a resumable function must yield the same for the same arguments and ids")

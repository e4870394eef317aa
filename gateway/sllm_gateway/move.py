"""A call on its way from one instance to another: how far the other one is behind, and what of its frames is new.

Two instances of one numerics class draw the same ids for the same call, so the destination needs no more of the source
than the ids so far (ServerlessLLM, section 5.3). What it gives out is compared with what the source gave, by ids and by
hash: it can take over only as the same answer. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Final

import msgspec

from sllm_gateway.binding import Binding
from sllm_gateway.resumption import Resumption
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import NotDeterministic
from sllm_runtime.protocol.frames import End, Feed, Frame, FrameKind, Ids
from sllm_runtime.protocol.limits import FEED_IDS
from sllm_runtime.protocol.records import RouteEntry

GAP: Final = 2
"""Tokens (or outputs) that the destination may be behind when the source stops."""
ROUNDS: Final = 5
"""Times the destination is told what it lacks, where a round costs a prefill; then the source stops, however far behind
it is. Where it is fed a round costs a step: after so many it need no longer be level, but within GAP."""
MOST_ROUNDS: Final = 50
"""Times a destination is fed; then the source stops, however far behind it is: it is the slower one."""
TOGETHER_S: Final = 5.0
"""A call that could go over waits so long for those that are on their way to the same instance."""
LAST: Final = 4
"""Tokens that a destination that rests may be behind when the source stops: they are computed in the step that draws
the next."""
STOP_S: Final = 0.05
"""At least so long a source that is to draw no more has for its last output; twice its longest pause otherwise."""
QUIET_S: Final = 1.0
"""A source that has told nothing for so long is not waited for."""


class Next(Enum):
    """What is to be done for a call on its way."""

    WAIT = auto()
    FEED = auto()
    """Tell the destination what it lacks (``Move.feed``)."""
    OPEN = auto()
    """It takes no ids while it runs: open the call there anew."""
    DRAW = auto()
    """No id brings it further: let it draw (``Move.let_draw``)."""
    STOP = auto()
    """Sources of those that go to the same instance are to draw no more (``Move.stop``)."""
    SWITCH = auto()
    """The source stops (``Move.switch``)."""


def leaving(entries: Sequence[RouteEntry]) -> dict[str, RouteEntry]:
    """Where the calls of an instance are to go, by its name: to one that computes the same bits."""
    known = {entry.instance: entry for entry in entries}
    return {
        entry.instance: known[entry.moves_to]
        for entry in entries
        if entry.moves_to in known and known[entry.moves_to].fingerprint == entry.fingerprint
    }


class Move:
    """The destination's ``binding``, opened in ``round_`` with what ``kept`` had then; further rounds ``feed`` it,
    where it takes that, or are a ``Move`` each. ``source_holds``: whether the source takes ``Hold``. Raises
    ``NotDeterministic`` on what the source did not say."""

    def __init__(self, binding: Binding, kept: Resumption, round_: int, *, source_holds: bool = False) -> None:
        self.binding = binding
        self.round = round_
        self.feeds: bool | None = None
        """Whether the destination takes ids while it runs; None until it has said so."""
        self.holds: bool | None = None
        """Whether it draws nothing before it is let (``CallHead.held``); None until it has said so."""
        self._let = False
        """Whether it was let."""
        self.switched = False
        """Whether the source is left: what comes from ``binding`` is the caller's, but for what that has already."""
        self._kept = kept
        self._told = kept.counts
        self._told_outputs = kept.delivered
        self._fed = kept.counts
        """Ids of each generation that were sent to the destination, whether or not a round had it so."""
        self._reached: dict[int, int] = {}
        self._outputs = kept.delivered
        """Whole outputs of the answer that the destination has made or was told to leave out."""
        self._hash = kept.hashed()
        self._parts: list[Frame] = []
        """Of an output of which more is to come."""
        self._ahead: list[tuple[int, Frame]] = []
        """Frames that the source has not made yet, each with the number of its output; ids and the end have none."""
        self._digests: dict[int, bytes] = {}
        """Of the outputs among them, as ``Resumption.digest_at``."""
        self._spoke = False
        self._drew = False
        """Whether it has said more than its source had."""
        self._ended = False
        self._computed_at: float | None = None
        """When the destination had computed first what it was told."""
        self._said_at = binding.inbox.heard
        """When the destination was last heard, or told something."""
        self._ready_at: float | None = None
        """When the source first might have stopped; it stops after one of its outputs."""
        self._source_at = binding.inbox.heard
        """When the source was last heard."""
        self._source_holds = source_holds
        self._pace = 0.0
        """The longest time in which the source has told nothing."""
        self._stopped_at: float | None = None
        """When the source was told to draw no more."""
        self._told_last = False
        """Whether it has told a whole output since: that of the step that it was in."""

    # --- how far it is ------------------------------------------------------------------------------
    @property
    def holding(self) -> bool:
        """Whether the destination rests when it has what it was told; else it draws ids of its own then."""
        return self.holds is True and not self._let

    @property
    def computed(self) -> bool:
        """Whether the destination has what it was told, or has ended."""
        if self._ended:
            return True
        return self._spoke and self._outputs >= self._told_outputs and self._has_ids

    @property
    def _has_ids(self) -> bool:
        return all(self._reached.get(number, 0) >= count for number, count in self._told.items())

    @property
    def gap(self) -> int:
        """Tokens of the generation that is furthest behind, or outputs, that the source has and the destination not."""
        behind = [count - self._reached.get(number, 0) for number, count in self._kept.counts.items()]
        return max(*behind, self._kept.delivered - self._outputs, 0) if behind else self._kept.delivered - self._outputs

    @property
    def near(self) -> bool:
        """Whether the destination is as little behind as rounds are for."""
        if self.holding:
            return self.gap <= LAST
        return self.gap <= (0 if self.feeds and self.round < ROUNDS else GAP)

    @property
    def ready(self) -> bool:
        """Whether the source may stop: little is missing, or no further round would help."""
        most = MOST_ROUNDS if self.feeds else ROUNDS
        return self.computed and not self._kept.half and (self.near or self.round >= most or self._ended)

    @property
    def filling(self) -> bool:
        """Whether the destination has yet to prefill what it was told at its opening. What has no ids is drawn again, a
        token a step."""
        return self._computed_at is None and (bool(self._told) or not self._told_outputs)

    @property
    def abreast(self) -> bool:
        """Whether the destination has nothing of it to prefill but what a step may bring, also when the source has told
        one token more: what that told of all calls is looked at one by one. One that rests has computed all that it was
        told."""
        if self.filling:
            return False
        if self.holding:
            return self.stopping or (self.computed and self.gap <= LAST - 1)
        return not self.feeds or self.gap <= GAP

    @property
    def stopping(self) -> bool:
        """Whether the source was told to draw no more."""
        return self._stopped_at is not None

    @property
    def may_stop(self) -> bool:
        """Whether that is all that is left to do before the switch."""
        return self._source_holds and self.holding and self.ready and not self._ended and not self.stopping

    @property
    def may_join(self) -> bool:
        """Whether a round of another one may bring it further too: their destination computes them in one step."""
        return self.holding and self.computed and self.gap > 0 and not self._ended and not self.stopping

    def waits(self, others: Iterable[Move], now: float) -> bool:
        """Whether, computed, it waits at the source for ``others`` on their way to the same instance: as long as that
        prefills them each of its steps takes longer than one of the source's."""
        if self.feeds is False or self._computed_at is None or now - self._computed_at >= TOGETHER_S:
            return False
        return any(not other.abreast if self.ready else other.filling for other in others)

    @property
    def level(self) -> bool:
        """Whether the destination has all that the caller has: nothing more is to be left out."""
        return self.switched and self._outputs >= self._kept.delivered

    @property
    def over(self) -> bool:
        """Whether nothing is owed to the destination either: it draws."""
        return self.level and (self._drew or self.holds is False)

    def heard(self, now: float, *, after_output: bool = False) -> None:
        """The source has told more, the end of an output last (``after_output``)."""
        self._pace = max(self._pace, now - self._source_at)
        self._source_at = now
        self._told_last = self._told_last or (self.stopping and after_output)

    def next(self, others: Iterable[Move], now: float, *, after_output: bool = False) -> Next:
        """``others``: those on their way to the same instance. ``after_output``: the source has just given out a whole
        output, and so begins its next step: a destination that rests draws what comes after that."""
        if self.feeds is None and not self._ended:
            return Next.WAIT  # its frames have overtaken what it says of itself
        if self.stopping:
            return Next.SWITCH if self._has_stopped(others, now) else Next.WAIT
        if self._stuck(now):
            return Next.DRAW
        if not self.computed or self.waits(others, now):
            return Next.WAIT
        if self.ready:
            self._ready_at = now if self._ready_at is None else self._ready_at
            if after_output and self.may_stop:
                return Next.STOP
            return Next.SWITCH if after_output or self._may_switch(now) else Next.WAIT
        if self.near:
            return Next.WAIT
        return Next.FEED if self.feeds else Next.OPEN

    def _may_switch(self, now: float) -> bool:
        """Whether the next output of the source is not worth waiting for."""
        assert self._ready_at is not None
        return not self.holding or self._ended or now - min(self._source_at, self._ready_at) >= QUIET_S

    def _has_stopped(self, others: Iterable[Move], now: float) -> bool:
        """Whether the source has told the last of it, and of those that stop with it; or has had long enough."""
        assert self._stopped_at is not None
        if self._kept.half:
            return False
        if now - self._stopped_at >= min(QUIET_S, max(STOP_S, 2 * self._pace)):
            return True
        return self._told_last and all(other._told_last or not other.stopping for other in others)

    def _stuck(self, now: float) -> bool:
        """Whether it rests and lacks what no id brings: a generation has ended, and code or another one followed it."""
        if not self.holding or not self._spoke or self.computed:
            return False
        return now - self._said_at >= (QUIET_S if self._has_ids else TOGETHER_S)

    def feed(self, now: float) -> list[Feed]:
        """The next round: what to tell the destination."""
        self.round += 1
        self._told, self._told_outputs = self._kept.counts, self._kept.delivered
        self._said_at, self._ready_at = now, None
        return self.lacking()

    def stop(self, now: float) -> list[Feed]:
        """The source is told to draw no more. What to tell the destination, which computes it beside the source's last
        step: so it lacks one token at the switch."""
        self._stopped_at = now
        return self.feed(now) if self.gap else []

    def lacking(self) -> list[Feed]:
        """Ids that the source has and the destination, which takes them, has not said."""
        return self._beyond(self._reached)

    def let_draw(self) -> list[Feed]:
        """``lacking``; and a destination that is held, or may be, draws from the last of these messages on."""
        feeds = self.lacking()
        if self.holds is False:
            return feeds
        self._let = True
        *before, last = feeds or [Feed(self.binding.call, self.binding.epoch, 0, 0, ())]
        return [*before, msgspec.structs.replace(last, held=False)]

    def forward(self) -> list[Feed]:
        """Ids that the source has told since, to a destination that has computed what it was told. Those of a round,
        which follow a step of the destination, come in the middle of its next one, in which it draws the first of them
        itself: so it stays a token behind a source that is as quick. These come before its next step."""
        return self._beyond(self._fed) if self._computed_at is not None else []

    def _beyond(self, known: Mapping[int, int]) -> list[Feed]:
        if not self.feeds:
            return []
        call, epoch, self._fed = self.binding.call, self.binding.epoch, self._kept.counts
        return [
            Feed(call, epoch, number, at, tuple(self._kept.known(number)[at : at + FEED_IDS]), self.holding)
            for number, count in self._fed.items()
            for at in range(max(known.get(number, 0), self._reached.get(number, 0)), count, FEED_IDS)
        ]

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
        if self._computed_at is None and self.computed:
            self._computed_at = now
        self._ahead += [(0, frame) for frame in new]
        return [], dropped

    def switch(self) -> tuple[list[Frame], int]:
        """The source is left. As ``take``, of the frames that have waited."""
        self.switched = True
        given = self._kept.delivered
        for number, digest in self._digests.items():
            if number <= given:
                self._compare(number, digest)
        new = [frame for number, frame in self._ahead if not 0 < number <= given]
        dropped = sum(frame.cost for number, frame in self._ahead if 0 < number <= given)
        if self._outputs >= given:
            new += self._parts
            self._parts = []
        self._ahead = []
        return new, dropped

    def _end(self, frame: Frame) -> None:
        error = codec.unpack(End, frame.data).error
        if error is not None and not self.switched:
            raise error.to_error()
        self._ended = True

    def _drawn(self, ids: Ids) -> bool:
        """Whether some of them are new."""
        known = tuple(self._kept.known(ids.generation)[ids.first : ids.first + len(ids.ids)])
        if known != ids.ids[: len(known)]:
            raise NotDeterministic(f"instance {self.binding.instance} draws other ids than the one that it relieves")
        self._reached[ids.generation] = max(self._reached.get(ids.generation, 0), ids.first + len(ids.ids))
        return len(known) < len(ids.ids)

    def _early(self, frame: Frame) -> int:
        """A part of an output that the caller may have from the source. The cost of what is dropped now."""
        self._parts.append(frame)
        if frame.more:
            return 0
        parts, self._parts = self._parts, []
        for part in parts:
            self._hash.update(part.data)
        self._outputs += 1
        if self._outputs <= self._kept.delivered:
            self._compare(self._outputs, self._hash.digest())
            return sum(part.cost for part in parts)
        self._digests[self._outputs] = self._hash.digest()
        self._ahead += [(self._outputs, part) for part in parts]
        return 0

    def _compare(self, outputs: int, digest: bytes) -> None:
        if self._kept.digest_at(outputs) != digest:
            text = f"output {outputs} of instance {self.binding.instance} is not that of the one that it relieves"
            raise NotDeterministic(f"{text}; a resumable function must yield the same for the same arguments and ids")

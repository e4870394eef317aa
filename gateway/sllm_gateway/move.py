"""A call on its way from one instance to another: how far the other one is behind, and what of its frames is new.

Two instances of one numerics class draw the same ids for the same call, so the destination needs no more of the source
than the ids so far (ServerlessLLM, section 5.3). What it gives out is compared with what the source gave, by ids and by
hash: it can take over only as the same answer. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

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
    where it takes that, or are a ``Move`` each. Raises ``NotDeterministic`` on what the source did not say."""

    def __init__(self, binding: Binding, kept: Resumption, round_: int) -> None:
        self.binding = binding
        self.round = round_
        self.feeds: bool | None = None
        """Whether the destination takes ids while it runs; None until it has said so."""
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
        self._ended = False
        self._computed_at: float | None = None
        """When the destination had computed first what it was told."""

    # --- how far it is ------------------------------------------------------------------------------
    @property
    def computed(self) -> bool:
        """Whether the destination has what it was told: it draws ids of its own now, or has ended."""
        if self._ended:
            return True
        if not self._spoke or self._outputs < self._told_outputs:
            return False
        return all(self._reached.get(number, 0) >= count for number, count in self._told.items())

    @property
    def gap(self) -> int:
        """Tokens of the generation that is furthest behind, or outputs, that the source has and the destination not."""
        behind = [count - self._reached.get(number, 0) for number, count in self._kept.counts.items()]
        return max(*behind, self._kept.delivered - self._outputs, 0) if behind else self._kept.delivered - self._outputs

    @property
    def near(self) -> bool:
        """Whether the destination is as little behind as rounds are for."""
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
        """Whether the destination has nothing of it to prefill but what a step may bring."""
        return not self.filling and (not self.feeds or self.gap <= GAP)

    def held(self, others: Iterable[Move], now: float) -> bool:
        """Whether, computed, it waits at the source for ``others`` on their way to the same instance: as long as that
        prefills them each of its steps takes longer than one of the source's."""
        if self.feeds is False or self._computed_at is None or now - self._computed_at >= TOGETHER_S:
            return False
        return any(not other.abreast if self.ready else other.filling for other in others)

    @property
    def over(self) -> bool:
        """Whether the destination has all that the caller has: nothing more is to be left out."""
        return self.switched and self._outputs >= self._kept.delivered

    def feed(self) -> list[Feed]:
        """The next round: what to tell the destination."""
        self.round += 1
        self._told, self._told_outputs = self._kept.counts, self._kept.delivered
        return self.lacking()

    def lacking(self) -> list[Feed]:
        """Ids that the source has and the destination, which takes them, has not said."""
        return self._beyond(self._reached)

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
            Feed(call, epoch, number, at, tuple(self._kept.known(number)[at : at + FEED_IDS]))
            for number, count in self._fed.items()
            for at in range(max(known.get(number, 0), self._reached.get(number, 0)), count, FEED_IDS)
        ]

    # --- frames of the destination --------------------------------------------------------------------
    def take(self, frames: Sequence[Frame], now: float) -> tuple[list[Frame], int]:
        """Of frames that came, in order, those that are new to the caller (none before ``switch``), and the cost of
        those that nobody waits for. Raises also what the destination ended with before ``switch``."""
        new: list[Frame] = []
        dropped = 0
        for frame in frames:
            self._spoke = True
            if frame.kind is FrameKind.END:
                self._end(frame)
                new.append(frame)
            elif frame.kind is FrameKind.IDS:
                if self._drawn(codec.unpack(Ids, frame.data)):
                    new.append(frame)
                else:
                    dropped += frame.cost
            elif self.over:
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

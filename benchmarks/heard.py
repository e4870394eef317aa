"""Streams as their callers heard them: what was lost, repeated or different, and the gaps between their events."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sllm.sse import Parser
from sllm_gateway.pace import STRETCH
from sllm_runtime.protocol import timeline


@dataclass(frozen=True)
class Window:
    """From a command until what followed from it was over, by ``time.monotonic``."""

    begin: float
    end: float


class Piece(NamedTuple):
    """Bytes of a stream and when they came, by ``time.monotonic``."""

    at: float
    data: bytes
    anew: bool = False
    """The first of a call that was made anew, after its stream had broken off."""


@dataclass
class Heard:
    """One stream as its caller saw it. ``arrived``: what is not yet understood. ``error``: it broke off by that."""

    ask: int
    ids: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    moves: list[float] = field(default_factory=list)
    """When it went over to another instance."""
    anew: list[int] = field(default_factory=list)
    """Its events, by their place, that were the first news after it was called anew."""
    arrived: list[Piece] = field(default_factory=list)

    @property
    def usual(self) -> float:
        """The mean gap (events that came together have none between them, so a median says nothing), but for those in
        which the call was made anew; 0: none is known."""
        if len(self.times) < 2:
            return 0.0
        without = sum(self.times[at] - self.times[at - 1] for at in self.anew)
        return (self.times[-1] - self.times[0] - without) / max(1, len(self.times) - 1 - len(self.anew))


@dataclass
class Sums:
    """Over all streams. ``broken``: those that ended with an error, what they had not said being lost."""

    streams: int = 0
    broken: int = 0
    events: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0

    @property
    def wrong(self) -> int:
        return self.lost + self.repeated + self.different

    def add(self, heard: Heard, right: Sequence[Any]) -> None:
        """Compare one whole stream with the answer of the same call: one in another order is another one."""
        seen = set(heard.ids)
        self.streams += 1
        self.broken += bool(heard.error)
        self.events += len(heard.ids)
        self.lost += len(set(range(len(right))) - seen)
        self.repeated += len(heard.ids) - len(seen)
        pairs = zip(heard.ids, heard.values, strict=True)
        self.different += sum(at >= len(right) or right[at] != value for at, value in pairs)
        self.different += sum(after < before for before, after in itertools.pairwise(dict.fromkeys(heard.ids)))


def understand(heard: Heard) -> None:
    """The events of what arrived, each once where the call was made anew. A stream without its end has broken off."""
    parser, comment, ended, known = Parser(), "", False, frozenset[int]()
    for at, data, anew in heard.arrived:
        if anew:
            parser, known, heard.error = Parser(), frozenset(heard.ids), ""
        for event in parser.feed(data):
            ended = ended or event.done
            if event.event == "error":
                heard.error = event.data[:300]
            elif event.comment is not None:
                comment = event.comment if event.comment.startswith("timeline ") else comment
            elif event.event == "message" and not event.done and int(event.id or 0) not in known:
                if known and len(heard.ids) == len(known):
                    heard.anew.append(len(heard.ids))
                heard.ids.append(int(event.id or 0))
                heard.values.append(json.loads(event.data))
                heard.times.append(at)
    heard.arrived.clear()
    if not ended and not heard.error:
        heard.error = "the stream ended without its end"
    if comment and heard.times:
        heard.moves = moves(heard, comment)


def untouched(heard: Sequence[Heard], windows: Sequence[Window]) -> list[Heard]:
    """Whole streams of more than one event that no window came upon."""
    return [
        each
        for each in heard
        if each.usual > 0.0
        and not each.error
        and not any(window.begin <= each.times[-1] and each.times[0] <= window.end for window in windows)
    ]


def longest(heard: Heard, windows: Sequence[Window]) -> list[float]:
    """Seconds of the longest gap in each window that this stream ran through."""
    gaps = list(itertools.pairwise(heard.times))
    inside = [[b - a for a, b in gaps if b >= window.begin and a <= window.end] for window in windows]
    through = [found for window, found in zip(windows, inside, strict=True) if found and heard.times[-1] > window.end]
    # One that broke off at once may have nothing but events that came together.
    return [max(found) for found in through if heard.usual > 0.0]


def there(heard: Heard, windows: Sequence[Window]) -> list[Window]:
    """Those that began when the stream had."""
    return [each for each in windows if heard.times and heard.times[0] <= each.begin]


def around(at: float, interval: float) -> Window:
    """In which the caller notices that its call went over at ``at``: what was written before may still be in reserve
    then, and the gap comes when that is used up."""
    return Window(at - interval, at + (1 + sum(STRETCH)) * interval)


def pauses(heard: Heard) -> list[float]:
    """Seconds of the longest gap ``around`` each moment at which it went over."""
    return longest(heard, [around(at, heard.usual) for at in heard.moves])


def jitters(heard: Heard, windows: Sequence[Window], chance: random.Random) -> list[float]:
    """As ``pauses``, at a random moment in each window that this stream ran through: what that rule finds where nothing
    happens."""
    if len(heard.times) < 2:
        return []
    reach = around(0.0, heard.usual).end
    inside = [each for each in windows if heard.times[0] <= each.begin and heard.times[-1] > each.end + reach]
    moments = [chance.uniform(each.begin, each.end) for each in inside]
    return longest(heard, [around(at, heard.usual) for at in moments])


def moves(heard: Heard, comment: str) -> list[float]:
    """When it went over, by the clock of its events: its first one came when the gateway had it."""
    spans = timeline.parse_comment(comment)
    first = next((span.at for span in spans if span.name == timeline.TOKENS), 0.0)
    return [heard.times[0] + (span.at - first) / 1e3 for span in spans if span.name == timeline.MOVE]

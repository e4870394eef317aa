"""What ``replay`` replays: when which function is called, for how many tokens. Pure: one seed, one trace.

Gaps between arrivals are drawn from a Gamma distribution with a coefficient of variation of 8 (ServerlessLLM, section
7.1, after AlpaServe), then scaled so that the last call comes at the end: a few long silences, and between them many
calls at nearly the same moment. Which function is called follows a law of Zipf.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CV: Final = 8.0
LENGTHS: Final[Mapping[int, float]] = {16: 0.45, 48: 0.3, 128: 0.2, 640: 0.05}
"""How long calls take, in tokens, and how often: many short, few long. Few different ones, so that each call's answer
is known."""


@dataclass(frozen=True)
class Arrival:
    """A call: seconds after the beginning, number of the function (0 is the most popular), tokens asked for."""

    at: float
    function: int
    tokens: int


@dataclass(frozen=True)
class Shape:
    """``calls`` within ``seconds``, over so many ``functions``; the function of rank r is called in proportion to
    ``r ** -skew``."""

    functions: int
    calls: int
    seconds: float
    skew: float = 1.0

    @property
    def weights(self) -> tuple[float, ...]:
        """How popular each function is, beside the others."""
        return tuple(rank**-self.skew for rank in range(1, self.functions + 1))


def trace(shape: Shape, seed: int, cv: float = CV) -> tuple[Arrival, ...]:
    """The calls, in order of their time. The same for the same ``shape`` and ``seed``."""
    rng = random.Random(seed)
    gaps = [rng.gammavariate(cv**-2, 1.0) for _ in range(shape.calls)]
    scale = shape.seconds / (sum(gaps) or 1.0)
    times = itertools.accumulate(gap * scale for gap in gaps)
    functions = rng.choices(range(shape.functions), shape.weights, k=shape.calls)
    tokens = rng.choices(list(LENGTHS), list(LENGTHS.values()), k=shape.calls)
    return tuple(map(Arrival, times, functions, tokens))

"""Where the time of a call went: named spans relative to a common start. No clock of another machine is involved."""

from __future__ import annotations

import re
from typing import Final

import msgspec

_MOST_MS: Final = 1e10
"""Four months."""
_NO_TOKEN: Final = re.compile(r"[^A-Za-z0-9_.-]")
QUEUE: Final = "queue"
SANDBOX: Final = "sandbox"
CONVERT: Final = "convert"
"""Beside ``sandbox``, in a start on a node that lacks the model: it is fetched and converted there first."""
IMPORT: Final = "import"
WEIGHTS: Final = "weights"
SETUP: Final = "setup"
PROVE: Final = "prove"
"""Within ``setup``, in a start whose engine knows of no self-test of this model on such a machine: it makes one, which
later starts are told."""
FIRST_TOKEN: Final = "first_token"
TOKENS: Final = "tokens"
MOVE: Final = "move"
"""When a running call went over to another instance; it takes no time."""

START_STAGES: Final = (SANDBOX, IMPORT, WEIGHTS, SETUP)
"""Stages of every start of an instance, in order of their beginning; ``import`` and ``weights`` overlap."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """``name`` ran for ``ms`` milliseconds, beginning ``at`` milliseconds after the timeline's start."""

    name: str
    at: float
    ms: float


def sane(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Those of ``spans`` whose numbers can be times: they come from sandboxes, and NaN is no JSON."""
    return tuple(span for span in spans if abs(span.at) <= _MOST_MS and 0.0 <= span.ms <= _MOST_MS)


def shift(spans: tuple[Span, ...], by_ms: float) -> tuple[Span, ...]:
    """The same spans seen from a timeline that began ``by_ms`` earlier."""
    return tuple(Span(span.name, span.at + by_ms, span.ms) for span in spans)


def server_timing(spans: tuple[Span, ...]) -> str:
    """The ``Server-Timing`` header's value. Names come from sandboxes: what could end a header is replaced."""
    return ", ".join(f"{_NO_TOKEN.sub('_', span.name)[:64]};dur={span.ms:.1f}" for span in spans)


def comment(spans: tuple[Span, ...]) -> str:
    """The text of a stream's last comment: ``timeline queue=0.1 sandbox=21.0@0.3 …`` (duration @ start, ms)."""
    return "timeline " + " ".join(f"{span.name}={span.ms:.1f}@{span.at:.1f}" for span in spans)


def parse_comment(text: str) -> tuple[Span, ...]:
    """The spans of ``comment``'s text. Raises ``ValueError`` on anything else."""
    words = text.split()
    if not words or words[0] != "timeline":
        raise ValueError(f"not a timeline comment: {text[:80]!r}")
    spans = []
    for word in words[1:]:
        name, _, times = word.partition("=")
        ms, _, at = times.partition("@")
        spans.append(Span(name, float(at), float(ms)))
    return tuple(spans)

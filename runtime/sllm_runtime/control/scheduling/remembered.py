"""What was learned, as a record that the next controller reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, TypeVar

from sllm_runtime.control.scheduling.learned import RELEASE_S, WARM_SANDBOX_S, Learned, Recent, Version
from sllm_runtime.control.scheduling.line import Line
from sllm_runtime.protocol.records import Fitted, LearnedRecord, Measured, ProofsRecord

K = TypeVar("K")
V = TypeVar("V")

MOST: Final = 300
"""Of each kind, the last ones: as many as one record takes, which is a message of at most 512 KiB."""
_WARM: Final = {True: "warm", False: "cold"}


def record(learned: Learned) -> LearnedRecord:
    """What of ``learned`` outlives its controller. Starts are counted in ``Popularity``; proofs have records of
    their own (``changes``)."""
    return LearnedRecord(
        sandbox=tuple(
            Measured(_digits(recent), node=node, kind=_WARM[warm]) for (node, warm), recent in _last(learned.sandbox)
        ),
        disk=tuple(Measured(_digits(recent), node=node) for node, recent in _last(learned.disk)),
        imports=_by_version(learned.imports),
        setup=_by_version(learned.setup),
        rest=_by_tier(learned.rest),
        lead=_by_tier(learned.lead),
        release=tuple(Measured(_digits(recent), *(key or ("", 0))) for key, recent in _last(learned.release)),
        calls=_by_version(learned.calls),
        moves=tuple(
            Fitted(model, line.slope, line.base, line.n, line.x, line.y, line.xx, line.xy)
            for model, line in _last(learned.moves)
        ),
    )


def learned(stored: LearnedRecord, proofs: Iterable[ProofsRecord] = ()) -> Learned:
    """What records say. Bounds, which hold for all that was seen, follow from it."""
    sandbox = {
        (each.node, each.kind == _WARM[True]): Recent.of(each.seconds) for each in stored.sandbox if each.seconds
    }
    release = {_version(each): Recent.of(each.seconds) for each in stored.release if each.seconds}
    return Learned(
        sandbox=sandbox,
        disk={each.node: Recent.of(each.seconds) for each in stored.disk if each.seconds},
        imports={(each.function, each.version): Recent.of(each.seconds) for each in stored.imports if each.seconds},
        setup={(each.function, each.version): Recent.of(each.seconds) for each in stored.setup if each.seconds},
        rest={(_version(each), each.kind): Recent.of(each.seconds) for each in stored.rest if each.seconds},
        lead={(_version(each), each.kind): Recent.of(each.seconds) for each in stored.lead if each.seconds},
        release=release,
        calls={(each.function, each.version): Recent.of(each.seconds) for each in stored.calls if each.seconds},
        moves={
            each.model: Line(each.slope, each.base, each.n, each.x, each.y, each.xx, each.xy) for each in stored.moves
        },
        proofs={(each.function, each.version): each.proofs for each in proofs},
        least=_least(WARM_SANDBOX_S, sandbox.values()),
        least_release=_least(RELEASE_S, release.values()),
    )


def _by_version(known: Mapping[Version, Recent]) -> tuple[Measured, ...]:
    return tuple(Measured(_digits(recent), *key) for key, recent in _last(known))


def _by_tier(known: Mapping[tuple[Version | None, str], Recent]) -> tuple[Measured, ...]:
    return tuple(Measured(_digits(recent), *(key or ("", 0)), kind=tier) for (key, tier), recent in _last(known))


def _last(known: Mapping[K, V]) -> Iterable[tuple[K, V]]:
    """The newest come last in a mapping of ``Learned``."""
    return islice(known.items(), max(0, len(known) - MOST), None)


def _digits(recent: Recent) -> tuple[float, ...]:
    """To the microsecond, which is more than any of it is known to."""
    return tuple(round(seconds, 6) for seconds in recent.seconds)


def _version(measured: Measured) -> Version | None:
    return (measured.function, measured.version) if measured.function else None


def _least(known: float, recents: Iterable[Recent]) -> float:
    return min((known, *(min(recent.seconds) for recent in recents)))

"""What starts so far have taught: medians of the last ones, beside what the nodes measure themselves. Immutable."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from sllm_runtime.control.scheduling.line import NO_MOVES, Line
from sllm_runtime.protocol.limits import MOST_PROOFS
from sllm_runtime.protocol.timeline import IMPORT, PROVE, SANDBOX, SETUP, Span

K = TypeVar("K")
V = TypeVar("V")
Version: TypeAlias = tuple[str, int]
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

RECENT: Final = 9
"""Measurements of which the median is taken: one start that a machine held up moves no expectation, four in a row do
not either, five do."""
OWN: Final = 3
"""Measurements of a node that tell more of it than those of all nodes do."""
EVERY_NODE: Final = ""
WARM_SANDBOX_S: Final = 0.02
COLD_SANDBOX_S: Final = 3.0
"""A sandbox taken from the pool, and one whose pool is empty, until a node has shown one."""
INIT_S: Final = 0.1
"""Import and ``setup`` of a function that never ran."""
RELEASE_S: Final = 0.2
"""Until an instance that is ended has given back what it held, until one has."""
ALIKE: Final = 1.5
"""Disks of which one is at most so many times as fast as the other count as of one kind."""
OVER: Final = 0.2
"""Share by which the weights may have been expected too late: a path gives a large load more than the small ones that
its bandwidth was measured by."""
_GB: Final = 1e9
_SHORTEST_S: Final = 1e-5
"""That any disk takes for as much."""
_LONGEST_S: Final = 1e7
"""That anything takes."""
_MOST: Final = 10_000
"""Medians that are kept of a kind; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The last measurements, in seconds, and their median; of two in the middle the lesser: the first start of anything
    finds no cache warm, so of two starts the second one tells more of the third."""

    seconds: tuple[float, ...]
    middle: float

    @classmethod
    def of(cls, seconds: tuple[float, ...]) -> Recent:
        """Of these, of which there is one at least; the newest is the last one."""
        return cls(seconds, median_low(seconds))

    def after(self, seconds: float) -> Recent:
        """With one more."""
        return Recent.of((*self.seconds, seconds)[-RECENT:])


@dataclass(frozen=True, slots=True)
class Learned:
    """Seconds, by what they depend on."""

    sandbox: Mapping[tuple[str, bool], Recent] = field(default_factory=lambda: _NOTHING)
    """By node and whether one was waiting in its pool; EVERY_NODE: of any node."""
    disk: Mapping[str, Recent] = field(default_factory=lambda: _NOTHING)
    """By node: what its disk takes for a gigabyte (10^9 bytes), by its loader's word when it had served a start;
    EVERY_NODE: of any node."""
    imports: Mapping[Version, Recent] = field(default_factory=lambda: _NOTHING)
    setup: Mapping[Version, Recent] = field(default_factory=lambda: _NOTHING)
    rest: Mapping[tuple[Version | None, str], Recent] = field(default_factory=lambda: _NOTHING)
    """By version and where its weights were: what starts took beyond all that is told apart; None: of any version."""
    lead: Mapping[tuple[Version | None, str], Recent] = field(default_factory=lambda: _NOTHING)
    """By the same: when the weights were there, less what they were expected to be read in."""
    release: Mapping[Version | None, Recent] = field(default_factory=lambda: _NOTHING)
    """By version: from when an instance had only to end until its node had all that it held; None: of any version."""
    calls: Mapping[Version, Recent] = field(default_factory=lambda: _NOTHING)
    """By version: how long its calls take, in the mean of those between two reports."""
    moves: Mapping[str, Line] = field(default_factory=lambda: _NOTHING)
    """By model: how long calls take to go on elsewhere, by their tokens."""
    starts: Mapping[Version, int] = field(default_factory=lambda: _NOTHING)
    """How often each version became ready, in this life of the controller."""
    proofs: Mapping[Version, tuple[str, ...]] = field(default_factory=lambda: _NOTHING)
    """By version: what the self-tests of its engine found, one for each kind of machine. No seconds, but it saves some:
    a start that has one for its machine tests next to nothing."""
    least: float = WARM_SANDBOX_S
    """No sandbox is expected to take less."""
    least_release: float = RELEASE_S
    """Nor any release."""

    def sandbox_s(self, node: str, warm: bool, made: float = 0.0) -> float:
        """Of a node on which less than OWN were ever taken from the pool, or none was made for a start: as on others.
        Where no start was ever expected to find the pool of ``node`` empty: the seconds in which it made the last one
        for that, if it says so (``made``), and no less than one that waits takes."""
        known = self.sandbox.get((node, warm))
        if known is None and made and not warm:
            return max(made, self.sandbox_s(node, True))  # which has in it what else is done meanwhile
        if known is None or (warm and len(known.seconds) < OWN):
            known = self.sandbox.get((EVERY_NODE, warm))
        return known.middle if known is not None else WARM_SANDBOX_S if warm else COLD_SANDBOX_S

    def disk_bandwidth(self, node: str, measured: float) -> float:
        """Bytes per second of the disk of ``node``, of which its loader has ``measured`` so many (0: none yet). Until
        it has served a start these are a few reads (a probe), which tell what kind of disk it is. What others of that
        kind gave to starts is as near to what it will give: the geometric mean of both is nearer."""
        every = self.disk.get(EVERY_NODE)
        if not measured or every is None or node in self.disk:
            return measured
        others = _GB / every.middle
        return math.sqrt(measured * others) if 1 / ALIKE <= measured / others <= ALIKE else measured

    def import_s(self, key: Version) -> float:
        known = self.imports.get(key)
        return known.middle if known is not None else INIT_S

    def setup_s(self, key: Version) -> float:
        known = self.setup.get(key)
        return known.middle if known is not None else 0.0

    def rest_s(self, key: Version, tier: str, weights: float = 0.0) -> float:
        """Of a version that never started from there: as others do. ``weights``: seconds after which these are expected
        to be there, of which it takes back ``OVER`` at most: an instance may be ready before they are."""
        known = self.rest.get((key, tier)) or self.rest.get((None, tier))
        return max(known.middle, -OVER * weights) if known is not None else 0.0

    def lead_s(self, key: Version, tier: str) -> float:
        """Of a version that never started from there: as others do."""
        known = self.lead.get((key, tier)) or self.lead.get((None, tier))
        return known.middle if known is not None else 0.0

    def release_s(self, key: Version) -> float:
        """Of a version of which no instance ever ended: as others do."""
        known = self.release.get(key) or self.release.get(None)
        return known.middle if known is not None else RELEASE_S

    def call_s(self, key: Version) -> float | None:
        """Of a version of which no call has ended: nobody knows."""
        known = self.calls.get(key)
        return known.middle if known is not None else None

    def called(self, key: Version, seconds: float) -> Learned:
        """With more calls of version ``key``, which took so long in the mean."""
        return replace(self, calls=_with(self.calls, key, seconds))

    def started(self, key: Version) -> Learned:
        """With one more start of version ``key``, whatever it took."""
        return replace(self, starts=_newest(self.starts, key, self.starts.get(key, 0) + 1))

    def proved(self, key: Version, proof: str) -> Learned:
        """With what an instance of version ``key`` found out about its numerics."""
        known = self.proofs.get(key, ())
        if proof in known:
            return self
        return replace(self, proofs=_newest(self.proofs, key, (*known, proof)[-MOST_PROOFS:]))

    def missed(self, key: Version, tier: str, seconds: float, own: float = 0.0) -> Learned:
        """With one more start that took ``seconds`` more than its parts did. ``own``: what of it says
        nothing of other versions, since it was spent on making this one's model on its node."""
        return replace(self, rest=_apart(self.rest, key, tier, seconds, own))

    def led(self, key: Version, tier: str, there: float, read: float, own: float = 0.0) -> Learned:
        """With one more start whose weights were there after ``there`` seconds, of which they were expected to be read
        in ``read``. ``own`` as in ``missed``."""
        return replace(self, lead=_apart(self.lead, key, tier, max(there - read, -OVER * read), own))

    def served(self, node: str, bandwidth: float) -> Learned:
        """With one more start whose weights came from the disk of ``node``, of so many bytes per second by then."""
        if not _GB / _LONGEST_S < bandwidth < _GB / _SHORTEST_S:
            return self
        seconds = _GB / bandwidth
        return replace(self, disk=_with(_with(self.disk, EVERY_NODE, seconds), node, seconds))

    def released(self, key: Version, seconds: float) -> Learned:
        """With one more instance of version ``key`` that has given back what it held."""
        known = _with(_with(self.release, key, seconds), None, seconds)
        return replace(self, release=known, least_release=min(self.least_release, seconds))

    def after(self, key: Version, node: str, warm: bool, spans: tuple[Span, ...]) -> Learned:
        """With one more start of version ``key`` on ``node``. What its engine had to prove the next ones are told."""
        seconds = {span.name: span.ms / 1000.0 for span in spans}
        setup = max(0.0, seconds[SETUP] - seconds.get(PROVE, 0.0)) if SETUP in seconds else None
        return replace(
            self,
            least=min(self.least, seconds.get(SANDBOX, self.least)),
            sandbox=_with(
                _with(self.sandbox, (EVERY_NODE, warm), seconds.get(SANDBOX)), (node, warm), seconds.get(SANDBOX)
            ),
            imports=_with(self.imports, key, seconds.get(IMPORT)),
            setup=_with(self.setup, key, setup),
        )

    def without(self, versions: frozenset[Version]) -> Learned:
        """Less what is of these versions alone: they are no more, and others may have their names next."""
        if not versions & self.versions():
            return self
        return replace(
            self,
            imports=_less(self.imports, versions),
            setup=_less(self.setup, versions),
            rest={(key, tier): each for (key, tier), each in self.rest.items() if key not in versions},
            lead={(key, tier): each for (key, tier), each in self.lead.items() if key not in versions},
            release=_less(self.release, versions),
            calls=_less(self.calls, versions),
            starts=_less(self.starts, versions),
            proofs=_less(self.proofs, versions),
        )

    def forgotten(self, node: str) -> Learned:
        """Less what is of this node alone: it has gone for good, and another machine may have its name next."""
        return replace(
            self,
            sandbox={(name, warm): each for (name, warm), each in self.sandbox.items() if name != node},
            disk=_less(self.disk, {node}),
        )

    def versions(self) -> frozenset[Version]:
        """Those of which something was learned."""
        of_tiers = (key for key, _ in (*self.rest, *self.lead))
        known = {*self.imports, *self.setup, *of_tiers, *self.release, *self.calls, *self.starts, *self.proofs}
        return frozenset(key for key in known if key is not None)

    def resume_s(self, model: str, tokens: float) -> float:
        """Until a call of ``model`` that has so many ``tokens``, in and out, goes on elsewhere: a (t_in + t_out) + b
        (ServerlessLLM, section 6.2)."""
        return self.moves.get(model, NO_MOVES).seconds(tokens)

    def resumed(self, model: str, tokens: float, took_s: float) -> Learned:
        """With one more call of ``model`` that had so many ``tokens`` and took ``took_s`` to go on elsewhere."""
        line = self.moves.get(model, NO_MOVES).after(tokens, took_s)
        return replace(self, moves=_newest(self.moves, model, line))


def _apart(
    known: Mapping[tuple[Version | None, str], Recent], key: Version, tier: str, seconds: float, own: float
) -> Mapping[tuple[Version | None, str], Recent]:
    others = seconds - min(own, max(seconds, 0.0))
    return _with(_with(known, (key, tier), seconds), (None, tier), others)


def _less(known: Mapping[K, V], gone: Collection[Any]) -> Mapping[K, V]:
    return {key: each for key, each in known.items() if key not in gone}


def _with(known: Mapping[K, Recent], key: K, seconds: float | None) -> Mapping[K, Recent]:
    if seconds is None or not abs(seconds) < _LONGEST_S:  # NaN is not, and no number of a record either
        return known
    return _newest(known, key, known.get(key, Recent((), 0.0)).after(seconds))


def _newest(known: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """With ``key`` as the newest; of more than _MOST the oldest goes."""
    kept = dict(known)
    kept.pop(key, None)
    while len(kept) >= _MOST:
        del kept[next(iter(kept))]
    kept[key] = value
    return kept

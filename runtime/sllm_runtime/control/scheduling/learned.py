"""What starts so far have taught: moving means beside what the nodes measure themselves. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from sllm_runtime.control.scheduling.line import NO_MOVES, Line
from sllm_runtime.protocol.timeline import IMPORT, SANDBOX, SETUP, Span

K = TypeVar("K")
Version: TypeAlias = tuple[str, int]
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

NEWEST: Final = 0.3
"""Weight of the newest measurement in a moving mean."""
WARM_SANDBOX_S: Final = 0.02
COLD_SANDBOX_S: Final = 3.0
"""A sandbox taken from the pool, and one whose pool is empty, until a node has shown its own."""
INIT_S: Final = 0.1
"""Import and ``setup`` of a function that never ran."""
TOKEN_S: Final = 0.03
"""Between two tokens of a call, where only its age is known: rather too short, so that a move is thought too dear."""
_MOST: Final = 10_000
"""Means that are kept of a kind; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Seconds, by what they depend on."""

    sandbox: Mapping[tuple[str, bool], float] = field(default_factory=lambda: _NOTHING)
    """By node and whether one was waiting in its pool."""
    imports: Mapping[Version, float] = field(default_factory=lambda: _NOTHING)
    setup: Mapping[Version, float] = field(default_factory=lambda: _NOTHING)
    rest: Mapping[tuple[Version | None, str], float] = field(default_factory=lambda: _NOTHING)
    """By version and where its weights were: what starts took beyond all that is told apart; None: of any version."""
    moves: Mapping[str, Line] = field(default_factory=lambda: _NOTHING)
    """By model: how long calls take to go on elsewhere, by their tokens."""
    starts: Mapping[Version, int] = field(default_factory=lambda: _NOTHING)
    """How often each version became ready, in this life of the controller."""
    least: float = WARM_SANDBOX_S
    """No sandbox is expected to take less."""

    def sandbox_s(self, node: str, warm: bool) -> float:
        return self.sandbox.get((node, warm), WARM_SANDBOX_S if warm else COLD_SANDBOX_S)

    def import_s(self, key: Version) -> float:
        return self.imports.get(key, INIT_S)

    def setup_s(self, key: Version) -> float:
        return self.setup.get(key, 0.0)

    def rest_s(self, key: Version, tier: str) -> float:
        """Of a version that never started from there: as others do."""
        return max(self.rest.get((key, tier), self.rest.get((None, tier), 0.0)), 0.0)

    def started(self, key: Version) -> Learned:
        """With one more start of version ``key``, whatever it took."""
        kept = {name: count for name, count in self.starts.items() if name != key}
        while len(kept) >= _MOST:
            del kept[next(iter(kept))]
        return replace(self, starts={**kept, key: self.starts.get(key, 0) + 1})

    def missed(self, key: Version, tier: str, seconds: float, own: float = 0.0) -> Learned:
        """With one more start that took ``seconds`` more than its parts were expected to. ``own``: what of it says
        nothing of other versions, since it was spent on making this one's model on its node."""
        others = seconds - min(own, max(seconds, 0.0))
        return replace(self, rest=_mean(_mean(self.rest, (key, tier), seconds), (None, tier), others))

    def after(self, key: Version, node: str, warm: bool, spans: tuple[Span, ...]) -> Learned:
        """With one more start of version ``key`` on ``node``."""
        seconds = {span.name: span.ms / 1000.0 for span in spans}
        return replace(
            self,
            least=min(self.least, seconds.get(SANDBOX, self.least)),
            sandbox=_mean(self.sandbox, (node, warm), seconds.get(SANDBOX)),
            imports=_mean(self.imports, key, seconds.get(IMPORT)),
            setup=_mean(self.setup, key, seconds.get(SETUP)),
        )

    def resume_s(self, model: str, running_s: float) -> float:
        """Until a call of ``model`` that has run for ``running_s`` goes on elsewhere: a (t_in + t_out) + b
        (ServerlessLLM, section 6.2), with the tokens taken from how long it has run."""
        return self.moves.get(model, NO_MOVES).seconds(running_s / TOKEN_S)

    def resumed(self, model: str, running_s: float, took_s: float) -> Learned:
        """With one more call of ``model`` that had run for ``running_s`` and took ``took_s`` to go on elsewhere."""
        line = self.moves.get(model, NO_MOVES).after(running_s / TOKEN_S, took_s)
        kept = {name: known for name, known in self.moves.items() if name != model}
        while len(kept) >= _MOST:
            del kept[next(iter(kept))]
        return replace(self, moves={**kept, model: line})


def _mean(means: Mapping[K, float], key: K, seconds: float | None) -> Mapping[K, float]:
    if seconds is None:
        return means
    before = means.get(key, seconds)
    kept = {name: mean for name, mean in means.items() if name != key}
    while len(kept) >= _MOST:
        del kept[next(iter(kept))]
    return {**kept, key: before + NEWEST * (seconds - before)}

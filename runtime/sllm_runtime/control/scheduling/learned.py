"""What starts so far have taught: moving means beside what the nodes measure themselves. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

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
_MOST: Final = 10_000
"""Means that are kept of a kind; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Seconds, by what they depend on."""

    sandbox: Mapping[tuple[str, bool], float] = field(default_factory=lambda: _NOTHING)
    """By node and whether one was waiting in its pool."""
    imports: Mapping[Version, float] = field(default_factory=lambda: _NOTHING)
    setup: Mapping[Version, float] = field(default_factory=lambda: _NOTHING)

    def sandbox_s(self, node: str, warm: bool) -> float:
        return self.sandbox.get((node, warm), WARM_SANDBOX_S if warm else COLD_SANDBOX_S)

    def import_s(self, key: Version) -> float:
        return self.imports.get(key, INIT_S)

    def setup_s(self, key: Version) -> float:
        return self.setup.get(key, 0.0)

    def after(self, key: Version, node: str, warm: bool, spans: tuple[Span, ...]) -> Learned:
        """With one more start of version ``key`` on ``node``."""
        seconds = {span.name: span.ms / 1000.0 for span in spans}
        return replace(
            self,
            sandbox=_mean(self.sandbox, (node, warm), seconds.get(SANDBOX)),
            imports=_mean(self.imports, key, seconds.get(IMPORT)),
            setup=_mean(self.setup, key, seconds.get(SETUP)),
        )


def _mean(means: Mapping[K, float], key: K, seconds: float | None) -> Mapping[K, float]:
    if seconds is None:
        return means
    before = means.get(key, seconds)
    kept = {name: mean for name, mean in means.items() if name != key}
    while len(kept) >= _MOST:
        del kept[next(iter(kept))]
    return {**kept, key: before + NEWEST * (seconds - before)}

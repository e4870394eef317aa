"""How often models are started: what their replicas are counted by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sllm_runtime.control.view import Key, View

HALF_LIFE_S: Final = 3600.0
FORGOTTEN: Final = 0.01
"""Less than this is nothing: of one start, after six and a half hours."""
WORKED_S: Final = 60.0
"""An instance that has worked for so long counts as a start."""
MOST: Final = 2000
"""Models that are remembered, the most popular ones: as many as one record takes."""


def after(before: Mapping[str, float], starts: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Popularity by model, ``elapsed_s`` and ``starts`` later."""
    left = 0.5 ** (elapsed_s / HALF_LIFE_S)
    sums = {
        digest: before.get(digest, 0.0) * left + starts.get(digest, 0.0) for digest in before.keys() | starts.keys()
    }
    first = sorted((digest for digest in sums if sums[digest] >= FORGOTTEN), key=lambda each: (-sums[each], each))
    return {digest: sums[digest] for digest in first[:MOST]}


def starts(view: View, before: Mapping[Key, int], now: float, elapsed_s: float) -> dict[str, float]:
    """By model, the starts since ``before`` (``Learned.starts``), and one a minute for each instance that worked in the
    ``elapsed_s`` up to now: a model that is always there is no less popular for it."""
    found: dict[str, float] = {}
    for key, count in view.learned.starts.items():
        _add(view, found, key, count - before.get(key, 0))
    for instance in view.instances.values():
        if instance.ready and instance.idle_s(now) < elapsed_s:
            _add(view, found, instance.key, min(elapsed_s / WORKED_S, 1.0))
    return found


def _add(view: View, found: dict[str, float], key: Key, count: float) -> None:
    version = view.versions.get(key)
    if count > 0 and version is not None and version.model:
        found[version.model] = found.get(version.model, 0.0) + count

"""What a start costs others that lack a place. Pure.

While an instance starts nobody is served in its place. Where more versions lack an instance than their servers have
places, each second of a start there is one more that those wait who have their weights there: in the mean, one of its
instances ends in as much less time as there are more of them. So a start from afar is worth less than its own seconds
say while others could be served from near.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final, NamedTuple

from sllm_runtime.control.fits import Need, short, total
from sllm_runtime.control.placement import may_start
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.traced import changed
from sllm_runtime.control.view import EMPTY, Key, View

MOST: Final = 256
"""Versions that lack instances and are looked at: where so many do, all servers are crowded."""
_ROUNDED: Final = 1e-9
"""Shares are added and taken away again: what is left of them by rounding is nobody."""


class _Share(NamedTuple):
    """What a version lacks, shared equally by the servers that could start it from near."""

    each: float
    servers: Set[str]


_NONE: Final = _Share(0.0, frozenset())


class Others(NamedTuple):
    """What versions other than ``but`` lack."""

    shares: Mapping[Key, _Share]
    there: Mapping[str, float]
    but: Key

    def __bool__(self) -> bool:
        return len(self.shares) > (self.but in self.shares)

    def at(self, server: str) -> float:
        """Instances that they lack and that ``server`` is to give a place. In the mean: each could as well start on any
        other one that has its weights."""
        own = self.shares.get(self.but, _NONE)
        found = self.there.get(server, 0.0) - (own.each if server in own.servers else 0.0)
        return found if found > _ROUNDED else 0.0


NOBODY: Final = Others(EMPTY, EMPTY, ("", 0))


class Crowd:
    """What all versions lack, by server. Kept while a plan goes on, in which little more changes than that: each start
    that is placed is one less. Not for use by two threads."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._made_of: tuple[object, ...] = ()
        self._lacking: Mapping[Key, int] = EMPTY
        self._shares: dict[Key, _Share] = {}
        self._there: dict[str, float] = {}

    def others(self, key: Key, view: View, now: float) -> Others:
        """What versions other than ``key`` lack."""
        if not view.lacking:
            return NOBODY
        made_of = (now, view.nodes, view.models, view.versions, view.refused, view.kept)
        if len(made_of) != len(self._made_of) or any(a is not b for a, b in zip(made_of, self._made_of, strict=True)):
            self._made_of, self._lacking, self._shares, self._there = made_of, EMPTY, {}, {}
        if view.lacking is not self._lacking:
            self._servers.of(view)
            for each in changed(self._lacking, view.lacking):
                self._put(each, view, now)
            self._lacking = view.lacking
        return Others(self._shares, self._there, key)

    def _put(self, key: Key, view: View, now: float) -> None:
        count, before = view.lacking.get(key, 0), self._shares.pop(key, None)
        if before is not None:
            self._add(before, -before.each)
        if not count or len(self._shares) >= MOST:
            return
        names = before.servers if before is not None else self._near(key, view, now)
        if names:
            share = self._shares[key] = _Share(count / len(names), names)
            self._add(share, share.each)

    def _add(self, share: _Share, each: float) -> None:
        for name in share.servers:
            self._there[name] = self._there.get(name, 0.0) + each

    def _near(self, key: Key, view: View, now: float) -> Set[str]:
        """The servers that have its weights and may start it, were they empty."""
        version, model = view.versions.get(key), view.model_of(key)
        if version is None or model is None:
            return frozenset()
        need, may = self._servers.need(view, key, version.manifest), may_start(view, key, now)
        near = (*self._servers.in_dram(model.digest), *self._servers.on_ssd(model.digest))
        return {each.name for each in near if may(each.node) and not short(need, total(each.status))}


def goes_without(server: Server, need: Need, others: Others) -> float:
    """How many go without a place on ``server`` where a start with such a ``need`` takes one: less than one whole is
    none, it finds its place elsewhere."""
    there = others.at(server.name)
    if not there:
        return 0.0
    found = there + 1 - server.places(need) - server.turnover(bool(need.gpus)).now
    return found if found > 1 - _ROUNDED else 0.0


def delay_s(server: Server, need: Need, others: Others, seconds: float) -> float:
    """Seconds that a start which takes so many on ``server`` costs ``others`` there."""
    found = goes_without(server, need, others)
    return seconds * found / max(server.turnover(bool(need.gpus)).in_time, 1) if found else 0.0

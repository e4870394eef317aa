"""How many places one plan looks for, and whose turn it is. Pure.

A decision takes up to some milliseconds, and while a plan is made nobody is answered, no report is heard and the lease
is not renewed: where hundreds of versions lack an instance at once (all are called again after a power cut), a plan for
all of them would outlast ``lease.SURE_S``. So a plan looks for so many places: for those that come first, and for the
others in turn. Who has not had its turn keeps what was found for it before: why it waits, whose places it waits for,
which node is to come.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Final, Generic, TypeVar

from sllm_runtime.control.view import EMPTY, Claim, View

W = TypeVar("W", bound=Hashable)

MOST: Final = 64
"""Places that one plan looks for: 0.1 s where moves are searched for on 100 nodes, on a slow machine 0.2."""
FIRST: Final = 32
"""Of these for whoever comes first, in each plan; the rest in turn."""


class Turns(Generic[W]):
    """How many places one plan looks for, shared among those that need one: versions by their keys, or migrations by
    their sources."""

    def __init__(self, before: View, taken: frozenset[W], *, most: int = MOST, first: int = FIRST) -> None:
        """``before``: what the plan before has made. ``taken``: who has had its turn since all had."""
        self.before = before
        self._taken = taken
        self._most, self._first = most, first
        self._made = 0
        self._looked: set[W] = set()
        self._passed: list[W] = []
        self._claimed: dict[object, dict[str, Claim]] | None = None
        self.more = False
        """Whether the next plan is to follow at once: somebody has yet to have its turn."""

    def places(self, who: W) -> int:
        """How many may be looked for now for ``who``; 0: it is not its turn, so it is ``passed``."""
        left = (self._first if who in self._taken else self._most) - self._made
        if left > 0:
            # Who is the last of the first has as many as who comes behind, and nobody has all.
            return min(left, max(self._first, self._most - self._first))
        self.more = self.more or who not in self._taken
        self._passed.append(who)
        return 0

    def looked(self, who: W, places: int = 1) -> None:
        """So many were looked for."""
        self._made += places
        self._looked.add(who)

    def passed(self, view: View) -> tuple[list[W], View]:
        """Who was passed since this was last asked, and ``view`` with what they have claimed of what is there: nothing
        that was claimed since by those who come before them."""
        who, self._passed = self._passed, []
        if not who:
            return who, view
        if self._claimed is None:
            self._claimed = {}
            for name, claim in self.before.claims.items():
                self._claimed.setdefault(claim.by, {})[name] = claim
        theirs = {name: claim for each in who for name, claim in self._claimed.get(each, EMPTY).items()}
        there = {name: claim for name, claim in theirs.items() if name in view.instances}
        return who, replace(view, claims={**there, **view.claims}) if there else view

    @property
    def taken(self) -> frozenset[W]:
        """For the next plan; nobody, where all have had their turn."""
        return self._taken | self._looked if self.more else frozenset()

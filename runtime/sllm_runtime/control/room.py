"""What was decided to make room for a start is begun, and nobody else counts on it. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Final

from sllm_runtime.control import instances
from sllm_runtime.control.placement import Decision, Evict, Migrate, Wait
from sllm_runtime.control.view import Claim, Key, View

MOVED: Final = Claim(inf)
"""On what is moved: until its place is given back."""


def begun(view: View, key: Key, decision: Decision, claim: Claim) -> View:
    """``view`` where ``decision`` is being carried out for version ``key``, which claims with ``claim``."""
    if isinstance(decision, Evict):
        for name in decision.instances:
            leaving = view.instances[name]
            # A call may be on its way to one that is idle: it still ends when that call does.
            grace = 0.0 if decision.at_once else leaving.manifest.timeout
            view = instances.stop(view, leaving, f"makes room for {key[0]}", grace, resume=leaving.carries)
    if isinstance(decision, Evict | Wait) and decision.claims:
        view = replace(view, claims={**view.claims, **dict.fromkeys(decision.claims, claim)})
    if isinstance(decision, Migrate):
        moves = {move.instance: move for move in decision.moves}
        claims = dict.fromkeys(moves, MOVED)
        view = replace(view, moves={**view.moves, **moves}, claims={**view.claims, **claims})
    return view

"""What moves that a policy has decided teach: how long calls of a model take to go on elsewhere. Pure."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.view import Migration, Move, View
from sllm_runtime.protocol.states import MigrationState


def taught(view: View, now: float) -> View:
    """``view`` with what the moves that are over since the last step took."""
    for move in view.moves.values():
        known = view.migrations.get(move.instance)
        if known is not None and known.state is MigrationState.DONE and known.ended == now:
            view = _taught(view, move, known, now)
    return view


def _taught(view: View, move: Move, known: Migration, now: float) -> View:
    """From when the destination was ready to when the source had no call left."""
    source, destination = view.instances.get(known.source), view.instances.get(known.destination)
    if source is None or destination is None or destination.ready_at is None:
        return view
    model = view.model_of(source.key)
    if model is None:
        return view
    took = now - max(known.began, destination.ready_at)
    return replace(view, learned=view.learned.resumed(model.digest, move.running_s, took))

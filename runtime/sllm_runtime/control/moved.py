"""What moves teach: how long calls of a model take to go on elsewhere, by their tokens. Pure."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.view import Migration, View
from sllm_runtime.protocol.states import MigrationState


def taught(view: View, now: float) -> View:
    """``view`` with what the moves that are over since the last step took."""
    for move in view.migrations.values():
        if move.state is MigrationState.DONE and move.ended == now:
            view = _taught(view, move, now)
    return view


def _taught(view: View, move: Migration, now: float) -> View:
    """From when the destination was there to when the source had no call left; what it frees then is its release.
    Nothing is learned where none ran that could move, or where one ended there meanwhile: it may have been the last
    one, and how long it took says nothing of moves."""
    source = view.instances.get(move.source)
    if not move.tokens or move.since is None or source is None:
        return view
    model = view.model_of(source.key)
    if model is None:
        return view
    seen = source.seen
    if seen is None or seen.served != move.served:
        return view
    release = seen.release_s
    took = max(0.0, now - move.since - (release or 0.0))
    return replace(view, learned=view.learned.resumed(model.digest, move.tokens, took))

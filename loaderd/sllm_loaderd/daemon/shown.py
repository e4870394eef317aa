"""What a status says where a message has no room for all that is on the node. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.limits import MAX_MESSAGE
from sllm_runtime.protocol.loader import LISTS, Status, fitting


def shown(status: Status, recent: Iterable[str]) -> Status:
    """``status`` of so many models as a message can tell of: those in memory, the ones used last first, then those
    ``recent``, then the others by digest. A model is told of wholly or not at all."""
    if len(pack(status)) <= MAX_MESSAGE:
        return status
    copies = status.ssd.copies if status.ssd is not None else ()
    empty = _of(status, set())
    memory = [part.model for part in reversed(status.resident)]
    models = dict.fromkeys((*memory, *recent, *status.models, *(copy[0] for copy in copies)))
    parts = [
        *((model, model) for models in (status.models, status.remote) for model in models),
        *((part.model, part) for part in status.resident),
        *((copy[0], copy) for copy in copies),
    ]
    there = fitting(models, parts, MAX_MESSAGE - len(pack(empty)) - LISTS)
    return replace(_of(status, there), untold=len({model for model, _ in parts} - there))


def _of(status: Status, models: set[str]) -> Status:
    """``status`` of ``models`` alone."""
    ssd = status.ssd
    return replace(
        status,
        models=tuple(model for model in status.models if model in models),
        remote=tuple(model for model in status.remote if model in models),
        resident=tuple(part for part in status.resident if part.model in models),
        ssd=replace(ssd, copies=tuple(copy for copy in ssd.copies if copy[0] in models)) if ssd is not None else None,
    )

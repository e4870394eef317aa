"""Which tokens a request leaves open, and the choice among them, the same for every engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sllm_runtime.protocol.errors import InternalError, InvalidRequest, SllmError
from sllm_runtime.worker.engine.base import Mask, Request, TokenChoice
from sllm_runtime.worker.engine.sampling import Row, Seen, choose

log = logging.getLogger(__name__)


def next_token(row: Row, request: Request, output: Sequence[int], eos: frozenset[int], seen: Seen) -> TokenChoice:
    """The token after ``output``, with which ``seen`` is kept. Raises ``FunctionError`` for a row with NaN,
    ``InvalidRequest`` where the request's own rules leave nothing, what its constraints raise, and ``InternalError``
    for a bug: it is this request's, not the batch's."""
    try:
        open_ = allowed(request, output, eos, len(row))
        return choose(row, request.sampling, request.prompt, output, request.choice, open_, seen)
    except SllmError:
        raise
    except Exception as error:
        log.exception("choosing a token failed")
        raise InternalError(f"choosing this output's next token failed: {type(error).__name__}: {error}") from error


def allowed(request: Request, output: Sequence[int], eos: frozenset[int], vocabulary: int) -> Mask | None:
    """Ids that may come next, one at least; None: all of them. The ends are forbidden until ``min_tokens`` are out.
    Raises ``InvalidRequest`` naming the rule that leaves nothing of what the others left."""
    sampling = request.sampling
    if len(output) >= sampling.min_tokens and not request.constraints:
        return None
    open_: Mask = np.ones(vocabulary, np.bool_)
    if len(output) < sampling.min_tokens:
        open_[[*eos, *sampling.stop_ids]] = False
        _leaves_some(open_, "min_tokens")
    for constraint in request.constraints:
        open_ &= constraint.allowed(output)
        _leaves_some(open_, constraint.field)
    return open_


def _leaves_some(mask: Mask, field: str) -> None:
    if not mask.any():
        why = "with the other rules of this request it leaves no token to go on with"
        raise InvalidRequest(f"'{field}': {why}", field=field)

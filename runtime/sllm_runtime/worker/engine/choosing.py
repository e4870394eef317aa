"""Which tokens a request leaves open, and the choice among them, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sllm_runtime.worker.engine.base import Mask, Request, TokenChoice
from sllm_runtime.worker.engine.sampling import Row, choose


def next_token(row: Row, request: Request, output: Sequence[int], eos: frozenset[int]) -> TokenChoice:
    """The token after ``output``. Raises ``FunctionError`` for a row with NaN, ``InvalidRequest`` where the request's
    own rules leave nothing, and what its constraints raise."""
    return choose(
        row, request.sampling, request.prompt, output, request.choice, allowed(request, output, eos, len(row))
    )


def allowed(request: Request, output: Sequence[int], eos: frozenset[int], vocabulary: int) -> Mask | None:
    """Ids that may come next; None: all of them. The ends are forbidden until ``min_tokens`` are out."""
    sampling = request.sampling
    if len(output) >= sampling.min_tokens and not request.constraints:
        return None
    open_: Mask = np.ones(vocabulary, np.bool_)
    if len(output) < sampling.min_tokens:
        open_[[*eos, *sampling.stop_ids]] = False
    for constraint in request.constraints:
        open_ &= constraint.allowed(output)
    return open_

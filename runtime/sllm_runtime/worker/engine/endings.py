"""When an output ends, the same for every engine."""

from __future__ import annotations

from sllm_runtime.worker.engine.base import Request, Sampling


def full(request: Request, produced: int, max_context: int) -> bool:
    """Whether ``produced`` ids are as many as the request or the context allows."""
    return produced >= request.sampling.max_tokens or len(request.prompt) + produced >= max_context


def complete(request: Request, produced: int, max_context: int) -> bool:
    """Whether nothing is left to compute for ``request`` when it comes: it is full, its prompt not asked about, and no
    id to be told again."""
    asked = request.sampling.prompt_logprobs is not None or (request.retell and produced > 0)
    return not asked and full(request, produced, max_context)


def ends(token: int, sampling: Sampling, eos: frozenset[int]) -> bool:
    """Whether ``token`` ends the output, which then leaves it out."""
    return token in sampling.stop_ids or (token in eos and not sampling.ignore_eos)

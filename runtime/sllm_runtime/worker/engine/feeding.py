"""What ids that somebody else drew add to those that are here: the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from sllm_runtime.protocol.errors import NotDeterministic
from sllm_runtime.worker.engine.base import Request


def beyond(known: Sequence[int], first: int, ids: Sequence[int]) -> tuple[int, ...]:
    """Of ``ids``, which are those from ``first`` on, what follows ``known``; none where they leave a gap.

    Raises ``NotDeterministic`` where they overlap and differ.
    """
    if not 0 <= first <= len(known):
        return ()
    common = min(len(known) - first, len(ids))
    if any(known[first + at] != ids[at] for at in range(common)):
        raise NotDeterministic("the instance that this call comes from drew other ids; it cannot go on here")
    return tuple(ids[common:])


def new_ids(
    request: Request, output: Sequence[int], first: int, ids: Sequence[int], *, max_context: int, vocabulary: int
) -> tuple[int, ...]:
    """``beyond`` of a request's ``output``. Raises ``NotDeterministic`` also for what no output of ``request`` could
    be: too many, or no ids of this vocabulary. None where it asks for log probabilities that nobody would tell."""
    sampling = request.sampling
    if sampling.scored and not request.retell:
        return ()
    new = beyond(output, first, ids)
    count = len(output) + len(new)
    if count > sampling.max_tokens or len(request.prompt) + count > max_context:
        raise NotDeterministic(f"{count} ids of an output that has at most {sampling.max_tokens}")
    if not all(0 <= number < vocabulary for number in new):
        raise NotDeterministic(f"ids that are not below {vocabulary}, the vocabulary: another model drew them")
    return new

"""Log probabilities of tokens that are given and not drawn, a prompt's own and those of an output that goes on here:
their rows go through the head too, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Final

from sllm_runtime.worker.engine.base import TokenChoice
from sllm_runtime.worker.engine.ours.batch import decodes_first
from sllm_runtime.worker.engine.ours.runner import Head
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence
from sllm_runtime.worker.engine.sampling import reported

_BLOCK: Final = 32
"""Rows through the head at once: with a vocabulary of 150,000 that is 20 MB of logits."""


def score(chunks: Many[Chunk], head: Head) -> None:
    """Add to the ``scores`` of their sequences what the step of ``chunks`` has computed of prompts."""
    for chunk, first in _placed(chunks):
        sequence, known = chunk.sequence, len(chunk.sequence.scores)
        if sequence.scoring:
            end = min(chunk.start + chunk.count, len(sequence.request.prompt) - 1)
            count = sequence.request.sampling.prompt_logprobs
            sequence.scores += _choices(chunk, first, range(known, end), count, head)


def given(chunks: Many[Chunk], head: Head) -> list[tuple[Sequence, TokenChoice]]:
    """Of outputs that are told again, the ids that they were given and whose rows the step has computed, in order."""
    found: list[tuple[Sequence, TokenChoice]] = []
    for chunk, first in _placed(chunks):
        sequence = chunk.sequence
        if sequence.told < sequence.produced:
            begin, end = len(sequence.request.prompt) + sequence.told - 1, len(sequence.tokens) - 1
            positions = range(begin, min(chunk.start + chunk.count, end))
            choices = _choices(chunk, first, positions, sequence.request.sampling.logprobs, head)
            found += ((sequence, choice) for choice in choices)
    return found


def _placed(chunks: Many[Chunk]) -> Iterator[tuple[Chunk, int]]:
    """Each with the number of its first row in the step."""
    first = 0
    for chunk in decodes_first(chunks):
        yield chunk, first
        first += chunk.count


def _choices(chunk: Chunk, first: int, positions: range, count: int | None, head: Head) -> Iterator[TokenChoice]:
    """A row tells of the token after its own."""
    for at in range(0, len(positions), _BLOCK):
        block = positions[at : at + _BLOCK]
        rows = head([first + position - chunk.start for position in block]).numpy()
        for row, position in zip(rows, block, strict=True):
            yield reported(row, chunk.sequence.tokens[position + 1], count)

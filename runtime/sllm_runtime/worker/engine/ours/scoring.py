"""Log probabilities of a prompt's own tokens: its rows go through the head too, a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.batch import decodes_first
from sllm_runtime.worker.engine.ours.scheduler import Chunk
from sllm_runtime.worker.engine.sampling import reported

_BLOCK: Final = 32
"""Rows through the head at once: with a vocabulary of 150,000 that is 20 MB of logits."""

Head = Callable[[Many[int]], torch.Tensor]
"""Float32 logits (rows, vocabulary) of rows of the step that was launched last."""


def score(chunks: Many[Chunk], head: Head) -> None:
    """Add to the ``scores`` of their sequences what the step of ``chunks`` has computed. A row tells of the token
    after its own."""
    first = 0
    for chunk in decodes_first(chunks):
        sequence, end = chunk.sequence, min(chunk.start + chunk.count, len(chunk.sequence.request.prompt) - 1)
        while sequence.scoring and len(sequence.scores) < end:
            positions = range(len(sequence.scores), min(len(sequence.scores) + _BLOCK, end))
            rows = head([first + position - chunk.start for position in positions]).numpy()
            count = sequence.request.sampling.prompt_logprobs
            sequence.scores += (
                reported(row, sequence.tokens[position + 1], count)
                for row, position in zip(rows, positions, strict=True)
            )
        first += chunk.count

"""Next tokens for the rows of a step: plain greedy rows at once, all others one by one (``engine.choosing``)."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch

from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.worker.engine.base import Sampling, TokenChoice
from sllm_runtime.worker.engine.choosing import next_token
from sllm_runtime.worker.engine.ours.scheduler import Sequence
from sllm_runtime.worker.engine.sampling import Row

Matrix = npt.NDArray[np.float32]


def choose_rows(logits: torch.Tensor, sequences: Many[Sequence], eos: frozenset[int]) -> list[TokenChoice | SllmError]:
    """For each sequence its token, or what is wrong with its row. ``logits``: float32 (at least as many, vocabulary).

    The first of equal maxima wins in both ways.
    """
    rows: Matrix = logits[: len(sequences)].numpy()
    best = rows.argmax(-1)  # the first NaN, where there is one
    broken = np.isnan(rows[np.arange(len(rows)), best])
    return [
        TokenChoice(int(best[at]), 0.0) if _plain(sequence) and not broken[at] else _choose(rows[at], sequence, eos)
        for at, sequence in enumerate(sequences)
    ]


def _plain(sequence: Sequence) -> bool:
    sampling: Sampling = sequence.request.sampling
    return (
        sampling.greedy
        and sampling.logprobs is None
        and sampling.repetition_penalty == 1.0
        and not (sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias)
        and sampling.min_tokens <= sequence.produced
        and not sequence.request.constraints
    )


def _choose(row: Row, sequence: Sequence, eos: frozenset[int]) -> TokenChoice | SllmError:
    try:
        return next_token(row, sequence.request, sequence.output, eos)
    except SllmError as error:
        return error

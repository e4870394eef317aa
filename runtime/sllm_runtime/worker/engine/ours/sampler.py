"""Next tokens for the rows of a step: plain greedy rows at once, all others one by one (``engine.choosing``)."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.worker.engine.base import Sampling, TokenChoice
from sllm_runtime.worker.engine.choosing import next_token
from sllm_runtime.worker.engine.ours.scheduler import Sequence
from sllm_runtime.worker.engine.sampling import Row, not_a_number

Matrix = npt.NDArray[np.float32]
_BROKEN: Final = -1


@dataclass(frozen=True, slots=True)
class Likeliest:
    """What a runner gives in place of the logits of a step whose rows are all ``plain``: ``ids`` (at least as many as
    rows, int64, on the CPU) as ``likeliest`` finds them."""

    ids: torch.Tensor


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The id of the first of each row's equal maxima, and -1 for a row that holds NaN: int64 (rows), where ``logits``
    (rows, vocabulary) are. Nothing waits for that device."""
    most, ids = logits.max(-1)  # NaN is more than any number
    return torch.where(most.isnan(), _BROKEN, ids)


def choose_rows(
    found: torch.Tensor | Likeliest, sequences: Many[Sequence], eos: frozenset[int]
) -> list[TokenChoice | SllmError]:
    """For each sequence its token, or what is wrong with its row. ``found``: float32 logits (at least as many,
    vocabulary), or what is likeliest by them.

    The first of equal maxima wins in all ways.
    """
    if isinstance(found, Likeliest):
        ids = found.ids[: len(sequences)].tolist()
        return [not_a_number() if number == _BROKEN else TokenChoice(number, 0.0) for number in ids]
    rows: Matrix = found[: len(sequences)].numpy()
    best = rows.argmax(-1)  # the first NaN, where there is one
    broken = np.isnan(rows[np.arange(len(rows)), best])
    return [
        TokenChoice(int(best[at]), 0.0) if plain(sequence) and not broken[at] else _choose(rows[at], sequence, eos)
        for at, sequence in enumerate(sequences)
    ]


def plain(sequence: Sequence) -> bool:
    """Whether its next token is the likeliest, and nothing else is asked about it."""
    sampling: Sampling = sequence.request.sampling
    return (
        sampling.greedy
        and sampling.logprobs is None
        and not (sampling.penalised or sampling.logit_bias)
        and sampling.min_tokens <= sequence.produced
        and not sequence.request.constraints
    )


def _choose(row: Row, sequence: Sequence, eos: frozenset[int]) -> TokenChoice | SllmError:
    try:
        return next_token(row, sequence.request, sequence.output, eos, sequence.seen)
    except SllmError as error:
        return error

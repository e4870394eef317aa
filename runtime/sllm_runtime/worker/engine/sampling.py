"""Choosing a token from one row of logits: a pure function of the row, the tokens so far, the seed and the position.

The noise is Gumbel-max from a counter-based generator (Philox keyed by seed and choice, its counter the position), so
the state of a call is its tokens and nothing else, and a resume draws what the first run would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sllm_runtime.protocol.errors import FunctionError, InvalidRequest
from sllm_runtime.worker.engine.base import Mask, Sampling, TokenChoice

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_MASK = 2**64 - 1
_NAN = "the model's logits are NaN; its weights or its inputs are broken"


class Seen:
    """Which ids a prompt and its output hold, and how often the output does: a function of these ids alone. Kept with
    an output, so that a token of it costs no more than what is new; other ids make it begin again."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._read: list[int] = []
        self._counts: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        """(vocabulary): in the output."""
        self._known: Mask = np.zeros(0, np.bool_)
        """(vocabulary): whether it is among ``ids``."""
        self.ids: Ids = np.zeros(0, np.int64)
        """Of both, each once."""
        self.drawn: Ids = np.zeros(0, np.int64)
        """Of the output, each once."""

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """How often the output holds each of ``drawn``."""
        return self._counts[self.drawn]

    def read(self, output: Sequence[int], vocabulary: int) -> None:
        """All of ``output``."""
        if len(self._known) != vocabulary or list(output[: len(self._read)]) != self._read:
            self._begin(vocabulary)
        new = output[len(self._read) :]
        ids = _distinct(new)
        self.drawn = _added(self.drawn, ids[self._counts[ids] == 0])
        self._meet(ids)
        np.add.at(self._counts, np.asarray(new, np.int64), 1)
        self._read += new

    def _begin(self, vocabulary: int) -> None:
        self._read, self._counts, self._known = [], np.zeros(vocabulary, np.int32), np.zeros(vocabulary, np.bool_)
        self.ids = self.drawn = np.zeros(0, np.int64)
        self._meet(_distinct(self._prompt))

    def _meet(self, ids: Ids) -> None:
        self.ids = _added(self.ids, ids[~self._known[ids]])
        self._known[ids] = True


def _distinct(ids: Sequence[int]) -> Ids:
    return np.fromiter(set(ids), np.int64)  # np.unique takes twice as long


def _added(ids: Ids, more: Ids) -> Ids:
    return np.concatenate((ids, more)) if len(more) else ids


def choose(
    row: Row,
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    choice: int = 0,
    allowed: Mask | None = None,
    seen: Seen | None = None,
) -> TokenChoice:
    """The next token after ``prompt`` + ``output``. ``row`` has shape (vocabulary,), float32, and is not changed.
    ``seen``: of this prompt, and of an output that this one goes on, where somebody keeps it.

    Raises ``FunctionError`` if the row holds NaN, ``InvalidRequest`` if no id is ``allowed``.
    """
    if np.isnan(row).any():
        raise not_a_number()
    scores = _penalised(row, sampling, output, seen or Seen(prompt))
    if allowed is not None:
        scores[~allowed] = -np.inf
        if not allowed.any():
            raise InvalidRequest("what this request forbids and what it asks for leave no token to go on with")
    if sampling.greedy:
        token = int(scores.argmax())
    else:
        kept = _filtered(scores / np.float32(sampling.temperature), sampling)
        token = int((kept + _gumbel(len(row), sampling.seed or 0, choice, len(output))).argmax())
    return reported(row, token, sampling.logprobs)


def broken(scores: Sequence[TokenChoice]) -> FunctionError | None:
    """What is wrong with the log probabilities of a prompt, if anything is."""
    return not_a_number() if any(math.isnan(score.logprob) for score in scores) else None


def not_a_number() -> FunctionError:
    """What is wrong with a row that holds NaN."""
    return FunctionError(_NAN)


def _penalised(row: Row, sampling: Sampling, output: Sequence[int], seen: Seen) -> Row:
    scores = row.astype(np.float32, copy=True)
    if sampling.penalised:
        seen.read(output, len(row))
    if sampling.repetition_penalty != 1.0:
        values = scores[seen.ids]
        penalty = np.float32(sampling.repetition_penalty)
        scores[seen.ids] = np.where(values > 0, values / penalty, values * penalty)
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        penalties = sampling.presence_penalty + sampling.frequency_penalty * seen.counts
        scores[seen.drawn] -= penalties.astype(np.float32)
    for token, bias in sampling.logit_bias.items():
        scores[token] += np.float32(bias)
    return scores


def _filtered(scores: Row, sampling: Sampling) -> Row:
    if 0 < sampling.top_k < len(scores):
        scores = np.where(scores < np.partition(scores, -sampling.top_k)[-sampling.top_k], -np.inf, scores)
    if sampling.min_p > 0:
        scores = np.where(scores < scores.max() + np.log(sampling.min_p), -np.inf, scores)
    if sampling.top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        weights = np.exp(scores[order] - scores[order[0]])
        before = np.cumsum(weights) - weights
        drop = order[before >= sampling.top_p * weights.sum()]
        drop = drop[drop != order[0]]  # top_p = 0 still leaves the likeliest
        scores = scores.copy()
        scores[drop] = -np.inf
    return scores.astype(np.float32, copy=False)


def _gumbel(size: int, seed: int, choice: int, position: int) -> Row:
    key = np.array([seed & _MASK, choice & _MASK], dtype=np.uint64)
    counter = np.array([0, 0, 0, position], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(size)
    noise: Row = -np.log(-np.log(np.maximum(uniform, 1e-300))).astype(np.float32)
    return noise


def reported(row: Row, token: int, count: int | None) -> TokenChoice:
    """``token`` with its log probability and the ``count`` likeliest ids of ``row``; ``None``: neither."""
    if count is None:
        return TokenChoice(token, 0.0)
    shifted = row.astype(np.float64) - float(row.max())
    logs = shifted - np.log(np.exp(shifted).sum())
    top: list[int] = []
    if count:
        top = [int(i) for i in np.argpartition(-logs, min(count, len(logs) - 1))[:count]]
        top.sort(key=lambda i: (-logs[i], i))
    return TokenChoice(token, float(logs[token]), tuple((i, float(logs[i])) for i in top))

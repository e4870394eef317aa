"""Proves, on the real weights and threads, that a row's bits do not depend on its batch; finds the cheapest level.

Each of several texts is computed as one prefill by itself, then all of them together in uneven pieces, single tokens
among them, across page borders, with texts that join, pause and leave, then all in one step that is taller than any of
the engine's: libraries add up a row in another way beyond some number of rows. Every row's logits must be equal bit by
bit. The layers of a model are alike: the first few stand for all.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence as Many
from typing import Final

import msgspec
import torch

from sllm_runtime.worker.engine.base import Request, Sampling
from sllm_runtime.worker.engine.ours.model.backend import Backend
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.model.host import Host
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_LEVELS, LEVELS, Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE, pages_for
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence

log = logging.getLogger(__name__)
VERSION: Final = 6
"""Of the arithmetic: raised when the same weights may give other bits."""
_DEPTH: Final = 3
_LENGTHS: Final = (2 * PAGE + 9, 70, 33, 21, 18, 17, 12, 9, 5)
TALLEST: Final = sum(_LENGTHS)
"""Rows of the tallest step that is tried; those of the engine have fewer (``scheduler.Limits``)."""
_PIECES: Final = (1, 1, 3, 1, 31, 1, 1, 64, 2, 1, 1)


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What a self-test found, valid where ``fingerprint`` is the same."""

    fingerprint: str
    level: str
    exact: bool
    probe: str
    """Digest of the logits of a fixed text."""

    @property
    def numerics(self) -> Numerics:
        """The level."""
        return next((level for level in (*LEVELS, *GPU_LEVELS) if level.name == self.level), EXACT)

    @property
    def numerics_class(self) -> str:
        """Instances of one class go on with each other's calls, token by token."""
        return hashlib.sha256("\n".join((self.fingerprint, self.level, self.probe)).encode()).hexdigest()


def fingerprint(architecture: str, model: str, dtype: torch.dtype, backend: Backend | None = None) -> str:
    """What decides the bits, known before any weight is there: libraries, processor (``backend``'s, the CPU unless it
    is given), dtype, model."""
    parts = (str(VERSION), *(backend or Host()).marks(), str(dtype), architecture, model)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def remembered(text: str, mark: str) -> Proof | None:
    """The proof in ``text`` (``Proof`` as JSON), if it is one for ``mark``."""
    try:
        proof = msgspec.json.decode(text, type=Proof)
    except msgspec.MsgspecError:
        return None
    return proof if proof.fingerprint == mark else None


def prove(
    decoder: Decoder, mark: str, levels: Many[Numerics] | None = None, layers: int | None = None
) -> Proof:  # fmt: skip
    """The first of ``levels`` (those of the decoder's backend) that holds. Where none does, exactness is not promised.
    Takes as long as some 1,400 tokens. One that cannot be computed here (``Backend.refusals``) does not hold.

    ``layers``: how many of the first layers this process has; all of them unless it is given."""
    with torch.inference_mode(), decoder.backend.current():
        for level in decoder.backend.levels if levels is None else levels:
            try:
                test = _Test(decoder, level, layers)
                if test.holds():
                    return Proof(fingerprint=mark, level=level.name, exact=True, probe=test.digest())
            except decoder.backend.refusals as error:
                log.warning("level %s cannot be computed here: %s: %s", level.name, type(error).__name__, error)
        level = decoder.backend.otherwise
        return Proof(fingerprint=mark, level=level.name, exact=False, probe=_Test(decoder, level, layers).digest())


def agrees(decoder: Decoder, proof: Proof, layers: int | None = None) -> bool:
    """Whether the fixed text has the same bits here as where ``proof``, which is for the same libraries, kind of
    processor and weights, was found. Takes as long as some 80 tokens. ``layers`` as in ``prove``."""
    with torch.inference_mode(), decoder.backend.current():
        try:
            return _Test(decoder, proof.numerics, layers).digest() == proof.probe
        except decoder.backend.refusals as error:
            log.warning("level %s cannot be computed here: %s: %s", proof.level, type(error).__name__, error)
            return False


class _Test:
    def __init__(self, decoder: Decoder, level: Numerics, layers: int | None) -> None:
        self._decoder = decoder
        self._depth = min(layers or decoder.count, _DEPTH)
        self._lengths = [min(length, decoder.context) for length in _LENGTHS]
        self._level = level
        self._half = sum(map(pages_for, self._lengths))
        shape = decoder.backend.kv_shape(self._depth, decoder.heads, decoder.dtype)
        _, self._steps = decoder.backend.cache(shape, 2 * self._half, decoder.heads, level, decoder.dtype)

    def holds(self) -> bool:
        """Whether every row is the same in all three ways."""
        alone = [self._rows([Chunk(text, 0, len(text.tokens))]) for text in self._texts(0)]
        return self._mixed(alone) and self._together(alone)

    def _together(self, alone: Many[torch.Tensor]) -> bool:
        """Whether they are in one step."""
        rows = self._rows([Chunk(text, 0, len(text.tokens)) for text in self._texts(self._half)])
        return torch.equal(rows, torch.cat(list(alone)))

    def _mixed(self, alone: Many[torch.Tensor]) -> bool:
        """Whether they are in pieces, beside each other's."""
        mixed = self._texts(self._half)
        done = [0] * len(mixed)
        turn = 0
        while any(at < len(text.tokens) for at, text in zip(done, mixed, strict=True)):
            turn += 1
            taking = [i for i, text in enumerate(mixed) if done[i] < len(text.tokens) and (turn + i) % 4]
            counts = [min(_PIECES[(turn + 3 * i) % len(_PIECES)], len(mixed[i].tokens) - done[i]) for i in taking]
            order = sorted(range(len(taking)), key=lambda at: counts[at] > 1)  # as Batches puts them
            chunks = [Chunk(mixed[taking[at]], done[taking[at]], counts[at]) for at in order]
            rows = self._rows(chunks) if chunks else torch.empty(0)
            for at in order:
                i, count = taking[at], counts[at]
                if not torch.equal(rows[:count], alone[i][done[i] : done[i] + count]):
                    return False
                rows = rows[count:]
                done[i] += count
        return True

    def digest(self) -> str:
        """Of the logits of the first text's last rows."""
        text = self._texts(0)[0]
        rows = self._rows([Chunk(text, 0, len(text.tokens))])[-4:]
        return hashlib.sha256(rows.contiguous().cpu().numpy().tobytes()).hexdigest()

    def _texts(self, page: int) -> list[Sequence]:
        texts = []
        for number, length in enumerate(self._lengths):
            tokens = [(number * 7919 + at * 104_729 + 17) % self._decoder.vocabulary for at in range(length)]
            request = Request(id=number, prompt=tuple(tokens), sampling=Sampling())
            texts.append(Sequence(request, tokens, pages=list(range(page, page + pages_for(length)))))
            page += pages_for(length)
        return texts

    def _rows(self, chunks: Many[Chunk]) -> torch.Tensor:
        batch = self._steps.make(chunks)
        hidden = self._decoder.run(self._decoder.begin(batch), batch, 0, self._depth)
        count = sum(chunk.count for chunk in chunks)
        wanted = torch.arange(self._level.padded(count), device=hidden.device).clamp_(max=count - 1)
        return self._decoder.logits(hidden, wanted)[:count]

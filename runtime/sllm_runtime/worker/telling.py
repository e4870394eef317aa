"""One continuation as its caller gets it: pieces of the engine to deltas. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sllm_runtime.protocol.frames import Delta, FinishReason, TokenLogprob, ToolDelta
from sllm_runtime.protocol.limits import KIB
from sllm_runtime.worker.engine.base import TokenChoice
from sllm_runtime.worker.engine.sinks import Piece
from sllm_runtime.worker.tokens import Tokens, Vocabulary
from sllm_runtime.worker.tools.reader import CallReader

_SCORES: Final = 24
"""Log probabilities of one delta: with 20 alternatives each, of tokens as long as any, less than a frame takes."""


class Shown:
    """Log probabilities as they are told, the tokens as text and, where that is not all of them, as bytes."""

    def __init__(self, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self._tokens, self._vocabulary = tokens, vocabulary

    def prepare(self) -> None:
        """Read the vocabulary: later the event loop would wait for that."""
        _ = self._vocabulary.readable

    def __call__(self, choices: Sequence[TokenChoice]) -> tuple[TokenLogprob, ...]:
        return tuple(self._one(choice.id, choice.logprob, choice.top) for choice in choices)

    def first(self, token: int) -> TokenLogprob:
        """A token that follows nothing: it has no probability."""
        return self._one(token, None, ())

    def _one(self, token: int, logprob: float | None, likeliest: Sequence[tuple[int, float]]) -> TokenLogprob:
        texts, raws = zip(*(self._text(each) for each in (token, *(other for other, _ in likeliest))), strict=True)
        top = tuple((text, score) for text, (_, score) in zip(texts[1:], likeliest, strict=True))
        whole = all(raw == text.encode() for text, raw in zip(texts, raws, strict=True))
        return TokenLogprob(texts[0], logprob, top, () if whole else raws)

    def _text(self, token: int) -> tuple[str, bytes]:
        raw = self._vocabulary.written(token)
        if raw is not None:
            return raw.decode(errors="replace"), raw
        text = self._tokens.text_of(token)
        return text, b"" if self._vocabulary.special(token) else text.encode()  # no text shows it


_TEXT: Final = 8 * KIB
"""Characters of one delta: with those log probabilities, still less than that."""


def parted(delta: Delta) -> Iterator[Delta]:
    """``delta`` in parts that each go into one frame, the end with the last: of a prompt that is scored, or repeated,
    there may be far more log probabilities, or text."""
    scores, text = delta.logprobs, delta.text
    last = max(0, len(scores) - 1) // _SCORES * _SCORES
    for at in range(0, last, _SCORES):
        yield Delta(delta.choice, "", None, scores[at : at + _SCORES])
    for at in range(0, len(text) - _TEXT, _TEXT):
        yield Delta(delta.choice, text[at : at + _TEXT])
    told = max(0, len(text) - 1) // _TEXT * _TEXT
    yield msgspec.structs.replace(delta, text=text[told:], logprobs=scores[last:])


def _placed(entries: Sequence[TokenLogprob], text: bytes) -> Iterator[TokenLogprob]:
    """``entries`` with what each has of ``text``, which they make up: a special token that a caller wrote stands there,
    and the space that some tokenizers put before a text does not."""
    at = 0
    for entry in entries:
        raws = entry.raw or tuple(token.encode() for token in (entry.token, *(token for token, _ in entry.top)))
        ways = (raws[0], raws[0].removeprefix(b" ")) if raws[0] else (entry.token.encode(), b"")
        own = next((way for way in ways if text.startswith(way, at)), raws[0])
        at += len(own)
        yield entry if own == raws[0] else msgspec.structs.replace(entry, raw=(own, *raws[1:]))


@dataclass(slots=True)
class Telling:
    """``index``: its place in the answer. ``echo``: what of its prompt it repeats; with ``scored``, the prompt's first
    id, together with the prompt's log probabilities, which come with the engine's first piece."""

    index: int
    show: Shown
    echo: str = ""
    scored: int | None = None
    calls: CallReader | None = None
    """Where the text may hold calls of functions."""

    def before(self) -> Delta | None:
        """What is told before the engine's first piece."""
        if not self.echo or self.scored is not None:
            return None
        echo, self.echo = self.echo, ""
        return Delta(self.index, echo)

    def nothing(self) -> Delta:
        """All that is told where no token is wanted."""
        return Delta(self.index, self.echo, "length")

    def delta(self, piece: Piece) -> Delta | None:
        """What ``piece`` adds, if that is anything."""
        text, logprobs = piece.text, self.show(piece.logprobs)
        finish: FinishReason | None = piece.finish
        if self.scored is not None:
            prompt = (self.show.first(self.scored), *self.show(piece.prompt))
            logprobs = (*_placed(prompt, self.echo.encode()), *logprobs)
            text, self.echo, self.scored = self.echo + text, "", None
        told: tuple[ToolDelta, ...] = ()
        if self.calls is not None:
            text, told, finish = self._calls(self.calls, piece)
        if not (text or finish or logprobs or told):
            return None
        return Delta(self.index, text, finish, logprobs, told)

    @staticmethod
    def _calls(calls: CallReader, piece: Piece) -> tuple[str, tuple[ToolDelta, ...], FinishReason | None]:
        text, told = calls.feed(piece.text)
        if piece.finish is None:
            return text, told, None
        rest, more = calls.flush()
        made = piece.finish == "stop" and calls.calls > 0
        return text + rest, (*told, *more), "tool_calls" if made else piece.finish

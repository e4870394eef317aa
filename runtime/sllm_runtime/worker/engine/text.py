"""From token ids to text that is final: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

_BROKEN = "\ufffd"
_LONGEST = 16
"""Tokens held back at most for a character that does not complete (a model may write broken UTF-8)."""
_CONTEXT = 5
_CHARACTER = 4
"""Tokens of the longest character where each of its bytes is one."""


class Decoder(Protocol):
    """The half of a tokenizer that this needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out."""


class Detokenizer:
    """Incremental: ids in, text that later ids cannot change out. ``context``: the prompt's last ids, since how a
    token is written may depend on the one before. However the ids are grouped, their text is the same."""

    def __init__(self, decoder: Decoder, context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = _context(decoder, context)
        """They begin where a character does: some decoders (ByteFallback) take all bytes of a run for broken where
        they are not whole characters."""
        self._read = len(self._ids)
        """Tokens whose text is out; those from 0 on only give context."""
        self._shown = decoder.decode(self._ids) if self._ids else ""

    def feed(self, ids: Iterable[int]) -> str:
        """Text that became final with ``ids``."""
        return "".join([self._next(token) for token in ids])

    def flush(self) -> str:
        """What is left at the end, broken characters included."""
        return self._take(self._decoder.decode(self._ids)) if len(self._ids) > self._read else ""

    def _next(self, token: int) -> str:
        self._ids.append(token)
        text = self._decoder.decode(self._ids)
        if text.endswith(_BROKEN) and len(self._ids) - self._read < _LONGEST:
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        """What is new in ``text``. A bounded window keeps the cost per token constant."""
        if not text.startswith(self._shown):  # a broken end of what is out was completed, or a run of bytes broken
            new = self._decoder.decode(self._ids[self._read :])
            del self._ids[:-_LONGEST]
        elif new := text[len(self._shown) :]:
            del self._ids[: self._read]  # what was new begins where a character does
        else:
            del self._ids[_LONGEST:]  # special tokens: what has text stays the context
        self._shown = self._decoder.decode(self._ids)
        self._read = len(self._ids)
        return new


def _context(decoder: Decoder, prompt: Sequence[int]) -> list[int]:
    """The last ids of ``prompt``: _CONTEXT, or as many more as a character that they would begin inside of takes."""
    for size in range(_CONTEXT, _CONTEXT + _CHARACTER):
        text = decoder.decode(prompt[-size:])
        if text and not text.startswith(_BROKEN):
            break
    return list(prompt[-size:])


class StopMatcher:
    """Finds the first stop string, wherever the borders of the pieces are, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string ended it (it is cut off before that string)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0

"""The tokenizer as the engine needs it: tokenizers' own, without transformers around it."""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, cast

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from sllm_runtime.protocol.errors import InvalidRequest, UnsupportedModel


class Tokens:
    """Text to ids and back. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def from_json(cls, data: bytes) -> Tokens:
        """From a tokenizer.json. Raises ``UnsupportedModel`` if it is none."""
        try:
            return cls(cast(Any, Tokenizer).from_buffer(data))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise UnsupportedModel(f"tokenizer.json cannot be read: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Ids of ``text``; ``special``: with what the tokenizer puts around a text (as <s>)."""
        # One text's encode() holds the GIL for as long as the text is: neither loop nor engine would run meanwhile.
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    @cached_property
    def longest(self) -> int:
        """Bytes of a text that one token stands for at most: no more than the vocabulary writes it with. What a
        tokenizer leaves out of a text (spaces, accents) is not counted."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def text_of(self, token: int) -> str:
        """One token as text that stands alone, special ones too."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def showing(self, texts: Collection[str]) -> Showing:
        """Decodes as this does, but shows special tokens that are one of ``texts``."""
        found = ((self._tokenizer.token_to_id(text), text) for text in texts)
        return Showing(self, {token: text for token, text in found if token is not None})

    def vocabulary(self, size: int, eos: frozenset[int]) -> Vocabulary:
        """What each of the model's ``size`` ids stands for; made once. ``eos``: those that end an output."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, size, eos)
            return self._vocabulary


class Showing:
    """Text of ids in which some special tokens stand for themselves."""

    def __init__(self, tokens: Tokens, shown: Mapping[int, str]) -> None:
        self._tokens, self._shown = tokens, shown

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        parts = []
        for shown, run in groupby(ids, self._shown.get):
            part = list(run)
            parts.append(self._tokens.decode(part) if shown is None else shown * len(part))
        return "".join(parts)


class Vocabulary:
    """The ids of one model as bytes. Thread-safe. The tokenizer is written out when that is first asked for: most calls
    never do, and a large one has megabytes."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos: frozenset[int]) -> None:
        self.size = size
        self._tokenizer, self._eos = tokenizer, eos
        self._lock = threading.Lock()
        self._grammars: LLTokenizer | None = None

    def grammars(self) -> LLTokenizer:
        """As llguidance reads it. Raises ``InvalidRequest`` where it cannot: no output can be held to anything then."""
        with self._lock:
            if self._grammars is None:
                if not self._eos:
                    raise InvalidRequest("this model has no end-of-text token, so no output of a given shape could end")
                try:
                    text = self._tokenizer.to_str()
                    self._grammars = LLTokenizer(text, n_vocab=self.size, eos_token=sorted(self._eos))
                except (ValueError, RuntimeError) as error:
                    raise InvalidRequest(
                        f"this model's tokenizer allows no output of a given shape: {error}"
                    ) from error
            return self._grammars

    def literal(self, text: str) -> str:
        """``text`` in a Lark grammar: the special token that it is, or a string."""
        token = self._special.get(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    @cached_property
    def _special(self) -> dict[str, int]:
        known = self.grammars()
        added = self._tokenizer.get_added_tokens_decoder()
        return {each.content: token for token, each in added.items() if known.is_special_token(token)}

    @cached_property
    def texts(self) -> tuple[bytes, ...]:
        """The bytes of each id; none for special tokens, which no text shows. Raises as ``grammars``."""
        known = self.grammars()
        return tuple(b"" if known.is_special_token(i) else known.decode_bytes([i]) for i in range(self.size))

    def written(self, token: int) -> bytes | None:
        """What ``token`` adds to a text, wherever it stands: decoded alone it may lose its space, or be a part of a
        character. None for special tokens, and where the tokenizer cannot be read."""
        known = self.readable
        return None if known is None or known.is_special_token(token) else bytes(known.decode_bytes([token]))

    def special(self, token: int) -> bool:
        """Whether no text shows ``token``, as far as that is known."""
        known = self.readable
        return known is not None and known.is_special_token(token)

    @cached_property
    def readable(self) -> LLTokenizer | None:
        """``grammars``, where there are any. The first time takes a second where the vocabulary is large."""
        try:
            return self.grammars()
        except InvalidRequest:
            return None

    def beginning(self, prefix: bytes) -> list[int]:
        """Ids whose bytes begin with ``prefix``."""
        first = bisect_left(self._sorted, prefix, key=lambda id_: self.texts[id_])
        last = bisect_right(self._sorted, prefix, first, key=lambda id_: self.texts[id_][: len(prefix)])
        return self._sorted[first:last]

    @cached_property
    def _sorted(self) -> list[int]:
        return sorted(range(self.size), key=lambda id_: self.texts[id_])

"""The tokenizer as the engine needs it: tokenizers' own, without transformers around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from sllm_runtime.protocol.errors import UnsupportedModel


class Tokens:
    """Text to ids and back. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
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
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def text_of(self, token: int) -> str:
        """One token as text, special ones too."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

"""The handle of a model, as a function sees it. The worker gives the real one; this is its type."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""


@runtime_checkable
class Model(Protocol):
    """The parameter named ``model`` of a function (or of a class's ``setup``) receives one of these."""

    def generate(self, prompt: Prompt, *, max_tokens: int = 256, **sampling: Any) -> Iterator[str]:
        """Pieces of generated text as they become final. Sampling: ``temperature`` (0: greedy), ``top_p``, ``top_k``,
        ``min_p``, ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``, ``stop``,
        ``stop_ids``, ``ignore_eos``, ``min_tokens``, ``seed``, ``bad_words``, ``regex``, ``response_format``."""

    def agenerate(self, prompt: Prompt, *, max_tokens: int = 256, **sampling: Any) -> AsyncIterator[str]:
        """The same for async functions."""

    @property
    def module(self) -> Any:
        """The ``torch.nn.Module`` with its weights bound."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json."""

    @property
    def path(self) -> Path:
        """A directory with the model's own small files (config, tokenizer)."""

"""How long a request may be where a device's memory decides it, and who may go on with its calls then.

What is free on a GPU differs from one start to the next, and the context decides answers: where ``max_tokens`` is cut,
which call is refused. So it is part of the class of instances that go on with each other's calls, and coarse, so that
instances on GPUs that are alike have the same (docs/decisions/0060).
"""

from __future__ import annotations

import hashlib
from typing import Final

_STEPS: Final = 8
"""Contexts between a power of two and the next: at most an eighth of the cache is no request's alone."""


def served(pages: int) -> int:
    """Of so many pages those that one request may have."""
    step = max(1, (1 << pages.bit_length() - 1) // _STEPS)
    return pages // step * step


def class_of(numerics_class: str, context: int) -> str:
    """Of instances that compute the same bits (``selftest.Proof.numerics_class``) those that serve ``context``."""
    return hashlib.sha256(f"{numerics_class}\n{context} tokens".encode()).hexdigest()

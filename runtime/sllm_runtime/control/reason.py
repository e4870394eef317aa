"""Why something waits, in words that are made when somebody asks for them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias


class Reason:
    """``str(reason)`` makes the words, once. A decision that is made again at every plan need not make them: which node
    of a full cluster is nearest to having room takes a look at all of them, and most of the time nobody asks."""

    __slots__ = ("_make", "_words")

    def __init__(self, make: Callable[[], str]) -> None:
        """``make`` is pure: it may be called late, or never."""
        self._make = make
        self._words: str | None = None

    def __str__(self) -> str:
        if self._words is None:
            self._words = self._make()
        return self._words

    def __repr__(self) -> str:
        return repr(str(self))

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, Reason | str) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))


Words: TypeAlias = str | Reason

"""What differs between two dictionaries of which one was made from the other, without looking at all of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from operator import is_, is_not
from typing import Any, Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_TRACED: Final = 1000
"""Changes that are remembered: who asks for what was before them looks at all keys, once."""
_NOTHING: Final = object()


class Traced(dict[K, V]):
    """A dictionary that is copied at each change (``after``) and never changed itself; it knows which keys were changed
    since one that it was made from (``since``).

    All that were made from each other, one after the other, share a list of the keys that were changed; each knows how
    long it was then. Where two are made from one the second begins a list of its own, as if all were new in it.
    """

    __slots__ = ("_at", "_log")

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        super().__init__(items)
        self._log: list[K] = []
        self._at = 0

    @classmethod
    def of(cls, items: Mapping[K, V]) -> Traced[K, V]:
        """``items`` themselves where they are traced already."""
        return items if isinstance(items, Traced) else cls(items)

    def after(self, items: Mapping[K, V], gone: Iterable[K] = ()) -> Traced[K, V]:
        """With ``items``, less those of the keys ``gone`` that are there."""
        made = Traced(self)
        made.update(items)
        dropped = [key for key in gone if made.pop(key, _NOTHING) is not _NOTHING]
        if len(self._log) == self._at < MOST_TRACED:
            made._log = self._log
            made._log += (*items, *dropped)
            made._at = len(made._log)
        return made

    def since(self, before: Mapping[K, Any]) -> Iterable[K] | None:
        """The keys that were changed since ``before``, the one changed first coming first; None: nobody knows."""
        if not isinstance(before, Traced) or before._log is not self._log or before._at > self._at:
            return None
        return dict.fromkeys(self._log[before._at : self._at])


def changed(old: Mapping[K, V], new: Mapping[K, V]) -> Iterable[K]:
    """The keys whose value is not the object that it was: as they were changed where ``new`` knows that, else those of
    ``new`` in its order, then those that are gone. A view is copied at each change, so most have the same keys in the
    same order, which is told without a step of Python for each."""
    if old is new:
        return ()
    known = new.since(old) if isinstance(new, Traced) else None
    if known is not None:
        return [key for key in known if old.get(key, _NOTHING) is not new.get(key, _NOTHING)]
    if len(old) == len(new) and all(map(is_, old, new)):
        return compress(new, map(is_not, old.values(), new.values()))
    return [key for key, value in new.items() if old.get(key) is not value] + [key for key in old if key not in new]

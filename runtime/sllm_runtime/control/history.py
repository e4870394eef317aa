"""The last starts: what was known when each was decided, and what has come of it; and the last predictions of any
kind beside what came. For people; it decides nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from sllm_runtime.control.changes import differing
from sllm_runtime.control.outcomes import Outcome, outcomes
from sllm_runtime.control.scheduling.prediction import Outlook
from sllm_runtime.control.view import Instance, Key, Migration, View

MOST: Final = 256
"""Starts that are remembered."""
MOST_OUTCOMES: Final = 4096
"""Predictions that are remembered."""
MOST_REPORTS: Final = 4096
"""Reports of nodes that views of before may hold on to: of four nodes all starts are remembered with what was known
then, of a thousand the last four."""


@dataclass(frozen=True, slots=True)
class Past:
    """A start. ``view``: what it was decided by, ``now`` its time; None: that is no longer remembered. Of one that was
    not made at once both are of when it was decided what to do for it, or first that there is no room."""

    instance: Instance
    """As it was last."""
    now: float
    view: View | None = None
    moves: tuple[Migration, ...] = ()
    """What had been moved for it when it was placed, or was being moved."""


@dataclass(frozen=True, slots=True)
class _PutOff:
    """What a version that waits for a place was put off by."""

    outlook: Outlook | None
    now: float
    view: View


class History:
    """Fed with every change of the view."""

    def __init__(self) -> None:
        self._starts: dict[str, Past] = {}
        self._put_off: dict[Key, _PutOff] = {}
        self._outcomes: deque[Outcome] = deque(maxlen=MOST_OUTCOMES)

    def follow(self, old: View, new: View, now: float) -> list[str]:
        """``old`` has become ``new``. Instances whose starts have been decided, or are over."""
        gone = {key for key, _, version in differing(old.versions, new.versions) if version is None}
        if gone:  # others may have their names next
            self._outcomes = deque((each for each in self._outcomes if each.key not in gone), MOST_OUTCOMES)
        self._outcomes.extend(outcomes(old, new))
        found = []
        for name, before, after in differing(old.instances, new.instances):
            if after is None:
                continue
            known = self._starts.get(name)
            if known is not None:
                self._starts[name] = replace(known, instance=after)
                if not over(known.instance) and over(after):
                    found.append(name)
            elif before is None and not after.adopted:
                self._remember(self._begun(after, old, now))
                found.append(name)
        self._wait(old, new, now)
        return found

    def _begun(self, instance: Instance, old: View, now: float) -> Past:
        """``instance`` has been placed by what ``old`` says."""
        moves = tuple(each for each in old.migrations.values() if each.by == instance.key)
        known = self._put_off.get(instance.key)
        if not instance.waited or known is None or known.outlook is not instance.outlook:
            return Past(instance, now, old, moves)
        return Past(instance, known.now, known.view, moves)

    def _wait(self, old: View, new: View, now: float) -> None:
        """Whoever has been put off, or decided on since."""
        for key, before, after in differing(old.put_off, new.put_off):
            if after is None:
                self._put_off.pop(key, None)
            elif before is None or after.outlook is not before.outlook:
                self._put_off.pop(key, None)
                self._put_off[key] = _PutOff(after.outlook, now, old)
        most = _views(new)
        while len(self._put_off) > most:
            del self._put_off[next(iter(self._put_off))]

    def of(self, instance: str) -> Past | None:
        """The start of that instance, if it is remembered."""
        return self._starts.get(instance)

    def outcomes(self, key: Key, instance: str = "") -> list[Outcome]:
        """Of a version, or of one ``instance`` of it, the newest first."""
        return [
            each for each in reversed(self._outcomes) if each.key == key and (not instance or each.instance == instance)
        ]

    def _remember(self, past: Past) -> None:
        while len(self._starts) >= MOST:
            del self._starts[next(iter(self._starts))]
        self._starts[past.instance.record.instance] = past
        assert past.view is not None
        for name in list(self._starts)[: -_views(past.view)]:
            if (old := self._starts[name]).view is not None:
                self._starts[name] = replace(old, view=None)


def _views(view: View) -> int:
    """So many like it may be remembered."""
    return min(MOST, max(1, MOST_REPORTS // max(1, len(view.nodes))))


def over(instance: Instance) -> bool:
    """Whether its start is over: it was ready, or never will be."""
    return instance.ready_at is not None or instance.ended

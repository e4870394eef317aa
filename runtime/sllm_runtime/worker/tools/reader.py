"""Calls of functions in the text of an output, as it comes: text and parts of calls out. No I/O.

What turns out to be no call is text, as it stood there. A call is told once its name is known, arguments as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import Final

from sllm_runtime.protocol.frames import ToolDelta
from sllm_runtime.protocol.openai import MAX_CALLS
from sllm_runtime.worker.tools.call import SPACE, Broken, Call
from sllm_runtime.worker.tools.forms import Form


class State(Enum):
    """Where a reader stands."""

    TEXT = "text"
    """Nothing of a call."""
    BETWEEN = "between"
    """After a marker, or after a call: another may follow."""
    HEADER = "header"
    """A name that stands before its arguments."""
    CALL = "call"
    """In a JSON object."""


TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.TEXT: frozenset({State.BETWEEN}),
    State.BETWEEN: frozenset({State.TEXT, State.HEADER, State.CALL}),
    State.HEADER: frozenset({State.TEXT, State.CALL}),
    State.CALL: frozenset({State.BETWEEN, State.TEXT}),
}
"""To text also from where no call came of what looked like one."""


class CallReader:
    """Reads one output. ``names``: functions that there are; ``id_of``: the id of the output's n-th call; ``most``:
    calls that are told, whatever more the model makes."""

    def __init__(self, form: Form, names: Collection[str], id_of: Callable[[int], str], most: int = MAX_CALLS) -> None:
        self.state = State.TEXT
        self.calls = 0
        """Those that were told."""
        self._form, self._names, self._id_of, self._most = form, names, id_of, most
        self._left = ""
        """Not read yet."""
        self._held = ""
        """Read as part of what may turn out to be no call."""
        self._certain = False
        """Whether a call came of the last marker: what stands behind calls is no text."""
        self._call: Call | None = None
        self._bare = form.bare
        self._text: list[str] = []
        self._told: list[ToolDelta] = []

    def feed(self, text: str) -> tuple[str, tuple[ToolDelta, ...]]:
        """Text and parts of calls that are certain with ``text``."""
        self._left += text
        steps = {State.TEXT: self._find, State.BETWEEN: self._next, State.HEADER: self._header, State.CALL: self._read}
        while steps[self.state]():
            pass
        return self._taken()

    def flush(self) -> tuple[str, tuple[ToolDelta, ...]]:
        """The same at the end of the output."""
        if self._held or self.state in (State.TEXT, State.HEADER):
            self._text.append(self._held + self._left)
        self._held = self._left = ""
        return self._taken()

    def _taken(self) -> tuple[str, tuple[ToolDelta, ...]]:
        text, told = "".join(self._text), tuple(self._told)
        self._text.clear()
        self._told.clear()
        return text, told

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"a reader of calls cannot go from {self.state.value} to {state.value}")
        self.state = state

    def _find(self) -> bool:
        """The marker, or a call at the very beginning; text before it is certain."""
        if self._bare:
            begun = self._left.lstrip(SPACE)
            if not begun:
                return False
            self._bare = False
            if begun[0] == "{":
                self._hold(len(self._left) - len(begun))
                self._move(State.BETWEEN)
                return True
        at = self._left.find(self._form.marker)
        if at < 0:
            at = len(self._left) - _overlap(self._left, self._form.marker)
            certain = self._left[:at].rstrip(SPACE)
            self._text.append(certain)
            self._left = self._left[len(certain) :]
            return False
        certain = self._left[:at].rstrip(SPACE)
        self._text.append(certain)
        self._left = self._left[len(certain) :]
        self._hold(at - len(certain) + len(self._form.marker))
        self._certain = False
        self._move(State.BETWEEN)
        return True

    def _hold(self, count: int) -> None:
        """That many characters are read."""
        self._held += self._left[:count]
        self._left = self._left[count:]

    def _next(self) -> bool:
        """What stands between calls is left out; then a call begins, or text."""
        begun = self._left.lstrip(SPACE)
        space = len(self._left) - len(begun)
        dropped = next((text for text in self._form.dropped if begun.startswith(text)), None)
        if dropped is not None:
            self._hold(space + len(dropped))
            self._held = "" if self._certain else self._held
            return True
        if begun.startswith("{"):
            self._hold(space)
            self._begin()
            return True
        if any(text.startswith(begun) for text in self._form.dropped):
            return False  # nothing yet, or a part of one
        if self._form.written[0] == "{name}":
            self._move(State.HEADER)
            return True
        return self._give_up()

    def _header(self) -> bool:
        """``name[ARGS]`` before the arguments; between them may stand an id of the model's own."""
        at = self._left.find("{")
        if at < 0:
            return False
        name = self._left[:at].partition("[")[0].strip(SPACE)
        self._hold(at)
        if not name:
            return self._give_up()
        self._begin(name)
        return True

    def _begin(self, name: str = "") -> None:
        names = self._names if self._form.bare else None
        self._call = Call(self.calls, self._id_of(self.calls), names, name)
        self._move(State.CALL)

    def _read(self) -> bool:
        assert self._call is not None
        try:
            while self._left and not self._call.done:
                self._hold(1)
                self._call.feed(self._held[-1])
            news = self._call.news()
        except Broken:
            if not self._call.named:
                return self._give_up()
            self._held = ""  # what was told stays told
            self._move(State.BETWEEN)
            return bool(self._left)
        if news is not None and news.index < self._most:
            self._told.append(news)
        if self._call.named:
            self.calls, self._held, self._certain = self._call.index + 1, "", True
        if not self._call.done:
            return False
        self._move(State.BETWEEN)
        return True

    def _give_up(self) -> bool:
        """No call came of it: what is held is text."""
        self._text.append(self._held)
        self._held = ""
        self._move(State.TEXT)
        return True


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of ``text`` that ``marker`` may begin with."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)

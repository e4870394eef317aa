"""One call of a function as its JSON comes."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from sllm_runtime.protocol.frames import ToolDelta
from sllm_runtime.worker.words import sendable

_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = frozenset({"name", "type", "id", *_ARGUMENTS})
"""Of a call; an object with others is somebody's text."""
SPACE: Final = " \t\r\n"
"""Of JSON."""


class Broken(ValueError):
    """The text that should be a call of a tool is none."""


class _Object:
    """One JSON object as it comes: what its top level holds by key, as raw text."""

    def __init__(self) -> None:
        self.done = False
        self.values: dict[str, str] = {}
        self._key: str | None = None
        self._raw = ""
        self._depth = 0
        self._string = self._escaped = False

    def feed(self, char: str) -> None:
        """Raises ``Broken`` where it is none."""
        if self._string:
            self._add(char)
            self._string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif char in SPACE and self._depth <= 1:
            return
        elif self._depth == 0:
            if char != "{":
                raise Broken
            self._depth = 1
        elif self._depth == 1 and char == ":" and self._key is None:
            self._key, self._raw = _text(self._raw), ""
        elif self._depth == 1 and char in ",}":
            self._key, self._raw = None, ""
            self.done = char == "}"
        else:
            self._add(char)
            self._string = char == '"'
            self._depth += (char in "[{") - (char in "]}")

    def complete(self, key: str) -> bool:
        """Whether the value of ``key`` is there and whole."""
        return key in self.values and (self._key != key or self.done)

    def _add(self, char: str) -> None:
        if self._key is None:
            self._raw += char
        else:
            self.values[self._key] = self.values.get(self._key, "") + char


def _text(raw: str) -> str:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise Broken from error
    if not isinstance(value, str):
        raise Broken
    return sendable(value)  # half an emoji, written as an escape, stays that


class Call:
    """One call, as far as it has come. ``name``: where it stood before the object, which is the arguments then."""

    def __init__(self, index: int, id_: str, names: Collection[str] | None, name: str = "") -> None:
        self.named = False
        """Whether it was told: nothing of it is text any more."""
        self.index = index
        self._id, self._names = id_, names
        self._object = _Object()
        self._name = name
        self._raw = ""
        self._told = 0

    @property
    def done(self) -> bool:
        """Nothing follows."""
        return self._object.done

    @property
    def _bare(self) -> bool:
        """Whether the object is the arguments themselves."""
        return bool(self._name)

    def feed(self, char: str) -> None:
        """Raises ``Broken``."""
        self._object.feed(char)
        if self._bare:
            self._raw += char
        elif not (self.named or self._object.values.keys() <= _KEYS):
            raise Broken

    def news(self) -> ToolDelta | None:
        """What can be told of it now. Raises ``Broken``."""
        if not self.named and not (self._bare or self._object.complete("name") or self.done):
            return None
        first = not self.named
        if first:
            name = self._name or _text(self._object.values.get("name", ""))
            if self._names is not None and name not in self._names:
                raise Broken
        arguments = self._arguments()
        new, self._told, self.named = arguments[self._told :], len(arguments), True
        if not (first or new):
            return None
        return ToolDelta(self.index, self._id if first else "", name if first else "", new)

    def _arguments(self) -> str:
        if self._bare:
            return self._raw
        key = next((key for key in _ARGUMENTS if key in self._object.values), None)
        if key is None:
            return "{}" if self.done else ""
        raw = self._object.values[key]
        if not raw.startswith('"'):
            return raw
        return _text(raw) if self._object.complete(key) else ""  # some write them as JSON in a string

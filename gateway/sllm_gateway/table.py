"""The route table: what can be called here, kept current by a watch on the registry."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from sllm_gateway.arguments import Arguments
from sllm_gateway.errors import quoted
from sllm_runtime.protocol.errors import FunctionNotFound, NotFound, VersionNotFound
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.records import Route

COMPARED: Final = 200
"""Names that one which nobody has is compared with: each takes some 20 µs, in which no stream goes on."""


class Version:
    """One version of a function. The object stays the same while its route changes."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.function = route.function
        self.number = route.version
        self.removed = False
        self._arguments: Arguments | None = None

    @property
    def manifest(self) -> Manifest:
        return self.route.manifest

    @property
    def key(self) -> tuple[str, int]:
        return self.function, self.number

    @property
    def arguments(self) -> Arguments:
        """Its argument checker, compiled at first use: a version's manifest never changes."""
        if self._arguments is None:
            self._arguments = Arguments(self.manifest.handler.input_schema)
        return self._arguments


def _another(before: Route, after: Route) -> bool:
    """Whether the function was deleted meanwhile, and deployed anew: it counts its versions anew."""
    if before.created and after.created:
        return before.created != after.created
    return before.manifest != after.manifest


class RouteTable:
    """All routes by function and version. ``on_change`` is called with the version after each change."""

    def __init__(self, on_change: Callable[[Version], None]) -> None:
        self._versions: dict[str, dict[int, Version]] = {}
        self._on_change = on_change
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, at each change."""

    def apply(self, key: str, route: Route | None) -> None:
        """What the watch saw: ``routes.<function>.<version>`` is now ``route``; None: it was deleted."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()  # waiters look when this is done: they run in a later turn of the loop
        _, function, number = key.split(".")
        known = self._versions.get(function, {})
        version = known.get(int(number))
        if version is not None and route is not None and _another(version.route, route):
            self._remove(known, version)
            version = None
        if route is None:
            self._remove(known, version)
            if not known:
                self._versions.pop(function, None)
            return
        if version is None:
            version = Version(route)
            self._versions.setdefault(function, {})[version.number] = version
        version.route = route
        self._on_change(version)

    def _remove(self, known: dict[int, Version], version: Version | None) -> None:
        if version is not None:
            version.removed = True
            del known[version.number]
            self._on_change(version)

    def find(self, function: str, number: int | None = None) -> Version:
        """The version that a call goes to. Raises ``FunctionNotFound`` or ``VersionNotFound``."""
        known = self._versions.get(function)
        if not known:
            raise FunctionNotFound(f"no function is named {quoted(function)}{self._guess(function)}")
        if number is not None:
            if number not in known:
                there = ", ".join(f"v{n}" for n in sorted(known))
                raise VersionNotFound(f"function {function!r} has no version {number}; there are {there}")
            return known[number]
        for version in known.values():
            if version.route.active:
                return version
        raise FunctionNotFound(f"function {function!r} has no active version; deploy it, or name a version: v<n>")

    async def until_active(self, function: str, number: int, within_s: float) -> None:
        """Wait until calls that name no version go to ``number`` alone: who moved the route calls the new one next.

        Gives up after ``within_s``: somebody else may have moved it on.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while [v.number for v in self._versions.get(function, {}).values() if v.route.active] != [number]:
                    await self._changed.wait()

    async def until_found(self, function: str, number: int | None, within_s: float) -> Version:
        """As ``find``, for what has been deployed and is on its way here. Raises as ``find`` after ``within_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(NotFound):
                        return self.find(function, number)
                    await self._changed.wait()
        return self.find(function, number)

    def get(self, function: str, number: int) -> Version | None:
        return self._versions.get(function, {}).get(number)

    def _guess(self, function: str) -> str:
        close = difflib.get_close_matches(function, self._near(function), n=1)
        return f"; did you mean {close[0]!r}?" if close else "; `sllm fn list` names those that there are"

    def _near(self, function: str) -> Iterable[str]:
        """All names, or of many those that begin most alike."""
        if len(self._versions) <= COMPARED:
            return self._versions
        names = sorted(self._versions)
        at = bisect(names, function)
        return names[max(at - COMPARED // 2, 0) : at + COMPARED // 2]

    def active(self) -> Iterator[Version]:
        """The active version of each function, by name."""
        for _, known in sorted(self._versions.items()):
            yield from (version for version in known.values() if version.route.active)

    def __contains__(self, function: str) -> bool:
        """Whether it is deployed."""
        return function in self._versions

    def __len__(self) -> int:
        return len(self._versions)

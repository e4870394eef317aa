"""Which of a platform's gateways is asked: one until it takes no connection or breaks one off, then the next.
No I/O."""

from __future__ import annotations

from collections import deque
from typing import Any

import httpx

from sllm import transport
from sllm.answers import Trace


class Gateways:
    """All gateways of one platform, the one that is asked first."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._urls = deque(urls)

    def __len__(self) -> int:
        return len(self._urls)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._urls)

    def past(self, url: str) -> None:
        """Nothing comes from ``url``: the next is asked from now on, unless another one is already."""
        if url == self._urls[0]:
            self._urls.rotate(-1)


class Asking:
    """One request, at one gateway after the other until one takes it. A ``path`` that is a whole URL is asked there.

    ``within_s``: so long all are waited for together; to take the connection each has its share of what is left.
    """

    def __init__(self, gateways: Gateways, path: str, within_s: float | None = None) -> None:
        self._gateways = gateways
        self._path, self._left = ("", [path]) if "://" in path else (path, list(gateways.urls))
        self._refused: list[str] = []
        self._left_s = within_s

    @property
    def url(self) -> str:
        """Where it is asked now."""
        return self._left[0] + self._path

    @property
    def bounds(self) -> dict[str, Any]:
        """Keyword arguments of the request, where it has bounds of its own."""
        if self._left_s is None:
            return {}
        return {"timeout": httpx.Timeout(self._left_s, connect=self._left_s / len(self._left))}

    def answered(self, trace: Trace | None) -> None:
        """``trace`` notes by whom."""
        if trace is not None:
            trace.gateway = self._left[0]

    def failed(self, error: httpx.HTTPError, trace: Trace | None, after_s: float) -> None:
        """It is asked at the next. Raises the typed error where it was perhaps heard, or where neither one nor time is
        left."""
        url = self._left[0]
        self._gateways.past(url)
        if not isinstance(error, transport.NOT_HEARD):
            raise transport.failed(url, error, trace) from error
        self._refused.append(url)
        if self._left_s is not None:
            self._left_s -= after_s
        if len(self._left) == 1 or (self._left_s is not None and self._left_s <= 0):
            raise transport.unreached(self._refused, error) from error
        del self._left[0]

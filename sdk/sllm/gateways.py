"""Which of a platform's gateways is asked: one until it takes no connection or breaks one off, then the next.
No I/O."""

from __future__ import annotations

from collections import deque

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
    """One request, at one gateway after the other until one takes it. A ``path`` that is a whole URL is asked there."""

    def __init__(self, gateways: Gateways, path: str) -> None:
        self._gateways = gateways
        self._path, self._left = ("", [path]) if "://" in path else (path, list(gateways.urls))
        self._refused: list[str] = []

    @property
    def url(self) -> str:
        """Where it is asked now."""
        return self._left[0] + self._path

    def answered(self, trace: Trace | None) -> None:
        """``trace`` notes by whom."""
        if trace is not None:
            trace.gateway = self._left[0]

    def failed(self, error: httpx.HTTPError, trace: Trace | None) -> None:
        """It is asked at the next. Raises the typed error where it was perhaps heard, or where none is left."""
        url = self._left[0]
        if not isinstance(error, transport.NOT_HEARD):
            raise transport.failed(url, error, trace) from error
        self._gateways.past(url)
        self._refused.append(url)
        if len(self._left) == 1:
            raise transport.unreached(self._refused, error) from error
        del self._left[0]

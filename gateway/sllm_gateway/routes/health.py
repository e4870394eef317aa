"""``/livez``, ``/readyz``, ``/metrics``: for probes and Prometheus, without a token."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from sllm_gateway.asgi import JSON, Receive, Scope, Send, answer
from sllm_gateway.headroom import Headroom
from sllm_gateway.metrics import Metrics

_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]


class Live:
    """The process turns its loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, _TEXT, b"ok\n")


class Ready:
    """``problem`` says why no call can be served now; empty: one can."""

    def __init__(self, problem: Callable[[], str]) -> None:
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem()
        body = msgspec.json.encode({"ready": not problem, "problem": problem})
        await answer(send, 503 if problem else 200, [JSON], body)


class MetricsRoute:
    """``headroom`` is looked at before it is asked, beside what is counted here."""

    def __init__(self, metrics: Metrics, headroom: Headroom | None = None) -> None:
        self._metrics, self._headroom = metrics, headroom

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._headroom is not None:
            await self._headroom.look()
        await answer(send, 200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], await self._metrics.page())

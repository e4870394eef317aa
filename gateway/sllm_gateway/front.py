"""The outermost ASGI application: authorization, routing, and one place where errors become responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router

from sllm_gateway import errors
from sllm_gateway.asgi import SHARE, STATE, Message, Receive, Scope, Send, answer, joined, refuse_body
from sllm_gateway.auth import Auth
from sllm_gateway.bodies import Bodies, Share
from sllm_gateway.calls import STOPPED
from sllm_gateway.errors import quoted
from sllm_gateway.metrics import Metrics
from sllm_runtime.platform import trace
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import (
    BodyTimeout,
    BodyTooLarge,
    GatewayStopped,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    SllmError,
)
from sllm_runtime.protocol.http import CALLS

log = logging.getLogger(__name__)

FAMILIES = frozenset({"fn", "v1", "api", "livez", "readyz", "metrics"})
"""Labels of the request counter: anything may be asked for, but not anything becomes a series."""


class Front:
    """Handles one request each call. What a route raises before its headers is answered in the route's own shape."""

    def __init__(
        self, router: Router, auth: Auth, metrics: Metrics, bodies: Bodies, random: Callable[[int], bytes]
    ) -> None:
        self._router = router
        self._bodies = bodies
        self._operators = Bodies(limits.MAX_BODY)
        """Of ``/api/v1``: calls that take all of theirs, for hours perhaps, keep no operator out."""
        self._auth = auth
        self._metrics = metrics
        self._random = random

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._refuse_other(scope, receive, send)
            return
        said = trace.checked(_traced(scope, trace.HEADER))
        scope[STATE] = trace.state(_traced(scope, trace.STATE)) if said else ""  # of another trace, or of none
        with trace.within(said or trace.fresh(self._random)):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # with it starlette raises what it would otherwise answer in its own words
        scope[SHARE] = share = Share(self._operators if scope["path"].startswith("/api/") else self._bodies)
        seen = _Seen(send)
        try:
            self._auth.check(scope)
            await self._router(scope, receive, seen.send)
        except SllmError as error:
            await self._error(error, scope, receive, seen)
        except HTTPException as error:
            await self._error(_typed(error, scope, self._router), scope, receive, seen)
        except asyncio.CancelledError:  # by the server, which waits no longer: see ``Server.finish``
            await self._error(GatewayStopped(STOPPED), scope, receive, seen)
            raise
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"], extra={"call": scope.get("sllm.call")})
            bug = InternalError(f"the gateway failed ({type(error).__name__}); its log has more under this call's id")
            await self._error(bug, scope, receive, seen)
        finally:
            share.close()
            family = scope["path"].partition("/")[2].partition("/")[0]  # of `*` there is none
            self._metrics.requests.labels(family if family in FAMILIES else "other", str(seen.status)).inc()

    async def _error(self, error: SllmError, scope: Scope, receive: Receive, seen: _Seen) -> None:
        if seen.status:
            log.warning("response of %s broke off: %s", scope["path"], error.message)
            return
        openai = scope["path"].startswith("/v1/") and not scope["path"].startswith(CALLS)
        call = scope.get("sllm.call")
        status = errors.status(error, openai=openai)
        headers = errors.headers(error, call)
        body = errors.body(error, call, openai=openai)
        if isinstance(error, BodyTooLarge | BodyTimeout) or scope[SHARE].refused:
            await refuse_body(receive, seen.send, status, headers, body)
        else:
            await answer(seen.send, status, headers, body)

    @staticmethod
    async def _refuse_other(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})


class _Seen:
    """Remembers the status that was sent; 0: none yet."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    def send(self, message: Message) -> Coroutine[Any, Any, None]:
        if not self.status:
            self.status = message["status"]
        return self._send(message)


def _traced(scope: Scope, name: str) -> str:
    return joined(scope, name.encode()).decode("latin-1")


def _typed(error: HTTPException, scope: Scope, router: Router) -> SllmError:
    path = quoted(scope["path"])[1:-1]
    if error.status_code == 404:
        return NotFound(f"there is no route {path}; docs/http.md and /api/v1/openapi.json list them")
    if error.status_code == 405:
        there = (each for each in router.routes if isinstance(each, Route) and each.matches(scope)[0] is not Match.NONE)
        allowed = ", ".join(sorted({method for each in there for method in each.methods or ()}))  # one has not all
        refused = MethodNotAllowed(f"{path} does not take {scope['method']}, only {allowed}")
        refused.allow = allowed
        return refused
    return InvalidRequest(f"{path}: {error.detail}")

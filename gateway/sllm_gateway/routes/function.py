"""``POST /fn/{name}`` and ``/fn/{name}/v{n}``."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

from sllm_gateway.arguments import given
from sllm_gateway.asgi import Receive, Scope, Send
from sllm_gateway.errors import quoted
from sllm_gateway.keeping import wish_of
from sllm_gateway.outputs import FunctionBody, FunctionStream
from sllm_gateway.routes.calling import Caller, wants_events
from sllm_gateway.table import Version
from sllm_runtime.protocol.errors import VersionNotFound
from sllm_runtime.protocol.http import VERSION_PART


class FunctionRoute:
    """Calls a function: JSON in; JSON out, or SSE for who accepts it."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._caller
        accepted = caller.clock()
        with self._refusing(scope):
            call_id = await caller.new_id(scope)
            wish, stream = wish_of(scope), wants_events(scope)
        body = None
        if wish is not None and wish.key:
            with self._refusing(scope):
                body = given(await caller.body(scope, receive))
                found = await caller.keeping.again(scope, body, wish)
            if found is not None:
                await caller.keeping.answer(found, scope, send, wish, stream=stream)
                return
        with self._refusing(scope):
            version = await self._find(scope["path_params"])
        with caller.metrics.refusing(version.function):
            body = await version.arguments.check(await caller.body(scope, receive) if body is None else body)
        order = caller.order(scope, version, "fn", body, call=call_id, stream=stream, accepted=accepted)
        if wish is not None:
            await caller.keeping.begin(scope, send, order, caller.asked(order, wish.durable), wish)
            return
        call = caller.admit(order, lambda durable: caller.asked(order, durable))
        if stream:
            await caller.responder.stream(call, FunctionStream(call_id), scope, send)
        else:
            encoder = FunctionBody(version.manifest.handler.streams)
            await caller.responder.whole(call, encoder, scope, send)

    def _refusing(self, scope: Scope) -> AbstractContextManager[None]:
        """As ``Metrics.refusing``; a name of nothing that is deployed is no label."""
        name = scope["path_params"]["name"]
        return self._caller.metrics.refusing(name) if self._caller.lookup.has(name) else nullcontext()

    async def _find(self, path: dict[str, str]) -> Version:
        name, number = path["name"], path.get("version")
        if number is None:
            return await self._caller.lookup.find(name)
        if not re.fullmatch(VERSION_PART, number):
            raise VersionNotFound(f"{quoted(number)} is no version; write /fn/{quoted(name)[1:-1]}/v<n>")
        return await self._caller.lookup.find(name, int(number[1:]))

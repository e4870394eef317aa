"""``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``: for the official client, without a workaround."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from sllm_gateway.arguments import IN_THREAD_BYTES
from sllm_gateway.asgi import JSON, Receive, Scope, Send, answer
from sllm_gateway.errors import quoted
from sllm_gateway.keeping import wish_of
from sllm_gateway.lookup import Lookup
from sllm_gateway.openai.outputs import ChatStream, CompletionStream, Header, WholeAnswer
from sllm_gateway.openai.requests import read, warnings
from sllm_gateway.routes.calling import Caller
from sllm_gateway.table import RouteTable, Version
from sllm_runtime.protocol.calls import CallOrder
from sllm_runtime.protocol.errors import FunctionNotFound, ModelNotFound, VersionNotFound
from sllm_runtime.protocol.openai import model_name
from sllm_runtime.protocol.openai_requests import ChatRequest, CompletionRequest, OpenAIRequest

log = logging.getLogger(__name__)


async def find_model(lookup: Lookup, model: str) -> Version:
    """The version that ``name``, ``name:v3``, ``name:adapter`` or ``name:v3:adapter`` means. Raises ``ModelNotFound``,
    also for what is no language model and for an adapter that it has not."""
    named = model_name(model)
    if named is None:
        raise ModelNotFound(
            f"{quoted(model)} names no model here: give a function's name, name:v<n>, name:adapter", field="model"
        )
    name, adapter = named.function, named.adapter
    try:
        version = await lookup.find(name, named.version)
    except (FunctionNotFound, VersionNotFound) as error:
        raise ModelNotFound(error.message, field="model") from error
    if not version.manifest.engine:
        raise ModelNotFound(
            f"{name!r} is a function without an engine-backed language model; call it by POST /fn/{name}",
            field="model",
        )
    if adapter is not None and adapter not in version.manifest.adapters:
        known = ", ".join(sorted(version.manifest.adapters)) or "none"
        raise ModelNotFound(f"{name!r} has no adapter {quoted(adapter)}; there are: {known}", field="model")
    return version


class _CallRoute:
    """Takes a checked request to the engine and shapes what comes back."""

    request: type[OpenAIRequest]
    chat: bool

    def __init__(self, caller: Caller, wall: Callable[[], float]) -> None:
        self._caller = caller
        self._wall = wall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._caller
        accepted = caller.clock()
        call_id = await caller.new_id(scope)
        wish = wish_of(scope)
        body = await caller.body(scope, receive)
        found = await caller.keeping.again(scope, body, wish) if wish is not None else None
        request = await self._read(body)
        stream = bool(request.stream)
        if wish is not None and found is not None:
            await caller.keeping.answer(found, scope, send, wish, stream=stream)
            return
        version = await find_model(caller.lookup, request.model)
        if ignored := warnings(request):
            log.info("%s", scope["path"], extra={"call": call_id, "warnings": ignored})
        kind, prefix = ("chat", "chatcmpl") if self.chat else ("completion", "cmpl")
        order = caller.order(
            scope,
            version,
            "chat" if kind == "chat" else "completion",
            body,
            call=call_id,
            stream=stream,
            accepted=accepted,
        )
        header = Header(f"{prefix}-{call_id}", int(self._wall()), request.model)

        def asked(durable: bool) -> CallOrder:
            of_all = caller.asked(order, durable, header)
            return msgspec.structs.replace(of_all, usage=request.usage_wanted, choices=request.choices)

        if wish is not None:
            await caller.keeping.begin(scope, send, order, asked(wish.durable), wish)
            return
        call = caller.admit(order, asked)
        if stream:
            chunks = (ChatStream if self.chat else CompletionStream)(header, usage=request.usage_wanted)
            await caller.responder.stream(call, chunks, scope, send)
        else:
            whole = WholeAnswer(header, chat=self.chat, choices=request.choices)
            await caller.responder.whole(call, whole, scope, send)

    async def _read(self, body: bytes) -> OpenAIRequest:
        if len(body) > IN_THREAD_BYTES:
            return await asyncio.to_thread(read, self.request, body)
        return read(self.request, body)


class Completions(_CallRoute):
    """``POST /v1/completions``."""

    request, chat = CompletionRequest, False


class ChatCompletions(_CallRoute):
    """``POST /v1/chat/completions``."""

    request, chat = ChatRequest, True


class Models:
    """``GET /v1/models`` and ``/v1/models/{model}``: the functions that these routes serve."""

    def __init__(self, table: RouteTable, lookup: Lookup) -> None:
        self._table = table
        self._lookup = lookup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = scope["path_params"].get("model")
        if model is None:
            served = [version for version in self._table.active() if version.manifest.engine]
            data = [_view(id_, version) for version in served for id_ in _ids(version)]
            view: object = {"object": "list", "data": data}
        else:
            view = _view(model, await find_model(self._lookup, model))
        await answer(send, 200, [JSON], msgspec.json.encode(view))


def _ids(version: Version) -> list[str]:
    """The model itself, and with each of its adapters."""
    return [version.function, *(f"{version.function}:{name}" for name in sorted(version.manifest.adapters))]


def _view(id_: str, version: Version) -> dict[str, object]:
    return {"id": id_, "object": "model", "created": int(version.route.created), "owned_by": "sllm"}

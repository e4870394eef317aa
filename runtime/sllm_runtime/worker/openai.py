"""Answers OpenAI-shaped calls with the engine; the user's function is not asked (docs/architecture.md, A function).

The gateway makes the role, finish and usage chunks; from here come ``Delta`` frames and the usage in the end frame.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InvalidArgument, InvalidRequest, MalformedJson
from sllm_runtime.protocol.frames import Delta, TokenLogprob
from sllm_runtime.worker import prompts
from sllm_runtime.worker.call import Call
from sllm_runtime.worker.chat import ChatTemplate
from sllm_runtime.worker.engine.base import Request, Sampling
from sllm_runtime.worker.engine.loop import AsyncSink, EngineLoop, Mailbox, Piece
from sllm_runtime.worker.generation import Generation
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.tokens import Tokens

log = logging.getLogger(__name__)
MAX_CHOICES = 128
_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; for chat it is whatever fits."""
_GATEWAYS = frozenset({"model", "stream", "stream_options", "user", "store", "metadata", "service_tier"})
"""Known fields that concern others, or nobody here."""


def _prompts(value: Any) -> Any:
    """A prompt in any of OpenAI's four forms as a list of texts or lists of ids."""
    many = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    return value if many else [value]


class _Common(prompts.SamplingOptions):
    """What both routes share. Unknown fields are ignored; the log names them."""

    model_config = ConfigDict(extra="allow", strict=True)

    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=0)


class CompletionBody(_Common):
    """``POST /v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)] = Field(min_length=1, max_length=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1)
    suffix: str | None = None


class ChatBody(_Common):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Continuations to make: ``(prompt ids, text to echo)`` for each prompt, ``n`` of each."""

    prompts: tuple[tuple[tuple[int, ...], str], ...]
    sampling: Sampling
    n: int


async def answer(call: Call, handle: ModelHandle, mailbox: Mailbox) -> None:
    """Run one ``chat`` or ``completion`` call. Raises typed errors whose ``field`` is the parameter."""
    loop, tokens = await asyncio.to_thread(handle.engine)
    plan = _plan(call, handle, loop, tokens)
    writing = asyncio.Lock()
    choices = [
        _choose(call, loop, tokens, mailbox, writing, plan, index) for index in range(len(plan.prompts) * plan.n)
    ]
    if len(choices) == 1:
        await choices[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(choice)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _choose(
    call: Call, loop: EngineLoop, tokens: Tokens, mailbox: Mailbox, writing: asyncio.Lock, plan: _Plan, index: int
) -> None:
    """One continuation, delta by delta."""
    place, choice = divmod(index, plan.n)
    ids, echo = plan.prompts[place]
    room = prompts.fit(len(ids), plan.sampling.max_tokens, loop.engine.max_context)
    if echo or not room:
        async with writing:
            await call.adelta(codec.pack(Delta(index, echo, None if room else "length")))
    if not room:
        call.count(prompt=0 if choice else len(ids))
        return
    sampling = replace(plan.sampling, max_tokens=room)
    request = Request(id=-1, prompt=ids, sampling=sampling, choice=choice)
    run = Generation(loop, request, count_prompt=choice == 0)
    sink = AsyncSink(mailbox)
    with run.submitted(sink):
        async for piece in sink:
            run.heard(piece)
            if piece.text or piece.finish or piece.logprobs:
                delta = Delta(index, piece.text, piece.finish, _logprobs(piece, tokens))
                async with writing:
                    await call.adelta(codec.pack(delta))


def _logprobs(piece: Piece, tokens: Tokens) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            tokens.text_of(item.id), item.logprob, tuple((tokens.text_of(i), logprob) for i, logprob in item.top)
        )
        for item in piece.logprobs
    )


def _plan(call: Call, handle: ModelHandle, loop: EngineLoop, tokens: Tokens) -> _Plan:
    chat = call.head.kind == "chat"
    body = parse(bytes(call.body), chat=chat)
    unknown = sorted(set(body.model_extra or {}) - _GATEWAYS)
    if unknown:
        log.warning("fields that mean nothing here are ignored: %s", ", ".join(unknown))
    context = loop.engine.max_context
    if isinstance(body, ChatBody):
        _check_format(body)
        text = ChatTemplate.from_files(handle.files).render(body.messages, body.tools)
        ids = tokens.encode(text, special=False)
        wanted = body.max_completion_tokens or body.max_tokens or context
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return _Plan(((ids, ""),), body.sampling(wanted, temperature=1.0, logprobs=logprobs), body.n or 1)
    assert isinstance(body, CompletionBody)
    if body.suffix:
        raise InvalidArgument("'suffix': this model does not fill in", field="suffix")
    wanted = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    encoded = tuple(_completion_prompt(prompt, tokens, echo=bool(body.echo)) for prompt in body.prompt)
    return _Plan(encoded, body.sampling(wanted, temperature=1.0, logprobs=body.logprobs), body.n or 1)


def _completion_prompt(prompt: str | Sequence[int], tokens: Tokens, *, echo: bool) -> tuple[tuple[int, ...], str]:
    ids = tokens.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    text = prompt if isinstance(prompt, str) else tokens.decode(ids) if echo else ""
    return ids, text if echo else ""


def _check_format(body: ChatBody) -> None:
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise InvalidArgument(f"'response_format': {kind!r} is not supported; only 'text' is", field="response_format")


def parse(body: bytes, *, chat: bool) -> ChatBody | CompletionBody:
    """The body of a request. Raises ``MalformedJson``, ``InvalidRequest``, ``InvalidArgument`` naming the parameter."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJson(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidRequest("the body is no JSON object")
    try:
        return ChatBody.model_validate(given) if chat else CompletionBody.model_validate(given)
    except ValidationError as error:
        raise prompts.refused(error) from error

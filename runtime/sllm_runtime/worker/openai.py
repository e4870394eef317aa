"""Answers OpenAI-shaped calls with the engine; the user's function is not asked (docs/architecture.md, A function).

The gateway makes the role, finish and usage chunks; from here come ``Delta`` frames and the usage in the end frame.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from pydantic import ValidationError

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InvalidRequest, MalformedJson
from sllm_runtime.protocol.frames import Delta
from sllm_runtime.protocol.openai import check, model_name, tools_of
from sllm_runtime.protocol.openai_requests import ChatRequest, CompletionRequest
from sllm_runtime.worker import prompts
from sllm_runtime.worker.adapters import Adapters
from sllm_runtime.worker.aside import aside
from sllm_runtime.worker.call import Call
from sllm_runtime.worker.chat import ChatTemplate
from sllm_runtime.worker.engine.base import Request, Sampling
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.sinks import AsyncSink, Mailbox, Piece
from sllm_runtime.worker.generation import Generation
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.prompts import Rules
from sllm_runtime.worker.telling import Shown, Telling, parted
from sllm_runtime.worker.tokens import Tokens
from sllm_runtime.worker.tools.calling import Calling, required

log = logging.getLogger(__name__)
_ABREAST = 32
"""Continuations of one answer that are told in turn: fewer than an engine computes at once."""
_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; for chat it is whatever fits."""
_NAMED, _SHOWN = 20, 100
"""Unknown fields that the log names, and characters of each."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Continuations to make: ``(prompt ids, text to echo)`` for each prompt, ``n`` of each."""

    prompts: tuple[tuple[tuple[int, ...], str], ...]
    sampling: Sampling
    rules: Rules
    n: int
    show: Shown
    adapter: str | None = None
    calling: Calling | None = None


@dataclass(frozen=True, slots=True)
class _Output:
    """One continuation: how it is told, and the engine's part; None where no token is wanted."""

    telling: Telling
    run: Generation | None


async def answer(call: Call, handle: ModelHandle, mailbox: Mailbox) -> None:
    """Run one ``chat`` or ``completion`` call. Raises typed errors whose ``field`` is the parameter."""
    # In a thread: rendering, tokenizing and compiling a shape take as long as a caller's text is.
    with _named(chat=call.head.kind == "chat"):
        loop, plan = await aside(_prepared, call, handle)
        async with _adapter(handle.adapters, plan.adapter, loop):
            await _write_all(call, loop, mailbox, plan)


@contextlib.contextmanager
def _named(*, chat: bool) -> Iterator[None]:
    """The engine speaks of its prompt: who chats gave messages."""
    try:
        yield
    except InvalidRequest as error:
        if chat and error.field == "prompt":
            error.field = "messages"
        raise


def _adapter(adapters: Adapters, name: str | None, loop: EngineLoop) -> contextlib.AbstractAsyncContextManager[None]:
    """The adapter ``name``, if any, is there inside this block."""
    return contextlib.nullcontext() if name is None else adapters.held(name, loop.engine.adapters)


async def _write_all(call: Call, loop: EngineLoop, mailbox: Mailbox, plan: _Plan) -> None:
    """All continuations, a piece of each in turn: an order that no timing changes, so that a resumed call writes the
    same deltas again. Of very many, ``_ABREAST`` are told at a time."""
    outputs = [_output(call, loop, plan, index) for index in range(len(plan.prompts) * plan.n)]
    with contextlib.ExitStack() as running:
        coming = deque((output, _pieces(output, mailbox, running)) for output in outputs)
        abreast: deque[tuple[_Output, AsyncIterator[Piece]]] = deque()
        while coming or abreast:
            while coming and len(abreast) < _ABREAST:
                output, pieces = coming.popleft()
                await _tell(call, output.telling.nothing() if pieces is None else output.telling.before())
                if pieces is not None:
                    abreast.append((output, pieces))
            if abreast and not await _told(call, *abreast[0]):
                abreast.rotate(-1)
            elif abreast:
                abreast.popleft()


def _pieces(output: _Output, mailbox: Mailbox, running: contextlib.ExitStack) -> AsyncIterator[Piece] | None:
    """What the engine makes of it while ``running`` lasts."""
    if output.run is None:
        return None
    sink = AsyncSink(mailbox)
    running.enter_context(output.run.submitted(sink))
    return aiter(sink)


async def _told(call: Call, output: _Output, pieces: AsyncIterator[Piece]) -> bool:
    """Wait for one piece and write it; whether it was the last. That it rests is none: the outputs take turns, which
    have to be the same wherever they are held."""
    piece = await _heard(output, pieces)
    while piece.rests:
        piece = await _heard(output, pieces)
    await _tell(call, output.telling.delta(piece))
    return piece.last


async def _heard(output: _Output, pieces: AsyncIterator[Piece]) -> Piece:
    piece = await anext(pieces)
    if output.run is not None:
        output.run.heard(piece)
    return piece


async def _tell(call: Call, delta: Delta | None) -> None:
    for part in () if delta is None else parted(delta):
        await call.adelta(codec.pack(part))


def _prepared(call: Call, handle: ModelHandle) -> tuple[EngineLoop, _Plan]:
    loop, tokens = handle.engine()
    body = parse(bytes(call.body), chat=call.head.kind == "chat")
    named = model_name(body.model)
    plan = _plan(body, handle, loop, tokens)
    if plan.sampling.scored:
        plan.show.prepare()
    return loop, plan if named is None else replace(plan, adapter=named.adapter)


def _output(call: Call, loop: EngineLoop, plan: _Plan, index: int) -> _Output:
    """Made in the order of the answer, since a resumed call knows its outputs by their numbers."""
    place, choice = divmod(index, plan.n)
    ids, echo = plan.prompts[place]
    scored = plan.sampling.prompt_logprobs is not None
    room = prompts.fit(len(ids), plan.sampling.max_tokens, loop.engine.max_context)
    reader = None if plan.calling is None else plan.calling.reader(call.head.call, index)
    telling = Telling(index, plan.show, echo, ids[0] if scored and ids else None, reader)
    if not room and not scored:
        call.count(prompt=0 if choice else len(ids))
        return _Output(telling, None)
    request = Request(
        id=-1,
        prompt=ids,
        sampling=prompts.within(plan.sampling, room),
        choice=choice,
        lora=plan.adapter,
        constraints=plan.rules.constraints(),
    )
    decoder = None if plan.calling is None else plan.calling.decoder
    return _Output(telling, Generation(loop, request, count_prompt=choice == 0, decoder=decoder, beside=True))


def _plan(body: ChatRequest | CompletionRequest, handle: ModelHandle, loop: EngineLoop, tokens: Tokens) -> _Plan:
    if unknown := body.unknown:  # as many as a caller likes, and as long
        named = [f"{name[:_SHOWN]!r}" for name in unknown[:_NAMED]]
        log.warning("%d field(s) that mean nothing here are ignored: %s", len(unknown), ", ".join(named))
    vocabulary = prompts.vocabulary_of(loop.engine, tokens, handle.files)
    rules, show = prompts.rules_of(body, vocabulary), Shown(tokens, vocabulary)
    if isinstance(body, ChatRequest):
        said = body.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"})
        template = ChatTemplate.from_files(handle.files, tools=bool(tools_of(said)))
        ids = prompts.encoded(_rendered(body, template), loop.engine, tokens, special=False)
        wanted = body.max_completion_tokens or body.max_tokens or loop.engine.max_context
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = prompts.sampling_of(body, wanted, temperature=1.0, logprobs=logprobs)
        if (calls := required(said, template.form, vocabulary)) is not None:
            rules = replace(rules, grammar=calls)
        calling = Calling.of(said, template.form, tokens)
        return _Plan(((ids, ""),), sampling, rules, body.n or 1, show, calling=calling)
    wanted = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    encoded = tuple(_completion_prompt(prompt, loop.engine, tokens, echo=bool(body.echo)) for prompt in body.prompts)
    sampling = prompts.sampling_of(body, wanted, temperature=1.0, logprobs=body.logprobs)
    if body.echo:
        sampling = replace(sampling, prompt_logprobs=body.logprobs)
    return _Plan(encoded, sampling, rules, body.n or 1, show)


def _rendered(body: ChatRequest, template: ChatTemplate) -> str:
    tools = tools_of({"tools": body.tools, "tool_choice": body.tool_choice})
    choice = body.tool_choice if tools else None
    return template.render(body.messages, tools, choice, body.chat_template_kwargs)


def _completion_prompt(
    prompt: str | Sequence[int], engine: prompts.Limits, tokens: Tokens, *, echo: bool
) -> tuple[tuple[int, ...], str]:
    if isinstance(prompt, str):
        return prompts.encoded(prompt, engine, tokens), prompt if echo else ""
    ids = prompts.given_ids(prompt, engine)
    return ids, tokens.decode(ids) if echo else ""


def parse(body: bytes, *, chat: bool) -> ChatRequest | CompletionRequest:
    """The body of a request. Raises ``MalformedJson``, ``InvalidRequest``, ``InvalidArgument`` naming the parameter."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedJson(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidRequest("the body is no JSON object")
    try:
        made = ChatRequest.model_validate(given) if chat else CompletionRequest.model_validate(given)
    except ValidationError as error:
        raise prompts.refused(error) from error
    check(given, chat=chat)
    return made

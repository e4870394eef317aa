"""The official client against ``/v1``, without a workaround."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from sllm_gateway.openai.requests import read
from sllm_gateway.sse import HEARTBEAT
from sllm_runtime.protocol.errors import ContextLengthExceeded, FunctionError, InvalidArgument, InvalidRequest
from sllm_runtime.protocol.frames import FrameKind, TokenLogprob, ToolDelta, Usage
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.openai_requests import ChatRequest, CompletionRequest
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import CREATED, Run, World, entry, manifest, starting, world

MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def say(run: Run) -> None:
    """``def f()`` in three pieces, for each choice."""
    for choice in range(run.arguments.get("n") or 1):
        run.delta("def", choice=choice)
        run.delta(" f\n", choice=choice)
        run.delta("()", choice=choice, finish="stop")
    run.end(usage=Usage(prompt=3, completion=5, cached=1))


def client(w: World, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0, **options)


async def model(w: World, script: Any = say, **fields: Any) -> None:
    await w.deploy(manifest("coder", engine=True, model="/m", **fields), entry(), script=script)


async def test_chat(nats: Nats) -> None:
    async with world(nats) as w, client(w) as api:
        await model(w)
        answer = await api.chat.completions.create(model="coder", messages=MESSAGES, n=2)
        assert w.node.opened[0].head.kind == "chat"
    assert [choice.message.content for choice in answer.choices] == ["def f\n()"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


class Seen(httpx.AsyncByteStream):
    """A response's bytes, each shown to ``look`` before its reader has it."""

    def __init__(self, stream: Any, look: Callable[[bytes], None]) -> None:
        self._stream, self._look = stream, look

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            self._look(data)
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


async def test_chat_streamed_with_usage_after_comments(nats: Nats) -> None:
    """Heartbeats and progress come as comments, also between chunks, and the client does not stumble over them."""

    seen, between = bytearray(), asyncio.Event()

    async def slowly(run: Run) -> None:
        run.delta("def")
        await asyncio.wait_for(between.wait(), GIVE_UP_S)
        run.delta("", finish="length")
        run.end(usage=Usage(3, 1))

    def look(data: bytes) -> None:
        seen.extend(data)
        if HEARTBEAT in seen.partition(b'"def"')[2]:
            between.set()

    async def record(response: httpx.Response) -> None:
        response.stream = Seen(response.stream, look)

    http = httpx.AsyncClient(event_hooks={"response": [record]}, verify=False)
    async with world(nats, headers_wait=0.05, heartbeat=0.1) as w, client(w, http_client=http) as api:
        w.controller.on_acquire = _after_progress(w)
        w.node.scripts["coder"] = slowly
        await w.deploy(manifest("coder", engine=True, model="/m"), script=slowly)
        stream = await api.chat.completions.create(
            model="coder:v1", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert stream.response.headers["sllm-call-id"]
    assert b": progress weights" in seen.partition(b'"def"')[0]
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", None, None]
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "def", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1


def _after_progress(w: World) -> Any:
    async def acquire(request: Any) -> Any:
        from sllm_runtime.protocol.ctl import Acquired

        w.node.report(starting("coder", Progress(stage="weights", done=1, total=2)))
        await until(lambda: w.gateway.calls.open()[0].state == "STARTING")
        await asyncio.sleep(0.2)
        return Acquired(route=await w.controller.route(manifest("coder", engine=True, model="/m"), entry()))

    return acquire


async def test_the_streams_bytes(nats: Nats) -> None:
    async with world(nats) as w:
        await model(w)
        body = {"model": "coder", "messages": MESSAGES, "stream": True}
        text = (await w.http.post("/v1/chat/completions", json=body)).text
    ids = [line for line in text.split("\n") if line.startswith("id: ")]
    assert ids == [f"id: {n}" for n in range(5)], "role, three texts, finish"
    assert text.endswith("\ndata: [DONE]\n\n")
    assert "\n: timeline " in text
    assert "event:" not in text


async def test_completions(nats: Nats) -> None:
    async with world(nats) as w, client(w) as api:
        await model(w)
        answer = await api.completions.create(model="coder", prompt="def ")
        stream = await api.completions.create(model="coder", prompt=["def "], stream=True)
        chunks = [chunk async for chunk in stream]
        assert w.node.opened[0].head.kind == "completion"
    assert answer.choices[0].text == "def f\n()"
    assert answer.object == "text_completion"
    assert [chunk.choices[0].text for chunk in chunks] == ["def", " f\n", "()"]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_calls_of_functions(nats: Nats) -> None:
    async def script(run: Run) -> None:
        run.delta("Well.", calls=(ToolDelta(0, "call_1", "f", '{"x"'),))
        run.delta("", calls=(ToolDelta(0, arguments=": 1}"), ToolDelta(1, "call_2", "g", "{}")))
        run.delta("", finish="tool_calls")
        run.end()

    tools: Any = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
    async with world(nats) as w, client(w) as api:
        await model(w, script)
        whole = await api.chat.completions.create(model="coder", messages=MESSAGES, tools=tools)
        stream = await api.chat.completions.create(model="coder", messages=MESSAGES, tools=tools, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    message = whole.choices[0].message
    assert (whole.choices[0].finish_reason, message.content) == ("tool_calls", "Well.")
    expected = [("call_1", "f", '{"x": 1}'), ("call_2", "g", "{}")]
    assert [
        (call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or []
        if call.type == "function"
    ] == expected
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert [(part.index, part.id, part.type) for part in parts] == [
        (0, "call_1", "function"), (0, None, None), (1, "call_2", "function")
    ]  # fmt: skip
    assert [part.function.arguments for part in parts if part.function] == ['{"x"', ": 1}", "{}"]
    assert chunks[-1].finish_reason == "tool_calls"


async def test_no_token_is_an_empty_completion(nats: Nats) -> None:
    async def nothing(run: Run) -> None:
        run.end(usage=Usage(prompt=1))

    async with world(nats) as w, client(w) as api:
        await model(w, nothing)
        answer = await api.completions.create(model="coder", prompt="x", max_tokens=0)
    assert answer.choices[0].text == ""


async def test_logprobs(nats: Nats) -> None:
    async def script(run: Run) -> None:
        if run.arguments.get("echo"):
            run.delta(
                "xa", finish="length", logprobs=(TokenLogprob("x", None), TokenLogprob("a", -0.5, (("a", -0.5),)))
            )
            run.end()
            return
        run.delta("ab", logprobs=(TokenLogprob("a", -0.5, (("a", -0.5), ("z", -2.0))), TokenLogprob("b", -1.0)))
        parts = (b"\xc3", b"z")
        run.delta("c", finish="stop", logprobs=(TokenLogprob("\ufffd", -1.5, (("z", -2.5),), parts),))
        run.end()

    async with world(nats) as w, client(w) as api:
        await model(w, script)
        chat = await api.chat.completions.create(model="coder", messages=MESSAGES, logprobs=True, top_logprobs=2)
        text = await api.completions.create(model="coder", prompt="x", logprobs=2)
        stream = await api.completions.create(model="coder", prompt="x", logprobs=2, stream=True)
        offsets = [chunk.choices[0].logprobs.text_offset async for chunk in stream if chunk.choices[0].logprobs]
        echo = await api.completions.create(model="coder", prompt="x", logprobs=1, echo=True, max_tokens=0)
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content is not None
    assert [entry.token for entry in content] == ["a", "b", "\ufffd"]
    assert [entry.bytes for entry in content] == [[97], [98], [0xC3]]
    assert [other.bytes for entry in content for other in entry.top_logprobs] == [[97], [122], [122]]
    assert [other.token for other in content[0].top_logprobs] == ["a", "z"]
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.token_logprobs == [-0.5, -1.0, -1.5]
    assert offsets == [[0, 1], [2]]
    assert echo.choices[0].logprobs is not None
    assert echo.choices[0].logprobs.token_logprobs == [None, -0.5], "a prompt's first token follows nothing"
    assert echo.choices[0].logprobs.top_logprobs == [None, {"a": -0.5}]
    assert echo.choices[0].logprobs.text_offset == [0, 1]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"stop": ["a"] * 17}, "'stop': List should have at most 16 items after validation, not 17"),
        ({"stop": ""}, "'stop': String should have at least 1 character"),
        ({"stop": ["a", ""]}, "'stop': String should have at least 1 character"),
        ({"stop": [1]}, "'stop': Input should be a valid string"),
        ({"bad_words": ["a"] * 65}, "'bad_words': List should have at most 64 items after validation, not 65"),
        ({"bad_words": ["a" * 257]}, "'bad_words': String should have at most 256 characters"),
        ({"bad_words": "a" * 257}, "'bad_words': String should have at most 256 characters"),
        ({"messages": [{"role": "", "content": 1}]}, "'messages[0].role': String should have at least 1 character"),
        ({"seed": 2**64}, "'seed': Input should be less than 18446744073709551616"),
        ({"top_k": -2}, "'top_k': Input should be greater than or equal to -1"),
    ],
)
def test_what_is_wrong_is_said_of_the_form_that_was_given(body: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(ChatRequest, json.dumps({"model": "coder", "messages": MESSAGES, **body}).encode())
    assert refused.value.message == says


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"bad_words": "a" * 257}, "bad_words"),
        ({"n": True}, "n"),
        ({"model": 5}, "model"),
    ],
)
async def test_a_wrong_parameter_is_400_and_named(nats: Nats, body: dict[str, Any], param: str) -> None:
    async with world(nats) as w:
        response = await w.http.post("/v1/chat/completions", json={"model": "coder", "messages": MESSAGES, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_a_key_is_one_execution_whatever_the_model_is_by_now(nats: Nats) -> None:
    """Another body with it is 422 here too: what a header says is no parameter."""
    key = {"idempotency-key": "k"}
    ask: dict[str, Any] = {"json": {"model": "coder", "messages": MESSAGES}, "headers": key}
    other: list[dict[str, Any]] = [
        {"json": {"model": "coder", "messages": MESSAGES, "n": 2}},
        {"json": {"model": "coder", "messages": []}},
        {"content": b"{"},
    ]
    async with world(nats) as w:
        await model(w)
        first = await w.http.post("/v1/chat/completions", **ask)
        assert first.status_code == 200

        async def replayed() -> None:
            again = await w.http.post("/v1/chat/completions", **ask)
            assert (again.status_code, again.json()) == (200, first.json())
            for body in other:
                refused = await w.http.post("/v1/chat/completions", **body, headers=key)
                error = refused.json()["error"]
                assert (refused.status_code, error["type"]) == (422, "invalid_request_error")
                assert (error["param"], error["code"]) == ("Idempotency-Key", "invalid_argument")

        await replayed()
        late = await w.http.post("/v1/chat/completions", **ask | {"headers": key | {"prefer": "respond-async"}})
        assert (late.status_code, late.json()["error"]["param"]) == (422, "Idempotency-Key")
        await w.controller.unroute("coder")
        await until(lambda: w.gateway.table.get("coder", 1) is None)
        await replayed()
        gone = await w.http.post("/v1/chat/completions", **ask | {"headers": {"idempotency-key": "another"}})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert len(w.node.runs) == 1


async def test_the_clients_exceptions(nats: Nats) -> None:
    async def refuse(run: Run) -> None:
        match run.arguments["user"]:
            case "context":
                run.end(ContextLengthExceeded("2049 tokens, the model takes 2048"))
            case "argument":
                run.end(InvalidArgument("top_k: no", field="top_k"))
            case _:
                run.end(FunctionError("ValueError: no"))

    async with world(nats) as w, client(w) as api:
        await model(w, refuse)
        await w.deploy(manifest("plain"), entry("i2"))
        with pytest.raises(openai.BadRequestError) as context:
            await api.chat.completions.create(model="coder", messages=MESSAGES, user="context")
        assert context.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as argument:
            await api.chat.completions.create(model="coder", messages=MESSAGES, user="argument")
        assert argument.value.param == "top_k"
        with pytest.raises(openai.InternalServerError):
            await api.completions.create(model="coder", prompt="x", user="function")
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(model="nothing", messages=MESSAGES)
        with pytest.raises(openai.NotFoundError, match="/fn/plain"):
            await api.chat.completions.create(model="plain", messages=MESSAGES)
        malformed = await w.http.post("/v1/completions", content=b"{")
        assert malformed.status_code == 400
        assert malformed.json()["error"]["code"] == "malformed_json"


async def test_an_error_in_mid_stream_reaches_the_client(nats: Nats) -> None:
    async def script(run: Run) -> None:
        run.delta("def")
        run.end(FunctionError("ValueError: late"))

    async with world(nats) as w, client(w) as api:
        await model(w, script)
        stream = await api.completions.create(model="coder", prompt="x", stream=True)
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].text == "def"
        with pytest.raises(openai.APIError, match="late"):
            await anext(chunks)
        body = {"model": "coder", "prompt": "x", "stream": True}
        text = (await w.http.post("/v1/completions", json=body)).text
    assert "[DONE]" not in text
    assert text.split("\n\n")[1].startswith('data: {"error":')


async def test_what_no_worker_may_say_in_mid_stream_is_an_error_event(nats: Nats) -> None:
    async def raves(run: Run) -> None:
        run.outbox.push(FrameKind.DELTA, b"no delta")
        run.node.flush(run)
        run.end()

    async with world(nats) as w:
        await model(w, raves)
        answer = await w.http.post("/v1/completions", json={"model": "coder", "prompt": "x", "stream": True})
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    assert '"code":"protocol_error"' in answer.text


async def test_models_and_unknown_fields(nats: Nats, caplog: pytest.LogCaptureFixture) -> None:
    async with world(nats) as w, client(w) as api:
        await model(w)
        await w.deploy(manifest("plain"), entry("i2"))
        assert [found.id async for found in api.models.list()] == ["coder"]
        found = await api.models.retrieve("coder")
        assert (found.owned_by, found.created) == ("sllm", int(CREATED))
        with caplog.at_level("INFO"):
            answer = await api.completions.create(model="coder", prompt="x", extra_body={"zzz": 1, "top_k": 5})
            many = {f"z{number:03}" + "\n" * 10_000: 1 for number in range(50)}
            await api.completions.create(model="coder", prompt="x", extra_body=many)
        assert answer.choices[0].text
    few, some = [record.warnings for record in caplog.records if hasattr(record, "warnings")]
    assert few == ["unknown field 'zzz' is ignored"]
    assert (len(some), some[-1]) == (21, "and 30 more")
    assert max(map(len, some)) < 200


async def test_the_client_retries_what_can_be_retried_only(nats: Nats) -> None:
    async with world(nats) as w, openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="x", max_retries=2) as api:
        calls = 0

        async def script(run: Run) -> None:
            nonlocal calls
            calls += 1
            run.end(FunctionError("ValueError: no"))

        await model(w, script)
        with pytest.raises(openai.InternalServerError):
            await api.completions.create(model="coder", prompt="x", timeout=60)
    assert calls == 1


MANY = 50_000


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [[{}] * MANY]}),
        (CompletionRequest, {"prompt": [[{}]] * MANY}),
        (CompletionRequest, {"prompt": "", "logit_bias": {str(number): "x" for number in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatRequest, {"messages": MESSAGES, "tools": [1] * MANY}),
    ],
)
def test_of_all_that_is_wrong_only_so_much_is_looked_for(kind: Any, wrong: dict[str, Any]) -> None:
    """A kilobyte and 10 µs are taken for each, and nothing else of the gateway runs meanwhile: a body of 32 MiB has
    11 million of them."""
    with pytest.raises(ValidationError) as told:
        kind.model_validate({"model": "coder", **wrong})
    assert told.value.error_count() < 10
    with pytest.raises(InvalidRequest):
        read(kind, json.dumps({"model": "coder", **wrong}).encode())


async def test_what_is_wrong_in_a_large_body_holds_up_nobody(nats: Nats) -> None:
    """900 KB, of a caller who may call: before, 9 s in which this gateway answered nobody, not even a probe."""
    async with world(nats) as w:
        wrong = b'{"model": "coder", "prompt": [' + b",".join([b"{}"] * 300_000) + b"]}"
        asking = asyncio.create_task(w.http.post("/v1/completions", content=wrong, timeout=GIVE_UP_S))
        longest, last = 0.0, time.monotonic()
        while not asking.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert (await asking).status_code == 400
    assert longest < 2

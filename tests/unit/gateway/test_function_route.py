"""``/fn`` from a real HTTP client to a scripted node over a real NATS server."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Literal

import httpx
import pytest

from sllm.sse import Parser
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.ctl import Acquired
from sllm_runtime.protocol.errors import Cancelled, Draining, ErrorBody, FunctionError
from sllm_runtime.protocol.frames import End, FrameKind, Opened
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.timeline import Span, parse_comment
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, entry, hang, manifest, starting, world

SSE = {"accept": "text/event-stream"}


async def count(run: Run) -> None:
    for number in range(run.arguments["n"]):
        run.out({"number": number})
    run.end()


async def echo(run: Run) -> None:
    run.out(run.arguments)
    run.end()


async def fail(run: Run) -> None:
    run.end(FunctionError("ValueError: no"))


async def test_values_of_a_generator_come_as_events(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        response = await w.http.post("/fn/count", json={"n": 3}, headers=SSE)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["sllm-call-id"].startswith("call-")
    assert "queue;dur=" in response.headers["server-timing"]
    *events, end = response.text.split("\n\n")[:-1]
    assert events == [f'id: {n}\ndata: {{"number":{n}}}' for n in range(3)]
    timeline, done = end.split("\n")
    assert [span.name for span in parse_comment(timeline.removeprefix(": "))] == ["queue", "first_token", "tokens"]
    assert done == "data: [DONE]"


async def test_without_sse_a_generators_values_are_an_array_and_a_functions_value_is_bare(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        await w.deploy(manifest("echo", streams=False), entry("i2"), script=echo)
        values = await w.http.post("/fn/count", json={"n": 3})
        value = await w.http.post("/fn/echo/v1", json={"a": [1, None, "ü"]})
        nothing = await w.http.post("/fn/echo")
    assert values.json() == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert value.json() == {"a": [1, None, "ü"]}
    assert nothing.json() == {}
    assert values.headers["content-type"] == "application/json"


async def test_bodies_and_values_of_many_parts_arrive_whole(nats: Nats) -> None:
    text = "0123456789abcdef" * 2**17  # 2 MiB: more than a window each way
    async with world(nats) as w:
        await w.deploy(manifest("echo", streams=False), entry(), script=echo)
        whole = await w.http.post("/fn/echo", json={"text": text})
        stream = await w.http.post("/fn/echo", json={"text": text}, headers=SSE)
    assert whole.json() == {"text": text}
    first, end = stream.text.split("\n\n", 1)
    assert json.loads(first.split("data: ", 1)[1]) == {"text": text}
    assert end.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "field"),
    [
        ("/fn/nothing", b"{}", 404, "function_not_found", None),
        ("/fn/typed/v9", b"{}", 404, "version_not_found", None),
        ("/fn/typed/v\u0661", b"{}", 404, "version_not_found", None),
        ("/fn/typed/v01", b"{}", 404, "version_not_found", None),
        ("/fn/typed/nine", b"{}", 404, "version_not_found", None),
        ("/fn/typed", b"{", 400, "malformed_json", None),
        ("/fn/typed", b"\xff", 400, "malformed_json", None),
        ("/fn/typed", b"[" * 100_000, 400, "malformed_json", None),
        ("/fn/typed", b"[1]", 422, "invalid_argument", None),
        ("/fn/typed", b"", 422, "invalid_argument", "text"),
        ("/fn/typed", b'{"text": 1}', 422, "invalid_argument", "text"),
        ("/fn/typed", b'{"text": "a", "many": [{"x": "b"}]}', 422, "invalid_argument", "many[0].x"),
        ("/fn/typed", b'{"text": "a", "other": 1}', 422, "invalid_argument", "other"),
        ("/fn/typed", b'{"text": ' + b"[" * 300 + b"]" * 300 + b"}", 422, "invalid_argument", None),
        ("/fn/typed", b'{"text": "a", "other": ' + b"[" * 300 + b"]" * 300 + b"}", 422, "invalid_argument", None),
        ("/nowhere", b"", 404, "not_found", None),
    ],
)
async def test_a_wrong_request_is_answered_by_name(
    nats: Nats, path: str, body: bytes, status: int, code: str, field: str | None
) -> None:
    item = {"type": "object", "properties": {"x": {"type": "number"}}}
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "many": {"type": "array", "items": item}},
        "required": ["text"],
        "additionalProperties": False,
    }
    async with world(nats) as w:
        await w.deploy(manifest("typed", input_schema=schema), entry(), script=echo)
        response = await w.http.post(path, content=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error.get("field")) == (status, code, field)
        assert error["retryable"] is False
        assert response.headers["x-should-retry"] == "false"
        if path.startswith("/fn"):
            assert error["call_id"] == response.headers["sllm-call-id"]
        assert not w.node.opened


async def test_another_method_is_refused_with_what_is_allowed(nats: Nats) -> None:
    async with world(nats) as w:
        response = await w.http.get("/fn/x")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in response.json()["error"]["message"]
    assert response.headers["allow"] == "POST"


async def test_a_declared_body_above_the_limit_is_refused_before_it_is_read(nats: Nats) -> None:
    async with world(nats, max_body=1000) as w:
        await w.deploy(manifest("echo"), entry(), script=echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(w.url.rpartition(":")[2]))
        writer.write(b"POST /fn/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), GIVE_UP_S)).startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(nats: Nats) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100_000

    async with world(nats, max_body=1_000_000) as w:
        await w.deploy(manifest("echo"), entry(), script=echo)
        response = await w.http.post("/fn/echo", content=endless())
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert (await w.http.post("/fn/echo", json={})).status_code == 200


@pytest.mark.parametrize("path", ["/fn/echo", "/v1/chat/completions", "/api/v1/functions/echo/rollback"])
async def test_a_body_that_trickles_is_408_at_its_deadline(nats: Nats, path: str) -> None:
    """On a bare socket: what comes too late is answered by a reset, and a stream would forget what it has received."""
    loop = asyncio.get_running_loop()
    async with world(nats, body_timeout=0.3) as w:
        await w.deploy(manifest("echo"), entry(), script=echo)
        with socket.create_connection(("127.0.0.1", int(w.url.rpartition(":")[2]))) as sock:
            sock.setblocking(False)
            await loop.sock_sendall(sock, f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode())

            async def trickle() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        await loop.sock_sendall(sock, b" ")
                        await asyncio.sleep(0.05)

            trickling = asyncio.create_task(trickle())
            answer = b""
            try:
                with contextlib.suppress(ConnectionResetError):  # the connection is closed, one way or the other
                    while piece := await asyncio.wait_for(loop.sock_recv(sock, 2**16), GIVE_UP_S):
                        answer += piece
            finally:
                trickling.cancel()
                await asyncio.wait([trickling])
        assert not w.node.runs
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


async def test_a_function_that_raises_is_a_500_with_type_and_message(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("fail"), entry(), script=fail)
        for headers in ({}, SSE):
            response = await w.http.post("/fn/fail", headers=headers)
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["code"] == "function_error"
            assert response.json()["error"]["message"] == "ValueError: no"


async def test_an_error_in_mid_stream_is_the_last_event(nats: Nats) -> None:
    async def script(run: Run) -> None:
        run.out(1)
        run.end(FunctionError("ValueError: late"))

    async with world(nats) as w:
        await w.deploy(manifest("late"), entry(), script=script)
        response = await w.http.post("/fn/late", headers=SSE)
        first, error, rest = response.text.split("\n\n")
        assert (first, rest) == ("id: 0\ndata: 1", "")
        assert error.startswith("event: error\ndata: ")
        body = json.loads(error.partition("data: ")[2])["error"]
        assert body["code"] == "function_error"
        assert body["call_id"] == response.headers["sllm-call-id"]


async def test_an_error_within_a_value_in_parts_is_the_last_event_too(nats: Nats) -> None:
    async def script(run: Run) -> None:
        run.out(1)
        run.outbox.push(FrameKind.OUTPUT, b'"' + b"x" * (limits.MAX_PART - 1), more=True)
        run.node.flush(run)
        run.end(FunctionError("ValueError: late"))

    async with world(nats) as w:
        await w.deploy(manifest("late"), entry(), script=script)
        response = await w.http.post("/fn/late", headers=SSE)
    events = Parser().feed(response.content)
    assert [(event.event, event.id) for event in events] == [("message", "0"), ("incomplete", "1"), ("error", None)]
    assert json.loads(events[2].data)["error"]["code"] == "function_error"
    assert json.loads(events[2].data)["error"]["call_id"] == response.headers["sllm-call-id"]


async def test_retries_begin_again_only_before_the_first_byte(nats: Nats) -> None:
    async def second(run: Run) -> None:
        if run.head.epoch == 1:
            run.end(FunctionError("ValueError: once"))
        else:
            await count(run)

    async def after_a_value(run: Run) -> None:
        run.out("x")
        await until(lambda: run.outbox.acked == 1)
        run.end(FunctionError("ValueError: always"))

    async with world(nats) as w:
        await w.deploy(manifest("second", retries=1), entry(), script=second)
        await w.deploy(manifest("after", retries=5), entry("i2"), script=after_a_value)
        assert (await w.http.post("/fn/second", json={"n": 1}, headers=SSE)).text.startswith(
            'id: 0\ndata: {"number":0}'
        )
        assert "event: error" in (await w.http.post("/fn/after", headers=SSE)).text
        assert [opened.head.epoch for opened in w.node.opened] == [1, 2, 1]
        first = w.node.opened[0].head.call
        assert [(kind, why) for kind, _, why in await w.told(first)] == [("call.retried", "ValueError: once")]


async def test_what_came_of_a_try_that_is_thrown_away_is_no_first_token(nats: Nats) -> None:
    """Nobody has read the value of the first one."""
    found: list[float | None] = []

    async with world(nats) as w:

        async def second(run: Run) -> None:
            (call,) = w.gateway.calls.open()
            if run.head.epoch == 1:
                run.out("x")
                await until(lambda: call.marks.first is not None)
                run.end(FunctionError("ValueError: once"))
            else:
                found.append(call.marks.first)
                await count(run)

        await w.deploy(manifest("second", retries=1), entry(), script=second)
        assert (await w.http.post("/fn/second", json={"n": 1})).status_code == 200
    assert found == [None]


async def test_a_call_waits_for_the_start_and_sees_its_progress(nats: Nats) -> None:
    spans = (Span("sandbox", 0, 5), Span("weights", 1, 90), Span("setup", 95, 5))
    go = asyncio.Event()

    async def acquire(request: object) -> Acquired:
        w.node.report(starting("count", Progress(stage="weights", done=5, total=10)))
        await go.wait()
        route = await w.controller.route(manifest("count"), entry(spans=spans))
        return Acquired(route=route)

    async with world(nats, headers_wait=0.1) as w:
        w.controller.on_acquire = acquire
        await w.deploy(manifest("count"), script=count)
        async with w.http.stream("POST", "/fn/count", json={"n": 2}, headers=SSE) as response:
            assert response.status_code == 200
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if "event: progress" in text:
                    go.set()
            progress, *values, end = text.split("\n\n")[:-1]
        assert progress.startswith('event: progress\ndata: {"stage":"weights","done":5,"total":10')
        assert values == ['id: 0\ndata: {"number":0}', 'id: 1\ndata: {"number":1}']
        names = [span.name for span in parse_comment(end.split("\n")[0].removeprefix(": "))]
        assert names == ["queue", "sandbox", "weights", "setup", "first_token", "tokens"]


async def test_one_acquire_serves_many_callers(nats: Nats) -> None:
    async def acquire(request: object) -> Acquired:
        await until(lambda: len(w.gateway.calls) == 20)
        return Acquired(route=await w.controller.route(manifest("count"), entry()))

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        await w.deploy(manifest("count"), script=count)
        answers = await asyncio.gather(*[w.http.post("/fn/count", json={"n": n}) for n in range(20)])
        assert [len(answer.json()) for answer in answers] == list(range(20))
        assert len(w.controller.acquires) <= 6  # one, and one for each doubling of the queue
        assert len({(a.function, a.version) for a in w.controller.acquires}) == 1
        assert {a.call for a in w.controller.acquires} <= {each.headers["sllm-call-id"] for each in answers}


async def test_a_start_that_failed_is_told_to_all_waiters(nats: Nats) -> None:
    body = ErrorBody("start_failed", "boom", 503, stage="import", retry_after_s=2.5)

    async def acquire(request: object) -> Acquired:
        await until(lambda: len(w.gateway.calls) == 5)
        return Acquired(error=body)

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        await w.deploy(manifest("count"), script=count)
        answers = await asyncio.gather(*[w.http.post("/fn/count", json={"n": 1}, headers=SSE) for _ in range(5)])
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["stage"] == "import"
        assert answer.headers["retry-after"] == "3"
        assert answer.headers["x-should-retry"] == "false"


async def test_a_full_queue_is_429_with_retry_after(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("hang", max_queue=2), entry(concurrency=1), script=hang)
        async with w.http.stream("POST", "/fn/hang", headers=SSE):
            waiting = [asyncio.create_task(w.http.post("/fn/hang")) for _ in range(2)]
            await until(lambda: w.gateway.calls.dispatcher.waiting("hang") == 2)
            refused = await w.http.post("/fn/hang")
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
        await until(lambda: not len(w.gateway.calls))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.json()["error"]["retryable"] is True
    assert int(refused.headers["retry-after"]) >= 1


async def test_busy_goes_back_to_the_head_and_gone_drops_the_instance(nats: Nats) -> None:
    answers: list[Literal["busy", "accepted"]] = ["busy", "busy", "accepted"]
    async with world(nats) as w:
        w.node.judge = lambda o: Opened(status="gone" if o.head.instance == "dead" else answers.pop(0))
        await w.deploy(manifest("count"), entry("dead", concurrency=99), entry("i2"), script=count)
        assert (await w.http.post("/fn/count", json={"n": 1})).json() == [{"number": 0}]
        assert [opened.head.instance for opened in w.node.opened] == ["dead", "i2", "i2", "i2"]
        await until(lambda: w.controller.acquires)
        assert w.controller.acquires[0].gone == ("dead",)


async def test_an_instance_whose_node_is_not_there_is_dropped_at_once(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a silence: none would end this test."""
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1000.0)
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry("dead", node="n9", concurrency=99), entry("i2"), script=count)
        assert (await w.http.post("/fn/count", json={"n": 1})).status_code == 200
        assert [opened.head.instance for opened in w.node.opened] == ["i2"]


@pytest.mark.parametrize("seen", [False, True])
async def test_what_an_instance_that_ends_has_not_begun_goes_to_another_one(nats: Nats, seen: bool) -> None:
    """Without ``retries``: no function has seen it. One that has said something is believed nothing of the kind."""

    async def leaves(run: Run) -> None:
        if run.head.instance == "i2":
            return await count(run)
        if seen:
            run.out(0)
        run.end(Draining("this instance is stopping"), unseen=True)
        return None

    async with world(nats) as w:
        await w.deploy(manifest("count"), entry("i1"), entry("i2"), script=leaves)
        answers = [await w.http.post("/fn/count", json={"n": 1}) for _ in range(4)]
        assert [each.status_code for each in answers].count(503) == seen
        assert [opened.head.instance for opened in w.node.opened].count("i1") == 1, "it is left alone after that"


async def test_deadlines_before_the_headers_have_their_status(nats: Nats) -> None:
    async def never(run: Run) -> None:
        await run.cancelled.wait()
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("idle", idle_timeout=0.2), entry("i2"), script=never)
        await w.deploy(manifest("full", queue_timeout=0.2), script=never)
        await w.deploy(manifest("stops", idle_timeout=0.2), entry("i3"), script=hang)
        for name, how, status, code in [
            ("idle", SSE, 504, "idle_timeout"),
            ("full", SSE, 503, "queue_timeout"),
            ("stops", {}, 504, "idle_timeout"),  # all of an answer that is not streamed waits here for its end
        ]:
            response = await w.http.post(f"/fn/{name}", headers=how)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            if name == "stops":  # its answer had begun
                continue
            told = w.gateway._recent.here(response.json()["error"]["call_id"])
            assert told is not None
            spans = {span.name: span.ms for span in parse_comment(told.timeline)}
            assert spans.pop("queue" if name == "full" else "first_token") >= 200.0, "what it has waited for"
        for patience in (1.0, 10.0, 40.0):
            await w.deploy(manifest("slow", timeout=patience), entry(), script=never)
            response = await w.http.post("/fn/slow", headers=SSE)
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
            await until(lambda: not len(w.gateway.calls), what="it ended on its node")
            if any(cancel.code == "deadline_exceeded" for cancel in w.node.cancels):
                break  # where the machine stands still its time may be over before the node has it
        both = {"deadline_exceeded", "idle_timeout"}
        await until(lambda: {cancel.code for cancel in w.node.cancels} >= both, what=lambda: str(w.node.cancels))
        await until(lambda: not len(w.gateway.calls), what="every call ended on its node")


async def test_a_deadline_after_the_headers_is_an_event(nats: Nats) -> None:
    for patience in (1.0, 10.0, 40.0):
        async with world(nats) as w:
            await w.deploy(manifest("hang", timeout=patience), entry(), script=hang)
            response = await w.http.post("/fn/hang", headers=SSE)
        if response.status_code == 200:
            break  # where the machine stands still its time may be over before the headers
    assert response.status_code == 200
    assert response.text.startswith('id: 0\ndata: "begun"\n\nevent: error\n')
    assert '"deadline_exceeded"' in response.text
    assert "[DONE]" not in response.text


async def test_a_caller_that_goes_away_cancels_its_work(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("hang"), entry(), script=hang)
        async with w.http.stream("POST", "/fn/hang", headers=SSE) as response:
            await anext(response.aiter_text())
        await until(lambda: w.node.cancels)
        await until(lambda: not len(w.gateway.calls))
        assert w.node.cancels[0].code == "cancelled"


async def drip(run: Run) -> None:
    """Values one by one, each in a message of its own."""
    for number in range(5):
        run.out(number)
        await run.node.bus.flush()
    run.end()


async def test_pieces_are_written_without_an_asgi_message_each(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sllm_gateway.respond.send_now", lambda *_: pytest.fail("uvicorn's request is another one"))
    async with world(nats) as w:
        await w.deploy(manifest("drip"), entry(), script=drip)
        text = (await w.http.post("/fn/drip", headers=SSE)).text
    assert [line for line in text.splitlines() if line.startswith("data: ")] == [
        *(f"data: {number}" for number in range(5)),
        "data: [DONE]",
    ]


async def test_streams_that_are_asked_for_one_behind_the_other_come_whole_and_in_order(nats: Nats) -> None:
    """HTTP/1.1 pipelining: a connection's last request is not the one that is being answered."""
    async with world(nats) as w:
        await w.deploy(manifest("drip"), entry(), script=drip)
        head = "POST /fn/drip HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nContent-Length: 2\r\n"
        reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
        writer.write(f"{head}\r\n{{}}{head}Connection: close\r\n\r\n{{}}".encode())
        text = (await asyncio.wait_for(reader.read(), GIVE_UP_S)).decode()
        writer.close()
        await writer.wait_closed()
    first, second = text.split("HTTP/1.1 200 OK\r\n")[1:]
    for answer in (first, second):
        assert [line for line in answer.splitlines() if line.startswith("data: ")] == [
            *(f"data: {number}" for number in range(5)),
            "data: [DONE]",
        ]
        assert answer.endswith("0\r\n\r\n")


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
async def test_a_caller_that_goes_away_after_a_large_body_is_noticed(nats: Nats, accept: str) -> None:
    """However its bytes were cut: reading may have been paused when the last of them came."""
    async with world(nats) as w:
        await w.deploy(manifest("hang"), entry(), script=hang)
        body = json.dumps({"text": "x" * 1_000_000}).encode()
        head = f"POST /fn/hang HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nContent-Length: {len(body)}\r\n\r\n"
        _reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
        writer.write(head.encode() + body)
        await writer.drain()
        await until(lambda: len(w.gateway.calls))
        writer.close()
        await writer.wait_closed()
        await until(lambda: w.node.cancels)
        await until(lambda: not len(w.gateway.calls))
        assert w.node.cancels[0].code == "cancelled"


async def test_heartbeats_are_comments_without_a_blank_line(nats: Nats) -> None:
    heard = asyncio.Event()

    async def late(run: Run) -> None:
        await heard.wait()
        run.out(1)
        run.end()

    async with world(nats, headers_wait=0.05, heartbeat=0.1) as w:
        await w.deploy(manifest("late"), entry(), script=late)
        text = ""
        async with w.http.stream("POST", "/fn/late", headers=SSE) as response:
            async for piece in response.aiter_text():
                text += piece
                if text.count(": heartbeat\n") >= 2:
                    heard.set()
    assert text.startswith(": heartbeat\n: heartbeat\n")
    assert ": heartbeat\n\n" not in text


async def test_a_client_that_does_not_read_ends_in_slow_consumer_and_others_go_on(nats: Nats) -> None:
    async def flood(run: Run) -> None:
        while not run.cancelled.is_set():
            run.out("x" * 100_000)
            await run.room()
        run.end()

    async with world(nats, slow_consumer=0.5) as w:
        await w.deploy(manifest("flood"), entry(), script=flood)
        await w.deploy(manifest("count"), entry("i2"), script=count)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(w.url.rpartition(":")[2]), limit=1000)
        writer.write(b"POST /fn/flood HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n")
        await until(lambda: w.node.cancels)
        assert w.node.cancels[0].code == "slow_consumer"
        assert (await w.http.post("/fn/count", json={"n": 1})).status_code == 200
        sent = next(iter(w.node.runs.values())).outbox.pushed_bytes
        assert sent < 16 * 2**20, "no more than windows and socket buffers"
        text = b""
        async with asyncio.timeout(GIVE_UP_S):
            while b"slow_consumer" not in text:
                text = text[-100:] + await reader.read(2**16)
        writer.close()
        await writer.wait_closed()
        await until(lambda: not len(w.gateway.calls))


async def test_two_callers_of_one_connection_pool_share_nothing(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count", concurrency=4), entry(concurrency=4), script=count)
        answers = await asyncio.gather(
            *[w.http.post("/fn/count", json={"n": n % 7}, headers=SSE if n % 2 else {}) for n in range(100)]
        )
    for n, answer in enumerate(answers):
        assert answer.text.count('"number"') == n % 7


async def test_a_version_that_is_deleted_ends_its_waiters(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), script=count)
        waiting = asyncio.create_task(w.http.post("/fn/count", json={"n": 1}))
        await until(lambda: w.gateway.calls.dispatcher.waiting("count") == 1)
        await w.controller.unroute("count")
        assert (await waiting).json()["error"]["code"] == "function_not_found"


async def test_http_of_a_stopping_gateway(nats: Nats) -> None:
    async with world(nats, drain=0.1) as w:
        await w.deploy(manifest("hang"), entry(), script=hang)

        async def read() -> str:
            async with httpx.AsyncClient(base_url=w.url, verify=False) as http:
                return (await http.post("/fn/hang", headers=SSE)).text

        reading = asyncio.create_task(read())
        await until(lambda: w.node.runs)
        await w.gateway.drain()
        text = await reading
        assert '"gateway_stopped"' in text, "the function has seen it: nobody may take it for one that never ran"
        assert "[DONE]" not in text
        refused = await w.http.post("/fn/hang")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


async def test_a_call_that_waits_at_a_stopping_gateway_has_never_run(nats: Nats) -> None:
    async with world(nats, drain=0.1) as w:
        await w.deploy(manifest("hang"), script=hang)
        waiting = asyncio.create_task(w.http.post("/fn/hang"))
        await until(lambda: w.gateway.calls.dispatcher.waiting("hang") == 1)
        await w.gateway.drain()
        assert (await waiting).json()["error"]["code"] == "draining"


async def test_what_a_sandbox_calls_its_spans_cannot_end_a_header(nats: Nats) -> None:
    async def split(run: Run) -> None:
        run.out(1)
        end = End(spans=(Span("x\r\nset-cookie: a=b\r\n\r\n<html>", 0.0, 1.0),))
        run.outbox.push(FrameKind.END, codec.pack(end))
        run.node.flush(run)

    async with world(nats) as w:
        await w.deploy(manifest("split", streams=False), entry(), script=split)
        response = await w.http.post("/fn/split")
    assert response.json() == 1
    assert "set-cookie" not in response.headers
    assert "x__set-cookie" in response.headers["server-timing"]


async def test_an_endless_array_of_tiny_values_is_too_large_before_it_fills_the_memory(nats: Nats) -> None:
    async def tiny(run: Run) -> None:
        while not run.cancelled.is_set():
            for _ in range(1000):
                run.outbox.push(FrameKind.OUTPUT, b"1")
            run.node.flush(run)
            await run.room()
            await asyncio.sleep(0)
        run.end()

    async with world(nats, max_output=2**20) as w:
        await w.deploy(manifest("tiny"), entry(), script=tiny)
        response = await w.http.post("/fn/tiny")
        pushed = next(iter(w.node.runs.values())).outbox.next_index
    assert response.json()["error"]["code"] == "output_too_large"
    assert pushed < 100_000, "values of a byte each"


async def test_an_answer_counts_by_its_bytes_without_its_frames(nats: Nats) -> None:
    async def small(run: Run) -> None:
        for number in range(run.arguments["values"]):
            run.outbox.push(FrameKind.OUTPUT, b"12345678")
            if number % 1000 == 0:
                run.node.flush(run)
                await run.room()
        run.end()

    async with world(nats, max_output=2**18) as w:
        await w.deploy(manifest("small"), entry(), script=small)
        assert len((await w.http.post("/fn/small", json={"values": 8000})).json()) == 8000
        error = (await w.http.post("/fn/small", json={"values": 9000})).json()["error"]
    assert (error["code"], "in more than 8192 pieces" in error["message"]) == ("output_too_large", True)


async def test_a_call_that_its_node_cancels_ends_with_an_error_that_its_caller_sees(nats: Nats) -> None:
    seen = asyncio.Event()

    async def stopped(run: Run) -> None:
        run.out("begun")
        run.node.flush(run)
        await seen.wait()
        run.end(Cancelled("instance i1 was stopped: the function is deleted"))

    async with world(nats) as w:
        await w.deploy(manifest("stopped"), entry(), script=stopped)
        text = ""
        async with w.http.stream("POST", "/fn/stopped", headers=SSE) as response:
            async for piece in response.aiter_text():
                text += piece
                if 'data: "begun"' in text:
                    seen.set()
    assert "event: error" in text
    assert "the function is deleted" in text


@pytest.mark.parametrize("path", ["/fn/plain", "/v1/completions"])
async def test_a_compressed_body_is_told_as_that(nats: Nats, path: str) -> None:
    """It is no JSON either, which says nothing to whose client compressed it (``http --compress``, aiohttp's)."""
    async with world(nats) as w:
        await w.deploy(manifest("plain", streams=False), entry(), script=count)
        packed = await w.http.post(path, content=gzip.compress(b'{"to": 1}'), headers={"content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["error"]["code"]) == (400, "invalid_request")
        assert "Content-Encoding" in packed.json()["error"]["message"]


async def test_a_compressed_body_is_told_as_that_to_who_writes_all_of_it_first(nats: Nats) -> None:
    """urllib closes after each request, and reads nothing before."""

    def ask(port: int | None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        headers = {"content-encoding": "gzip", "connection": "close"}
        connection.request("POST", "/fn/plain", gzip.compress(os.urandom(8 << 20), 0), headers)
        return connection.getresponse().status

    async with world(nats) as w:
        await w.deploy(manifest("plain", streams=False), entry(), script=echo)
        assert await asyncio.to_thread(ask, w.http.base_url.port) == 400


async def test_a_charset_is_no_compression(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("plain", streams=False), entry(), script=echo)
        got = await w.http.post("/fn/plain", content=b"{}", headers={"content-encoding": "utf-8"})
        assert got.status_code == 200, got.text

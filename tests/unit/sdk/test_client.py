"""Both clients against a real server: values, errors, retries, broken connections."""

import asyncio
import gc
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sllm import AsyncClient, AsyncFunction, Client, Function, transport
from sllm.answers import Trace
from sllm.connection import RESTING
from sllm.following import FOLLOW_S, Following
from sllm.gateways import Asking, Gateways
from sllm.profiles import Profile
from sllm.remote import Remote
from sllm.retry import NEVER, Retry
from sllm.sse import Event
from sllm_runtime.platform.profile import write_profile
from sllm_runtime.protocol.errors import (
    BY_CODE,
    CallMoved,
    Draining,
    FunctionError,
    FunctionNotFound,
    GatewayStopped,
    InstanceLost,
    InternalError,
    InvalidArgument,
    InvalidRequest,
    QueueFull,
    SllmError,
    StartFailed,
    Unavailable,
    VersionNotFound,
)
from sllm_runtime.protocol.http import API, ProgressView
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.sdk.gateway import CALL, DONE, TIMELINE, TOKEN, Answer, Gateway, error, progress, running, sse

QUICK = Retry(base_s=0.001, rand=lambda: 0.0)
VALUES = (sse("a", id=0), ": heartbeat\n", sse({"b": [1]}, id=1), sse(None, id=2), TIMELINE, DONE)
Streams = Callable[..., list[Any]]
Calls = Callable[..., Any]


def _stream_blocking(name: str, trace: Trace | None = None, **arguments: Any) -> list[Any]:
    with Client(retry=QUICK) as client:
        return list(client.stream(name, arguments, trace=trace))


def _stream_async(name: str, trace: Trace | None = None, **arguments: Any) -> list[Any]:
    async def main() -> list[Any]:
        async with AsyncClient(retry=QUICK) as client:
            return [value async for value in client.stream(name, arguments, trace=trace)]

    return asyncio.run(main())


def _call_blocking(name: str, **arguments: Any) -> Any:
    with Client(retry=QUICK) as client:
        return client.call(name, arguments)


def _call_async(name: str, **arguments: Any) -> Any:
    async def main() -> Any:
        async with AsyncClient(retry=QUICK) as client:
            return await client.call(name, arguments)

    return asyncio.run(main())


@pytest.fixture(params=[_stream_blocking, _stream_async])
def stream(request: pytest.FixtureRequest) -> Streams:
    found: Streams = request.param
    return found


@pytest.fixture(params=[_call_blocking, _call_async])
def call(request: pytest.FixtureRequest) -> Calls:
    found: Calls = request.param
    return found


def test_values_progress_and_timeline(gateway: Gateway, stream: Streams) -> None:
    gateway.will(Answer((progress("sandbox"), progress("weights", 5, 10), *VALUES)))
    seen: list[ProgressView] = []
    trace = Trace(observe=seen.append)
    assert stream("chat", trace, text="x") == ["a", {"b": [1]}, None]
    assert trace.call == CALL
    assert [span.name for span in trace.timeline] == ["queue", "first_token"]
    assert [(view.stage, view.done, view.total) for view in seen] == [("sandbox", 0, 0), ("weights", 5, 10)]
    ((method, path, body, headers),) = gateway.asked
    assert (method, path, body) == ("POST", "/fn/chat", {"text": "x"})
    assert headers["authorization"] == f"Bearer {TOKEN}"
    assert headers["accept"] == "text/event-stream"


def test_a_whole_answer(gateway: Gateway, call: Calls) -> None:
    gateway.will(Answer(json=[1, "zwei", None]))
    assert call("chat") == [1, "zwei", None]
    assert gateway.asked[0][2] == {}


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_one_exception_per_wire_code(gateway: Gateway, code: str) -> None:
    """As a response, and in mid-stream."""
    problem = BY_CODE[code]("it says why", field="text", stage="weights")
    gateway.will(Answer(problem=problem))
    for attempt in (lambda: _call_blocking("chat"), lambda: _stream_blocking("chat")):
        with pytest.raises(BY_CODE[code]) as found:
            attempt()
        assert (found.value.code, found.value.message) == (code, "it says why")
        assert (found.value.field, found.value.stage) == ("text", "weights")
    gateway.will(Answer((sse("a", id=0), error(problem))))
    values: list[Any] = []
    with Client(retry=QUICK) as client, pytest.raises(BY_CODE[code], match="it says why"):  # noqa: PT012
        for value in client.stream("chat", {}):
            values.append(value)
    assert values == ["a"]


def test_what_never_ran_is_sent_again(gateway: Gateway, call: Calls, stream: Streams) -> None:
    full = Answer(problem=QueueFull("full"), retry_after="0")
    gateway.will(full, full, Answer(json="done"))
    assert call("chat") == "done"
    gateway.will(Answer((error(QueueFull("full")),)), full, Answer(VALUES))
    assert stream("chat") == ["a", {"b": [1]}, None]
    assert len(gateway.asked) == 6


@pytest.mark.parametrize(
    "problem", [InstanceLost("x"), GatewayStopped("x"), StartFailed("x"), FunctionError("x"), InternalError("x")]
)
def test_what_may_have_run_is_not(gateway: Gateway, call: Calls, stream: Streams, problem: SllmError) -> None:
    gateway.will(Answer(problem=problem))
    for attempt in (call, stream):
        with pytest.raises(type(problem)):
            attempt("chat")
    assert len(gateway.asked) == 2


def test_nothing_is_sent_again_after_the_first_value(gateway: Gateway, stream: Streams) -> None:
    gateway.will(Answer((sse("a", id=0), error(QueueFull("full")))))
    with pytest.raises(QueueFull):
        stream("chat")
    assert len(gateway.asked) == 1


def test_a_stream_that_breaks_off(gateway: Gateway, stream: Streams) -> None:
    for answer in (Answer((sse("a", id=0),), breaks=True), Answer((sse("a", id=0),)), Answer(breaks=True)):
        gateway.will(answer)
        with pytest.raises(InstanceLost, match=f"stream of call {CALL} broke off"):
            stream("chat")
    assert len(gateway.asked) == 3


# --- read on after the death of a gateway -------------------------------------------------------------
@pytest.fixture
def other(gateway: Gateway, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A second gateway of the same platform, as its profile says."""
    with running() as second:
        write_profile(home, "default", gateway.url, TOKEN, (gateway.url, second.url))
        monkeypatch.delenv("SLLM_URL")
        monkeypatch.delenv("SLLM_TOKEN")
        yield second


MOVED = CallMoved("another gateway has it")


@pytest.mark.parametrize("how", [Answer((sse("a", id=0),), breaks=True), Answer((sse("a", id=0), error(MOVED)))])
def test_a_stream_is_read_on_at_another_gateway(gateway: Gateway, other: Gateway, stream: Streams, how: Answer) -> None:
    """From after the last value that came whole; as often as it takes."""
    gateway.will(how)
    half = 'id: 2\ndata: "ha'
    other.reads = [Answer((sse("b", id=1), half), breaks=True), Answer(problem=Unavailable("no journal just now"))]
    gateway.reads = [Answer(problem=Unavailable("not yet")), Answer((sse("c", id=2), TIMELINE, DONE))]
    trace = Trace()
    assert stream("chat", trace=trace) == ["a", "b", "c"]
    assert (other.read_after, gateway.read_after) == (["0", "1"], ["1", "1"])
    assert (trace.call, len(gateway.asked), len(other.asked)) == (CALL, 1, 0)
    assert trace.timeline


@pytest.mark.parametrize("how", [Answer(breaks=True), Answer(problem=MOVED)])
def test_a_stream_without_a_value_is_read_from_its_beginning(
    gateway: Gateway, other: Gateway, stream: Streams, how: Answer
) -> None:
    gateway.will(how)
    other.reads = [Answer(VALUES)]
    assert stream("chat") == ["a", {"b": [1]}, None]
    assert other.read_after == [None]


def test_a_value_of_which_half_came_comes_whole(gateway: Gateway, other: Gateway, stream: Streams) -> None:
    """Its gateway says that it is not whole, by its number."""
    half = 'id: 1\ndata: "b\nevent: incomplete\n\n'
    gateway.will(Answer((sse("a", id=0), half, error(MOVED))))
    other.reads = [Answer((sse("b", id=1), DONE))]
    assert stream("chat") == ["a", "b"]
    assert other.read_after == ["0"]


def test_a_stream_that_nobody_has_says_how_it_broke_off(gateway: Gateway, other: Gateway, stream: Streams) -> None:
    gateway.will(Answer((sse("a", id=0),), breaks=True))
    with pytest.raises(InstanceLost, match=f"stream of call {CALL} broke off"):
        stream("chat")
    assert other.read_after == ["0"]


def test_an_error_of_the_call_itself_ends_it_wherever_it_is_read(
    gateway: Gateway, other: Gateway, stream: Streams
) -> None:
    gateway.will(Answer((sse("a", id=0),), breaks=True))
    other.reads = [Answer((sse("b", id=1), error(FunctionError("its own"))))]
    with pytest.raises(FunctionError, match="its own"):
        stream("chat")
    gateway.will(Answer((sse("a", id=0), error(InstanceLost("it died")))))
    with pytest.raises(InstanceLost, match="it died"):
        stream("chat")
    assert len(other.read_after) == 1


def test_a_reader_that_is_told_to_ask_again_asks_again(gateway: Gateway, other: Gateway, stream: Streams) -> None:
    """Once it has sent its headers a gateway says so by an event: it is no end of the call, which goes on."""
    gateway.will(Answer((sse("a", id=0),), breaks=True), Answer())
    other.reads = [Answer((": heartbeat\n", error(Unavailable("no journal just now"))))]
    gateway.reads = [Answer((sse("b", id=1), DONE))]
    assert stream("chat") == ["a", "b"]
    assert (other.read_after, gateway.read_after) == (["0"], ["0"])
    assert [path for _, path, _, _ in (*gateway.asked, *other.asked)] == ["/fn/chat"]  # nor is it cancelled


def test_a_reader_that_is_told_to_ask_again_makes_no_second_call(
    gateway: Gateway, other: Gateway, stream: Streams
) -> None:
    gateway.will(Answer(breaks=True))
    other.will(Answer(VALUES))
    other.reads = [Answer((": heartbeat\n", error(Unavailable("no journal just now"))))]
    gateway.reads = [Answer(VALUES)]
    assert stream("chat") == ["a", {"b": [1]}, None]
    assert [path for _, path, _, _ in (*gateway.asked, *other.asked)] == ["/fn/chat"]


def test_a_gateway_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    gateways, trace, lost = Gateways(("http://a", "http://b")), Trace(call=CALL, broken=True), InstanceLost("gone")
    following, now, asked = Following(gateways), 0.0, []
    with pytest.raises(InstanceLost, match="gone"):  # noqa: PT012 - it is raised after so many
        for error_ in (lost, *[Unavailable("nobody there")] * 1000):
            trace.gateway = gateways.urls[0]
            now += following.broke(error_, trace, now) + 0.01
            asked.append(gateways.urls[0] + following.path)
    assert FOLLOW_S < now < FOLLOW_S + 5
    assert asked[:3] == [f"http://{name}/v1/calls/{CALL}/events" for name in ("b", "a", "b")]


def _follow_blocking() -> list[Any]:
    with Client() as client, closing(client.follow("/api/v1/events", {"kind": "call"})) as events:
        return [json.loads(event.data) for event in events if event.comment is None and not event.done]


def _follow_async() -> list[Any]:
    async def main() -> list[Any]:
        async with AsyncClient() as client, aclosing(client.follow("/api/v1/events", {"kind": "call"})) as events:
            return [json.loads(event.data) async for event in events if event.comment is None and not event.done]

    return asyncio.run(main())


@pytest.mark.parametrize("follow", [_follow_blocking, _follow_async])
def test_what_has_no_end_is_read_on_at_another_gateway(
    gateway: Gateway, other: Gateway, follow: Callable[[], list[Any]]
) -> None:
    """From behind the last event that came, with the same question."""
    gateway.will(
        Answer((sse("a", id=5, event="event"),), breaks=True),
        Answer((sse("c", id=9, event="event"), DONE)),
    )
    other.will(Answer((sse("b", id=7, event="event"), ": heartbeat\n"), breaks=True))
    assert follow() == ["a", "b", "c"]
    assert [headers.get("last-event-id") for _, _, _, headers in (*gateway.asked, *other.asked)] == [None, "7", "5"]
    assert [*gateway.queries, *other.queries] == [{"kind": "call"}] * 3


@pytest.mark.parametrize("follow", [_follow_blocking, _follow_async])
def test_what_has_no_end_is_read_on_where_nothing_came_yet(
    gateway: Gateway, other: Gateway, follow: Callable[[], list[Any]]
) -> None:
    """From where the stream stood: what happened meanwhile would else be a part of what was there before."""
    gateway.will(Answer(("id: 12\n\n",), breaks=True))
    other.will(Answer((sse("a", id=13, event="event"), DONE)))
    assert follow() == ["a"]
    assert other.asked[0][3]["last-event-id"] == "12"


@pytest.mark.parametrize("follow", [_follow_blocking, _follow_async])
def test_what_has_no_numbers_is_not_read_on(gateway: Gateway, other: Gateway, follow: Callable[[], list[Any]]) -> None:
    """Of a gateway of before: all of it would come again."""
    gateway.will(Answer((sse("a", event="event"),), breaks=True))
    with pytest.raises(InstanceLost, match=rf"the stream broke off before its end \({gateway.url}"):
        follow()
    assert not other.asked


@pytest.mark.parametrize("follow", [_follow_blocking, _follow_async])
def test_what_only_reads_is_asked_of_the_next_gateway_where_one_says_nothing(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch, follow: Callable[[], list[Any]]
) -> None:
    """As what is read in one piece."""
    monkeypatch.setattr(transport, "SILENCE_S", 0.5)
    gateway.will(Answer(silent=True))
    other.will(Answer((sse("a", id=1, event="event"), DONE)))
    assert follow() == ["a"]


@pytest.mark.parametrize("how", [Answer(silent=True), Answer(breaks=True)])
@pytest.mark.parametrize("streams", [False, True])
def test_who_breaks_a_call_off_is_not_asked_by_later_ones(
    gateway: Gateway, other: Gateway, how: Answer, streams: bool
) -> None:
    """It may be stopped, or hang, for hours; the call that it had may have run, and is sent to nobody again."""
    gateway.will(how)
    other.will(Answer((sse("a", id=0), DONE)) if streams else Answer(json=["a"]))

    def ask(client: Client) -> list[Any]:
        return list(client.stream("chat", {})) if streams else client.call("chat", {})

    with Client(timeout=0.5) as client:
        with pytest.raises(InstanceLost):
            ask(client)
        assert ask(client) == ["a"]
    assert len(other.asked) == 1


def test_what_is_read_in_one_piece_is_asked_of_the_next_gateway_once(gateway: Gateway, other: Gateway) -> None:
    gateway.will(Answer(silent=True))
    other.will(Answer(json={"a": 1}))
    with Client(timeout=0.5) as client:
        assert client.request("GET", f"{API}/status") == {"a": 1}
    assert (len(gateway.asked), len(other.asked)) == (1, 1)


def test_each_gateway_is_asked_before_a_stream_is_given_up() -> None:
    """Though one of them takes the connection and says nothing for longer than is waited in all."""
    following, trace = Following(Gateways(("http://a", "http://b")), "/logs"), Trace(broken=True)
    following.broke(InstanceLost("gone"), trace, 0.0)
    assert following.broke(Unavailable("it hangs"), trace, 2 * FOLLOW_S) == 0.0
    with pytest.raises(InstanceLost, match="gone"):
        following.broke(Unavailable("nobody there"), trace, 2 * FOLLOW_S)


def test_a_heartbeat_says_that_what_has_no_end_goes_on() -> None:
    """A second break, hours after the first, is a first one again."""
    following, trace = Following(Gateways(("http://a",)), "/logs"), Trace(broken=True)
    following.broke(InstanceLost("gone"), trace, 0.0)
    following.seen(Event(comment="heartbeat"))
    assert following.broke(InstanceLost("gone"), trace, 10 * FOLLOW_S) == 0.0
    following.broke(Unavailable("nobody there"), trace, 10.5 * FOLLOW_S)
    with pytest.raises(InstanceLost, match="gone"):
        following.broke(Unavailable("nobody there"), trace, 12 * FOLLOW_S)


# --- several gateways -----------------------------------------------------------------------------------
@pytest.fixture
def nobody() -> Iterator[str]:
    """Where nothing takes a connection, nor begins to meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the gateways that the profile names."""

    def write(*urls: str) -> None:
        write_profile(home, "default", urls[0], TOKEN, urls)
        monkeypatch.delenv("SLLM_URL", raising=False)
        monkeypatch.delenv("SLLM_TOKEN", raising=False)

    return write


def test_one_that_takes_no_connection_is_passed_over(
    gateway: Gateway, nobody: str, profile: Callable[..., None], call: Calls, stream: Streams
) -> None:
    """Also for what is never sent again where it may have been heard, and with no second try."""
    profile(nobody, gateway.url)
    gateway.will(Answer(json=1))
    assert call("chat") == 1
    gateway.will(Answer(VALUES))
    assert stream("chat") == ["a", {"b": [1]}, None]
    gateway.will(Answer((progress("sandbox"), sse({"x": 1}, event="done"), DONE)))
    with Client(retry=Retry(attempts=1)) as client:
        assert client.operation("/api/v1/nodes", {}) == '{"x": 1}'
        assert client.url == gateway.url
        with pytest.raises(Unavailable, match=f"no gateway answers at {nobody}/metrics "):
            client.text(f"{nobody}/metrics", within_s=1.0)  # that of a certain one
        assert client.url == gateway.url


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_one_bound_is_for_all_gateways(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that takes no connection leaves the next ones their share of it."""
    now, waited = 100.0, list[float]()

    def lost(request: httpx.Request) -> httpx.Response:
        nonlocal now
        waited.append(request.extensions["timeout"]["connect"])
        now += waited[-1]
        raise httpx.ConnectTimeout("as without a VPN", request=request)

    monkeypatch.setattr("sllm.client.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("sllm.async_client.time", SimpleNamespace(monotonic=lambda: now))
    client = kind(profile=Profile("http://a:1", others=("http://b:1", "http://c:1")))
    pool = (httpx.Client if kind is Client else httpx.AsyncClient)(transport=httpx.MockTransport(lost))
    client._made = {None: replace(client._made[None], pool=pool)}

    async def asked() -> None:
        await client.request("POST", f"/v1/calls/{CALL}/cancel", within_s=1.5)

    with pytest.raises(Unavailable, match="no gateway answers at http://a:1 or http://b:1 or http://c:1 "):
        await asked()
    assert waited == pytest.approx([0.5, 0.5, 0.5])


def test_no_gateway_is_asked_once_the_time_is_over() -> None:
    asking = Asking(Gateways(("http://a:1", "http://b:1", "http://c:1")), "/x", 1.0)
    asking.failed(httpx.ConnectError("no route"), None, 0.6)
    assert asking.bounds == {"timeout": httpx.Timeout(0.4, connect=0.2)}
    with pytest.raises(Unavailable, match=r"at http://a:1 or http://b:1 \("):
        asking.failed(httpx.ConnectError("no route"), None, 0.5)


def test_what_is_sent_again_goes_to_the_next(gateway: Gateway, other: Gateway, call: Calls, stream: Streams) -> None:
    """One that stops takes no call any more, and the queue of another may have room."""
    for mine, attempt, value in ((Answer(json=1), call, 1), (Answer(VALUES), stream, ["a", {"b": [1]}, None])):
        gateway.will(Answer(problem=Draining("it stops")))
        other.will(mine)
        assert attempt("chat") == value
    assert (len(gateway.asked), len(other.asked)) == (2, 2)


def test_what_was_heard_goes_to_no_other(
    rude: tuple[str, list[bytes]], gateway: Gateway, profile: Callable[..., None], call: Calls, stream: Streams
) -> None:
    url, heard = rude
    profile(url, gateway.url)
    for attempt in (call, stream):
        with pytest.raises(InstanceLost, match="broke off before an answer came"):
            attempt("chat")
    assert (len(heard), gateway.asked) == (2, [])


def test_all_that_were_asked_are_named(nobody: str, profile: Callable[..., None], call: Calls) -> None:
    profile(nobody, nobody.replace("127.0.0.1", "localhost"))
    with pytest.raises(Unavailable, match=f"at {nobody} or http://localhost:.*`sllm up` starts one here"):
        call("chat")


@pytest.fixture
def rude() -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads a request and hangs up."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    heard.append(connection.recv(65536))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(GIVE_UP_S)


def test_a_request_that_was_heard_is_not_sent_again(
    rude: tuple[str, list[bytes]], call: Calls, stream: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, heard = rude
    monkeypatch.setenv("SLLM_URL", url)
    for attempt in (call, stream):
        with pytest.raises(InstanceLost, match="broke off before an answer came"):
            attempt("chat")
    assert len(heard) == 2


def test_nobody_there(call: Calls, stream: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("SLLM_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    for attempt in (call, stream):
        with pytest.raises(Unavailable, match=r"no gateway answers at .*; `sllm up` starts one here"):
            attempt("chat")


def test_somebody_else_is_there(gateway: Gateway, call: Calls) -> None:
    gateway.will(Answer(raw=b"<html>hello"))
    with pytest.raises(SllmError, match="the answer is no JSON"):
        call("chat")


def test_who_sends_elsewhere_has_done_nothing(gateway: Gateway, call: Calls, stream: Streams) -> None:
    gateway.will(Answer(elsewhere="https://login/?next=x"))
    with Client(retry=QUICK) as client:
        for attempt in (
            lambda: call("chat"),
            lambda: stream("chat"),
            lambda: client.request("DELETE", f"{API}/secrets/token"),
            lambda: client.request("HEAD", f"{API}/status"),
            lambda: client.text("/metrics"),
        ):
            with pytest.raises(SllmError, match=r"HTTP 308 to 'https://login/\?next=x' .*is the URL right") as caught:
                attempt()
            assert (caught.value.code, caught.value.retryable) == ("http_error", False)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (413, r"takes no body of this size \(nginx: client_max_body_size\)"),
        (502, "had no answer of one; it may have been done"),
        (504, "had no answer of one in time; .* a stream is never silent"),
    ],
)
def test_what_stands_in_front_of_gateways_is_no_wrong_url(
    status: int, told: str, gateway: Gateway, call: Calls, stream: Streams
) -> None:
    gateway.will(Answer(front=status))
    for attempt in (call, stream):
        with pytest.raises(SllmError, match=f"HTTP {status}: .* {told}") as caught:
            attempt("chat")
        assert (caught.value.code, caught.value.retryable) == ("http_error", status != 413)
        assert not [word for word in ("<", "\n", "URL") if word in caught.value.message]
    assert len(gateway.asked) == 2  # a call may have run


def test_leaving_early_cancels_the_call(gateway: Gateway) -> None:
    gateway.will(Answer((sse("a", id=0),), hangs=True))
    with Client() as client, closing(client.stream("chat", {})) as values:
        assert next(values) == "a"
    assert gateway.left.wait(GIVE_UP_S)


async def test_leaving_early_cancels_the_call_in_asyncio(gateway: Gateway) -> None:
    gateway.will(Answer((sse("a", id=0),), hangs=True))
    async with AsyncClient() as client, aclosing(client.stream("chat", {})) as values:
        assert await anext(values) == "a"
    assert await asyncio.to_thread(gateway.left.wait, GIVE_UP_S)


async def test_a_cancelled_task_cancels_its_call(gateway: Gateway) -> None:
    gateway.will(Answer((sse("a", id=0),), hangs=True))

    async def consume() -> None:
        async with AsyncClient() as client:
            async for _ in client.stream("chat", {}):
                pass

    task = asyncio.create_task(consume())
    assert await asyncio.to_thread(gateway.reached.wait, GIVE_UP_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(gateway.left.wait, GIVE_UP_S)


CANCELLED = Answer(json={"id": CALL, "state": "CANCELLED"})


@pytest.fixture
def waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time decides whether who leaves hears what became of the call."""
    monkeypatch.setattr("sllm.client.CANCEL_S", GIVE_UP_S)
    monkeypatch.setattr("sllm.async_client.CANCEL_S", GIVE_UP_S)


@pytest.mark.usefixtures("waits_for_answers")
@pytest.mark.parametrize(("answer", "is_cancelled"), [(CANCELLED, True), (Answer(problem=Unavailable("no")), False)])
def test_leaving_what_is_read_on_asks_for_the_end_of_its_call(
    gateway: Gateway, other: Gateway, answer: Answer, is_cancelled: bool
) -> None:
    """Its second gateway takes who leaves for a reader, of whom it has any number."""
    gateway.will(Answer((sse("a", id=0),), breaks=True))
    other.reads = [Answer((sse("b", id=1),), hangs=True)]
    other.will(answer)
    trace = Trace()
    with Client() as client, closing(client.stream("chat", {}, trace=trace)) as values:
        assert [next(values), next(values)] == ["a", "b"]
    assert [asked[:2] for asked in other.asked] == [("POST", f"/v1/calls/{CALL}/cancel")]
    assert trace.cancelled is is_cancelled


@pytest.mark.usefixtures("waits_for_answers")
@pytest.mark.parametrize("how", ["left", "cancelled"])
async def test_leaving_what_is_read_on_in_asyncio(gateway: Gateway, other: Gateway, how: str) -> None:
    gateway.will(Answer((sse("a", id=0),), breaks=True))
    other.reads = [Answer((sse("b", id=1),), hangs=True)]
    other.will(CANCELLED)

    async def consume() -> None:
        async with AsyncClient() as client, aclosing(client.stream("chat", {})) as values:
            assert [await anext(values), await anext(values)] == ["a", "b"]
            if how == "cancelled":
                await anext(values)

    task = asyncio.create_task(consume())
    if how == "cancelled":
        assert await asyncio.to_thread(other.reached.wait, GIVE_UP_S)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() is (how == "cancelled")
    assert [asked[:2] for asked in other.asked] == [("POST", f"/v1/calls/{CALL}/cancel")]


@pytest.mark.parametrize("path", ["call", "stream"])
def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, never answers
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url, timeout=0.2) as client, pytest.raises(InstanceLost, match="ReadTimeout"):
            list(client.stream("chat", {})) if path == "stream" else client.call("chat", {})


@dataclass
class Point:
    x: int
    day: date


def test_arguments_become_json(gateway: Gateway) -> None:
    gateway.will(Answer(json=1))
    _call_blocking("chat", point=Point(1, date(2026, 1, 2)), words=("é", "b"), nothing=None)
    assert gateway.asked[0][2] == {"point": {"x": 1, "day": "2026-01-02"}, "words": ["é", "b"], "nothing": None}
    with pytest.raises(InvalidArgument, match=r"lock: .*arguments travel as JSON") as found:
        _call_blocking("chat", lock=threading.Lock())
    assert found.value.field == "lock"
    with pytest.raises(InvalidArgument, match="is no argument's name: it is no UTF-8"):
        _call_blocking("chat", **{b"t\xe9xt".decode("utf-8", "surrogateescape"): 1})


def test_functions_by_name(gateway: Gateway) -> None:
    gateway.will(Answer(json="whole"))
    function = Function.lookup("chat")
    assert function.view.manifest is not None
    assert function.remote(text="x", self=1, name=2) == "whole"
    assert gateway.asked[-1][:3] == ("POST", "/fn/chat", {"text": "x", "self": 1, "name": 2})
    gateway.will(Answer(VALUES))
    assert list(Function.lookup("chat", version=1).stream(text="x")) == ["a", {"b": [1]}, None]
    assert gateway.asked[-1][1] == "/fn/chat/v1"
    with pytest.raises(VersionNotFound, match="chat has no version 7; there: 1"):
        Function.lookup("chat", version=7)


async def test_functions_by_name_in_asyncio(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.will(Answer(VALUES))
    function = await AsyncFunction.lookup("chat")
    assert [value async for value in function.stream(text="x")] == ["a", {"b": [1]}, None]
    gateway.will(Answer(json=2))
    assert await Remote("chat").aio.remote() == 2
    url = gateway.url
    with Client(url, TOKEN) as client:
        monkeypatch.delenv("SLLM_URL")
        assert await Remote("chat", client=client).aio.remote() == 2  # the platform of the client beside it


async def test_the_twin_of_a_client_knows_its_gateways(
    gateway: Gateway, nobody: str, profile: Callable[..., None]
) -> None:
    profile(nobody, gateway.url)
    gateway.will(Answer(json=1))
    with Client() as client:
        assert await Remote("chat", client=client).aio.remote() == 1


def test_what_only_reads_is_sent_again(gateway: Gateway) -> None:
    gateway.will(Answer(problem=InstanceLost("x")), Answer(json={"nodes": []}))
    with Client(retry=QUICK) as client:
        assert client.request("GET", "/api/v1/nodes") == {"nodes": []}
    gateway.will(Answer(problem=FunctionNotFound("x")))
    with Client(retry=QUICK) as client, pytest.raises(FunctionNotFound):
        client.request("GET", "/api/v1/nodes")
    assert len(gateway.asked) == 3


def test_no_proxy_sees_what_is_for_this_machine(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    gateway.will(Answer(json=1))
    assert _call_blocking("chat") == 1


class Proxy(BaseHTTPRequestHandler):
    """Answers 1 in the place of whoever is asked."""

    def do_POST(self) -> None:
        assert self.path.startswith("http://127.1:9/")
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"1")

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.mark.parametrize("name", ["ALL_PROXY", "HTTP_PROXY"])
def test_the_proxy_of_the_environment_is_asked_for_another_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.timeout = GIVE_UP_S
        thread = threading.Thread(target=proxy.handle_request, daemon=True)
        thread.start()
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
        with Client("http://127.1:9", "token", retry=QUICK) as client:  # a name of another machine, as far as we know
            assert client.call("chat", {}) == 1
        thread.join()
        monkeypatch.setenv("NO_PROXY", "*")
        with Client("http://127.1:9", "token", retry=QUICK) as client, pytest.raises(Unavailable):
            client.call("chat", {})


@pytest.mark.parametrize("past", ["[::1]", "localhost,[fd00::1]:8600", "10.0.0.0/8,fd00::/8", "fe80::1%eth0"])
async def test_no_proxy_may_name_addresses_of_ipv6(
    past: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In brackets, and networks of them, as clusters of both kinds have it: httpx fails at these."""
    monkeypatch.setenv("NO_PROXY", f"{past},127.1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    url = gateway.url.replace("127.0.0.1", "127.1")  # a name of another machine, as far as we know
    gateway.will(Answer(json=1))
    with Client(url, TOKEN, retry=QUICK) as client:
        assert client.call("chat", {}) == 1
    gateway.will(Answer(json=2))
    async with AsyncClient(url, TOKEN, retry=QUICK) as twin:
        assert await twin.call("chat", {}) == 2


@pytest.mark.parametrize("past", ["fd46::1", "[fd46::1]", "[fd46::1]:8600"])
def test_what_no_proxy_names_in_ipv6_is_asked_directly(past: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", past)
    with Client("http://[fd46::1]:8600", TOKEN) as client:
        chosen = client._http._transport_for_url
        assert chosen(httpx.URL("http://[fd46::1]:8600/livez")) is client._http._transport
        assert chosen(httpx.URL("http://[fd46::2]:8600/livez")) is not client._http._transport


@pytest.mark.parametrize("address", ["socks5://127.0.0.1:9", "ftp://127.0.0.1:9", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_no_bug_of_ours(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", address)
    with pytest.raises(InvalidRequest, match="the proxy that the environment names"):
        Client("http://127.1:9", "token")


def test_connections_notice_a_dead_peer(gateway: Gateway) -> None:
    gateway.will(Answer((sse("a", id=0),), hangs=True))
    with Client() as client, closing(client.stream("chat", {})) as values:
        next(values)
        pool: Any = client._http._transport
        (connection,) = pool._pool.connections
        raw = connection._connection._network_stream.get_extra_info("socket")
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert gateway.left.wait(GIVE_UP_S)


@pytest.mark.parametrize("variable", ["ALL_PROXY", "HTTP_PROXY", "NO_PROXY"])
async def test_so_do_those_to_a_proxy_and_past_it(
    variable: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever forgets a connection that says nothing is on these ways as well, and an answer in one piece is waited
    for for a day."""
    url = gateway.url.replace("127.0.0.1", "127.1")  # a name of another machine, as far as we know
    monkeypatch.setenv(variable, "127.1" if variable == "NO_PROXY" else gateway.url)
    kept: list[int] = []

    def look(response: httpx.Response) -> None:
        raw = response.extensions["network_stream"].get_extra_info("socket")
        kept.append(raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    async def look_async(response: httpx.Response) -> None:
        look(response)

    with Client(url, TOKEN) as client:
        gateway.will(Answer(json=1))
        client._http.event_hooks["response"].append(look)
        with suppress(SllmError):  # as a proxy it knows no such path
            client.request("GET", "/api/v1/nodes")
    async with AsyncClient(url, TOKEN) as twin:
        gateway.will(Answer(json=1))
        twin._http.event_hooks["response"].append(look_async)
        with suppress(SllmError):
            await twin.request("GET", "/api/v1/nodes")
    assert kept == [1, 1]


@pytest.mark.parametrize("how", [Answer(silent=True), Answer(breaks=True)])
def test_an_operation_that_was_heard_and_not_answered_is_asked_of_the_next(
    gateway: Gateway, other: Gateway, how: Answer
) -> None:
    gateway.will(how)
    other.will(Answer((sse({"ok": 1}, event="done"), DONE)))
    with Client(timeout=0.5) as client:
        client.operation(f"{API}/models", {"uri": "x"}, again_s=2.0)
    assert (len(gateway.asked), len(other.asked)) == (1, 1)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_operation_whose_gateway_dies_behind_a_proxy_is_sent_again(gateway: Gateway, status: int) -> None:
    """The proxy answers, since it is there; its next gateway is asked by the same URL."""
    gateway.will(Answer(front=status), Answer(front=status), Answer((sse({"ok": 1}, event="done"), DONE)))
    with Client() as client:
        client.operation(f"{API}/models", {"uri": "x"}, again_s=GIVE_UP_S)
        gateway.will(Answer(front=status))
        with pytest.raises(SllmError, match=f"HTTP {status}"):
            client.operation(f"{API}/models", {"uri": "x"})
    assert len(gateway.asked) == 4


def test_a_silence_longer_than_what_is_waited_for_has_an_end(gateway: Gateway, other: Gateway) -> None:
    """As SILENCE_S (60 s) and CONTROLLER_WAIT_S (15 s) are: each try counts as lost anew."""
    gateway.will(Answer(silent=True))
    other.will(Answer((sse({"ok": 1}, event="done"), DONE)))
    with Client(timeout=0.4) as client:
        client.operation(f"{API}/models", {"uri": "x"}, again_s=0.1)
    assert (len(gateway.asked), len(other.asked)) == (1, 1)


def test_one_gateway_that_says_nothing_is_given_up(gateway: Gateway) -> None:
    gateway.will(*[Answer(silent=True)] * 3, Answer((sse({"ok": 1}, event="done"), DONE)))
    with Client(timeout=0.4) as client, pytest.raises(InstanceLost):
        client.operation(f"{API}/models", {"uri": "x"}, again_s=0.1)
    assert len(gateway.asked) == 2


def test_who_was_lost_first_is_asked_again_once_the_next_says_nothing(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways; the first is started anew, the second hangs."""
    monkeypatch.setattr(transport, "SILENCE_S", 0.5)
    gateway.will(Answer((sse("a", id=1, event="event"),), breaks=True), Answer((sse("b", id=2, event="event"), DONE)))
    other.will(Answer(silent=True))
    with Client(timeout=0.5) as client:
        assert [event.data for event in client.follow("/api/v1/events", {})][:2] == ['"a"', '"b"']
    assert len(other.asked) == 1


@contextmanager
def echoing() -> Iterator[tuple[str, list[int]]]:
    """The URL of a server that answers what it is sent, and the client's port of each connection by which it was."""
    came: list[int] = []

    class Counted(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            came.append(self.client_address[1])
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Counted) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12: this one has threads
def test_a_client_that_was_made_before_a_fork_reads_no_answers_of_its_parent() -> None:
    """As under gunicorn with --preload, in multiprocessing and Celery: on one connection each reads what the other one
    has asked for."""
    with echoing() as (url, came), Client(url, TOKEN) as client:
        assert client.call("echo", {"who": "parent"}) == {"who": "parent"}
        child = os.fork()
        if child == 0:
            said = None
            try:
                said = client.call("echo", {"who": "child"})
            finally:  # also where it fails: this process has no thread that serves, and would wait for its end
                os._exit(0 if said == {"who": "child"} else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert client.call("echo", {"who": "again"}) == {"who": "again"}
    parents, childs, again = came
    assert parents == again, "it keeps its own connection"
    assert childs != parents


def test_loops_that_share_an_asyncio_client_at_once_have_connections_of_their_own() -> None:
    """As of a client of a whole module where each thread has a loop (``async_to_sync``): each keeps its own, whoever
    asked last."""
    loops = [asyncio.new_event_loop() for _ in range(2)]
    threads = [threading.Thread(target=loop.run_forever) for loop in loops]
    for thread in threads:
        thread.start()
    with echoing() as (url, came):
        client = AsyncClient(url, TOKEN)
        try:
            for turn in range(3):
                for loop in loops:
                    asked = client.call("echo", {"turn": turn})
                    assert asyncio.run_coroutine_threadsafe(asked, loop).result(GIVE_UP_S) == {"turn": turn}
        finally:
            for loop, thread in zip(loops, threads, strict=True):
                asyncio.run_coroutine_threadsafe(client.close(), loop).result(GIVE_UP_S)
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()
    assert came == came[:2] * 3
    assert len({*came}) == 2
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(client.call("echo", {}))


def test_loops_that_rest_between_their_calls_keep_their_connections() -> None:
    loops = [asyncio.new_event_loop() for _ in range(2)]
    with echoing() as (url, came):
        client = AsyncClient(url, TOKEN)
        for turn in range(3):
            for loop in loops:
                assert loop.run_until_complete(client.call("echo", {"turn": turn})) == {"turn": turn}
        for loop in loops:
            loop.run_until_complete(client.close())
            loop.close()
    assert came == came[:2] * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nobody can close what a loop has left
def test_of_loops_that_run_no_more_few_keep_their_connections() -> None:
    """Nobody closes them, and nobody says that they will not run again."""
    loops = [asyncio.new_event_loop() for _ in range(3 * RESTING)]
    with echoing() as (url, came):
        client = AsyncClient(url, TOKEN)
        for turn, loop in enumerate([*loops, loops[0]]):
            assert loop.run_until_complete(client.call("echo", {"turn": turn})) == {"turn": turn}
            assert len(client._made) <= RESTING + 1
        for loop in loops:
            loop.run_until_complete(client.close())
            loop.close()
    assert len({*came}) == len(came), "the first has gone by then"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nobody can close what a loop has left
def test_an_asyncio_client_serves_one_loop_after_the_other(gateway: Gateway) -> None:
    """As where each request of a web application, or each task of a queue, is an ``asyncio.run``."""
    gateway.will(Answer(json=1))
    client = AsyncClient()
    assert [asyncio.run(client.call("chat", {})) for _ in range(3)] == [1, 1, 1]
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(client.call("chat", {}))
    gc.collect()


async def test_streams_do_not_wait_for_each_other(gateway: Gateway) -> None:
    """However many there are: one that waits for another's end would count as a gateway that says nothing."""
    many = 120
    gateway.will(Answer((sse("a", id=0),), hangs=True))
    async with AsyncExitStack() as open_:
        client = await open_.enter_async_context(AsyncClient(timeout=2.0, retry=NEVER))
        streams = [client.stream("chat", {}) for _ in range(many)]
        for stream in streams:
            await open_.enter_async_context(aclosing(stream))
        assert await asyncio.gather(*(anext(stream) for stream in streams)) == ["a"] * many


async def test_the_rest_of_a_batch_waits_at_its_client(gateway: Gateway) -> None:
    """A function's queue has an end, and who awaits a thousand answers at once has not asked for an error."""
    gateway.will(Answer(silent=True))
    async with AsyncClient() as client:
        calls = [asyncio.create_task(client.call("chat", {})) for _ in range(120)]
        await until(lambda: len(gateway.asked) >= 100)
        await asyncio.sleep(0.2)  # nothing more comes
        assert len(gateway.asked) == 100
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


async def test_many_reads_at_once_take_no_more_connections_than_calls(gateway: Gateway) -> None:
    """As of a batch of kept calls: 2,000 of them were done over 100 connections, not refused for want of files."""
    gateway.will(Answer(silent=True))
    async with AsyncClient() as client:
        reads = [asyncio.create_task(client.request("GET", f"/v1/calls/{CALL}")) for _ in range(120)]
        await until(lambda: len(gateway.asked) >= 100)
        await asyncio.sleep(0.2)
        asked = len(gateway.asked)
        for read in reads:
            read.cancel()
        await asyncio.wait(reads)
    assert asked == 100

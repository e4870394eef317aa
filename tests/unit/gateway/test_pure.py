"""The parts without I/O: deadlines, encoders, arguments, timelines, progress, authorization."""

import json
import socket
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm.sse import Parser
from sllm_gateway import errors, sse
from sllm_gateway.arguments import Arguments, path_text
from sllm_gateway.auth import Auth
from sllm_gateway.deadlines import Allowed, Seen, next_look, verdict
from sllm_gateway.outputs import FunctionBody, FunctionStream
from sllm_gateway.replay import After
from sllm_gateway.replay import stream_of as encoder_of
from sllm_gateway.retry import worth_resuming, worth_retrying
from sllm_gateway.routes.calling import wants_events
from sllm_gateway.starts import Starts
from sllm_runtime.protocol import codec
from sllm_runtime.protocol import errors as tree
from sllm_runtime.protocol.frames import Delta, End, Frame, FrameKind, Usage
from sllm_runtime.protocol.node import InstanceStatus, NodeStatus, Progress
from sllm_runtime.protocol.states import InstanceState
from tests.unit.gateway.test_succession import asked

ALLOWED = Allowed(timeout=100, queue=20, idle=10, slow=30)
TIMES = st.none() | st.floats(0, 200)


@given(accepted=st.floats(0, 200), waited=TIMES, frame=TIMES, heard=TIMES, writing=TIMES, now=st.floats(0, 200))
def test_nothing_is_due_before_the_next_look(
    accepted: float, waited: float | None, frame: float | None, heard: float | None, writing: float | None, now: float
) -> None:
    """Between two looks no verdict can change, but for waiting, which is counted at each look."""
    seen = Seen(accepted=accepted, waited=waited, frame=frame, heard=heard, writing=writing)
    look = next_look(seen, ALLOWED, now)
    if verdict(seen, ALLOWED, now) is None and waited is None:
        assert look > now or look == pytest.approx(now)
        assert verdict(seen, ALLOWED, now + (look - now) * 0.999) is None
        assert verdict(seen, ALLOWED, look + 1e-6) is not None
    if waited is not None:
        assert look <= max(now, now + ALLOWED.queue - waited)


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (Seen(0, None, None, None, None), "deadline_exceeded"),
        (Seen(90, 20.0, None, None, None), "queue_timeout"),
        (Seen(90, None, 90.0, None, None), "idle_timeout"),
        (Seen(90, None, None, 95.0, None), "instance_lost"),
        (Seen(50, None, None, None, 70.0), "slow_consumer"),
    ],
)
def test_each_deadline_has_its_error(seen: Seen, code: str) -> None:
    error = verdict(seen, ALLOWED, 100.0, pending=lambda: "no node has room")
    assert error is not None
    assert error.code == code
    assert ("no node has room" in error.message) == (code == "queue_timeout")


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v), max_leaves=8)


@given(values=st.lists(values), cut=st.integers(1, 20), at_once=st.integers(1, 5))
def test_events_carry_the_values_whatever_their_parts(values: list[Any], cut: int, at_once: int) -> None:
    frames: list[Frame] = []
    for value in values:
        data = json.dumps(value, indent=1).encode()
        pieces = [data[start : start + cut] for start in range(0, len(data), cut)]
        for place, piece in enumerate(pieces):
            frames.append(Frame(len(frames), FrameKind.OUTPUT, piece, place + 1 < len(pieces)))
    frames.append(Frame(len(frames), FrameKind.IDS, b"\x93", False))
    stream, parser = FunctionStream("call-1"), Parser()
    found = []
    for start in range(0, len(frames), at_once):
        found += parser.feed(stream.frames(frames[start : start + at_once]))
    assert [json.loads(event.data) for event in found] == values
    assert [event.id for event in found] == [str(n) for n in range(len(values))]
    assert not stream.inside
    assert json.loads(FunctionBody(streams=True).body(frames, End())) == values


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("streams", [True, False])
def test_a_whole_answer_is_an_array_where_its_end_says_that_it_yielded(streams: bool, count: int) -> None:
    frames = [Frame(number, FrameKind.OUTPUT, b"%d" % number) for number in range(count)]
    whole = FunctionBody(streams)
    assert json.loads(whole.body(frames, End(yielded=True))) == list(range(count))
    one = frames[:1]
    value = 0 if one else None
    assert json.loads(whole.body(one, End(yielded=False))) == value
    assert json.loads(whole.body(one, End())) == ([0] * len(one) if streams else value), "of a worker of before"


def test_an_error_within_a_value_makes_that_an_event_that_is_no_output() -> None:
    stream, parser = FunctionStream("call-1"), Parser()
    written = stream.frames([Frame(0, FrameKind.OUTPUT, b"1"), Frame(1, FrameKind.OUTPUT, b'"a', True)])
    assert written == b'id: 0\ndata: 1\n\nid: 1\ndata: "a'
    assert stream.inside
    written += stream.error(tree.InstanceLost("gone"))
    assert not stream.inside
    found = [(event.event, event.id, event.data) for event in parser.feed(written)]
    assert found[:2] == [("message", "0", "1"), ("incomplete", "1", '"a')]
    assert found[2][:2] == ("error", None)
    assert json.loads(found[2][2])["error"]["code"] == "instance_lost"
    assert len(found) == 3


@given(
    values=st.lists(st.text(max_size=5), max_size=6),
    last=st.integers(-1, 8),
    at_once=st.integers(1, 4),
    of=st.sampled_from([("fn", False), ("completion", False), ("completion", True)]),
)
def test_who_reads_on_has_what_follows_its_last_event_and_nothing_twice(
    values: list[str], last: int, at_once: int, of: tuple[Literal["fn", "completion"], bool]
) -> None:
    """Also of what comes at the end."""
    kind, usage = of
    order = asked("call-1", kind=kind, usage=usage, model="m")
    frames = [
        Frame(n, FrameKind.OUTPUT, json.dumps(value).encode())
        if kind == "fn"
        else Frame(n, FrameKind.DELTA, codec.pack(Delta(0, value)))
        for n, value in enumerate(values)
    ]
    whole, after = encoder_of(order), After(encoder_of(order), last)
    every = Parser().feed(whole.frames(frames) + whole.end(End(usage=Usage(1, 2))))
    read = b"".join(after.frames(frames[n : n + at_once]) for n in range(0, len(frames), at_once))
    assert [event.id for event in every] == [str(n) for n in range(len(values) + usage)]
    assert Parser().feed(read + after.end(End(usage=Usage(1, 2)))) == every[last + 1 :]


def test_a_comment_is_one_line() -> None:
    assert sse.comment("a\nb\r\nc") == b": a b c\n"


@given(
    st.recursive(st.text() | st.integers(), lambda v: st.lists(v), max_leaves=8), st.sampled_from(["\r", "\n", "\r\n"])
)
def test_json_of_any_layout_is_one_line(value: Any, end: str) -> None:
    """Both end a line of an event stream."""
    written = sse.one_line(json.dumps(value, indent=1).replace("\n", end).encode() + end.encode())
    assert not set(b"\r\n") & set(written)
    assert json.loads(written) == value


@pytest.mark.parametrize("cls", sorted(set(tree.BY_CODE.values()), key=str))
def test_what_another_instance_may_cure(cls: type[tree.SllmError]) -> None:
    """A death is gone on with; what is the request's own, the caller's wish or the time's is not tried again."""
    never = {"invalid_request", "cancelled", "deadline_exceeded", "not_deterministic", "output_too_large"}
    codes = {each.code for each in cls.__mro__ if issubclass(each, tree.SllmError)}
    assert worth_resuming(cls("x")) is bool(codes & {"instance_lost", "draining", "gateway_silent"})
    assert worth_retrying(cls("x")) is not bool(codes & never)


@pytest.mark.parametrize("cls", sorted(set(tree.BY_CODE.values()), key=str))
def test_every_error_has_both_shapes(cls: type[tree.SllmError]) -> None:
    error = cls("what, where, what next", field="x")
    ours = json.loads(errors.body(error, "call-1", openai=False))["error"]
    theirs = json.loads(errors.body(error, "call-1", openai=True))["error"]
    assert ours["code"] == theirs["code"] == error.code
    assert ours["call_id"] == "call-1"
    assert theirs["param"] == "x"
    assert errors.status(error, openai=True) != 422
    headers = dict(errors.headers(error, None))
    assert (headers.get(b"x-should-retry") == b"false") == (not error.retryable)


SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "rest": {"type": "array", "items": {"type": "integer"}}},
    "required": ["text"],
    "additionalProperties": False,
}


async def test_arguments() -> None:
    arguments = Arguments(SCHEMA)
    assert await arguments.check(b'{"text": "a"}') == b'{"text": "a"}'
    large = json.dumps({"text": "a", "rest": list(range(100_000))}).encode()
    assert await arguments.check(large) is large
    with pytest.raises(tree.InvalidArgument) as wrong:
        await arguments.check(large[:-2] + b', "x"]}')
    assert wrong.value.field == "rest[100000]"
    assert await Arguments({"type": "object"}).check(b" \n") == b"{}"
    with pytest.raises(tree.InvalidManifest):
        Arguments({"type": "nonsense"})


def test_a_schema_opens_no_url_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text('{"type": "string"}')
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        for place in (f"http://127.0.0.1:{listening.getsockname()[1]}/text.json", f"file://{tmp_path}/text.json"):
            for schema in ({"$ref": place}, {"properties": {"a": {"$ref": place}}}, {"$schema": place}):
                with pytest.raises(tree.InvalidManifest, match="correct its type hints") as wrong:
                    Arguments(schema)
                assert wrong.value.field == "handler.input_schema"
                assert "\n" not in wrong.value.message
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_paths() -> None:
    assert path_text(["a", 0, "b", "c", 1, 2]) == "a[0].b.c[1][2]"
    assert path_text([]) == ""
    long = path_text(["a", "x" * 5000, 3, "z"])
    assert len(long) == errors.SHOWN
    assert (long[:4], long[-6:]) == ("a.xx", "x[3].z")


async def test_a_long_name_of_an_argument_is_cut() -> None:
    arguments = Arguments({"type": "object", "properties": {"rest": {"type": "object"}}, "additionalProperties": False})
    for body in ({"x" * 5000: 1}, {"rest": "y" * 5000}):
        with pytest.raises(tree.InvalidArgument) as wrong:
            await arguments.check(json.dumps(body).encode())
        assert len(wrong.value.message) < 400
        assert len(wrong.value.field or "") <= errors.SHOWN


def status(*instances: InstanceStatus, node: str = "n1", boot: str = "b") -> NodeStatus:
    return NodeStatus(
        node=node, boot=boot, sequence=1, term=1, cpu=1, memory=1, free_cpu=1, free_memory=1, instances=instances
    )


def start(instance: str, stage: str, state: InstanceState = InstanceState.STARTING, done: int = 0) -> InstanceStatus:
    progress = Progress(stage=stage, done=done, total=10)
    return InstanceStatus(instance=instance, function="f", version=1, state=state, progress=progress)


def test_the_furthest_start_is_shown_while_its_node_speaks() -> None:
    starts, key = Starts(), ("f", 1)

    def stage(now: float) -> str:
        found = starts.of(key, now)
        return found.stage if found is not None else ""

    starts.on_status(status(start("i1", "sandbox"), start("i2", "weights", done=5)), 0.0)
    assert stage(1.0) == "weights"
    starts.on_status(status(start("i3", "import"), node="n2"), 2.0)
    assert stage(2.0) == "weights"
    assert stage(6.0) == "import", "n1 is silent"
    assert stage(8.0) == ""
    starts.on_status(status(start("i2", "setup")), 9.0)
    assert stage(9.0) == "setup"
    starts.on_status(status(start("i2", "", InstanceState.READY)), 10.0)
    assert stage(10.0) == ""
    assert not starts.restarted(status())
    assert not starts.restarted(status())
    assert starts.restarted(status(boot="c"))


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (b"Bearer secret", True),
        (b"bearer  secret ", True),
        (b"Bearer secre", False),
        (b"Basic secret", False),
        (b"", False),
        (b"Bearer \xff", False),
    ],
)
def test_the_token(header: bytes, allowed: bool) -> None:
    for path in (b"/fn/x", b"/metrics"):  # a load balancer lets any token pass to the second
        scope = {"raw_path": path, "headers": [(b"authorization", header)]}
        if allowed:
            Auth("secret").check(scope)
        else:
            with pytest.raises(tree.Unauthorized):
                Auth("secret").check(scope)
    Auth(None).check({"raw_path": b"/fn/x", "headers": []})
    Auth("secret").check({"raw_path": b"/metrics", "headers": []})


def test_the_docs_table_of_codes_is_the_code() -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    rows = {line for line in text.split("\n") if line.startswith("| `") and line.count("|") == 5}
    assert rows == {
        f"| `{code}` | {cls.status} | {'yes' if cls.retryable else 'no'} | {cls.exit_code} |"
        for code, cls in tree.BY_CODE.items()
    }


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/*", False),
        ("application/json", False),
        ("text/event-stream", True),
        ("application/json, Text/Event-Stream", True),
        ("text/event-stream; charset=utf-8;q=0.1", True),
        ("text/event-stream;q=0, application/json", False),
        ("application/json, text/event-stream ; q=0.000", False),
        ("x-text/event-stream", False),
        (";,;q=0,,", False),
    ],
)
def test_events_are_for_who_accepts_them(accept: str | None, wanted: bool) -> None:
    headers = [] if accept is None else [(b"accept", accept.encode())]
    assert wants_events({"type": "http", "headers": headers}) is wanted
    lines = [(b"accept", part.encode()) for part in (accept or "").split(",")]
    assert wants_events({"type": "http", "headers": lines}) is wanted, "several lines are one list"

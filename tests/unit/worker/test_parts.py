"""The small parts: console lines, credit, batches, chat templates."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import Cancelled, FunctionError, InvalidRequest
from sllm_runtime.protocol.frames import CallHead, End, Frame, FrameKind
from sllm_runtime.protocol.worker import CallFrames, FromWorker, Heartbeat, Log
from sllm_runtime.worker.call import Call, current
from sllm_runtime.worker.chat import ChatTemplate
from sllm_runtime.worker.console import MAX_LINE, LineWriter, current_call
from sllm_runtime.worker.outgoing import CallEnded, Outgoing
from sllm_runtime.worker.sender import Pace, Sender
from sllm_runtime.worker.values import encode
from tests.fixtures.waiting import GIVE_UP_S


@given(st.lists(st.text(alphabet="ab\n", max_size=30), max_size=20))
def test_lines_are_whole_whatever_the_writes(pieces: list[str]) -> None:
    lines: list[str] = []
    writer = LineWriter("stdout", 1, lambda _number, _name, line: lines.append(line))
    for piece in pieces:
        assert writer.write(piece) == len(piece)
    writer.end_call(None)
    whole = "".join(pieces)
    assert lines == (whole.split("\n") if not whole.endswith("\n") and whole else whole.split("\n")[:-1])


def test_lines_belong_to_their_call_and_are_bounded() -> None:
    seen: list[tuple[int | None, str]] = []
    writer = LineWriter("stderr", 2, lambda number, _name, line: seen.append((number, line)))
    print("a", end="", file=writer)
    token = current_call.set(5)
    print("b" * (MAX_LINE + 10), file=writer)
    print("c", end="", file=writer)
    writer.end_call(5)
    current_call.reset(token)
    print("d", file=writer)
    assert seen == [(5, "b" * MAX_LINE), (5, "b" * 10), (5, "c"), (None, "ad")]
    with pytest.raises(TypeError):
        writer.write(b"bytes")  # type: ignore[arg-type]


class Wired:
    """A sender and the socket it writes to."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(GIVE_UP_S)
        self.reader = BlockingWire(ours)
        self.sender = Sender(BlockingWire(theirs), lambda: Heartbeat(running=0))
        self._theirs = theirs

    def bodies(self) -> Iterator[Any]:
        while (payload := self.reader.receive()) is not None:
            assert len(payload) <= limits.MAX_MESSAGE
            yield codec.unpack(FromWorker, payload).body

    def frames(self, number: int) -> Iterator[Frame]:
        for body in self.bodies():
            if isinstance(body, CallFrames):
                for found, frames in body.items:
                    if found == number:
                        yield from frames

    def close(self) -> None:
        self.sender.close(10)
        self.reader.close()
        self._theirs.close()


@pytest.fixture
def wired() -> Iterator[Wired]:
    one = Wired()
    yield one
    one.close()


def test_what_accumulated_goes_out_together_and_bounded(wired: Wired) -> None:
    for number in range(3):
        for index in range(5):
            wired.sender.queue(number, Frame(index, FrameKind.OUTPUT, b"x" * 100_000))
    wired.sender.log(1, "stdout", "line")
    wired.sender.start()
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    messages = 0
    for body in wired.bodies():
        if isinstance(body, CallFrames):
            messages += 1
            for number, frames in body.items:
                seen[number].extend(frame.index for frame in frames)
        elif isinstance(body, Log):
            assert not messages, "logs first"
        if sum(map(len, seen.values())) == 15:
            break
    assert seen == {0: list(range(5)), 1: list(range(5)), 2: list(range(5))}
    assert messages == 5


def test_credit_bounds_a_thread(wired: Wired) -> None:
    wired.sender.start()
    outgoing = Outgoing(1, wired.sender, 10 + 2 * limits.FRAME_COST)
    sent = []

    def produce() -> None:
        for _ in range(4):
            outgoing.send(FrameKind.OUTPUT, b"12345", 20)
            sent.append(1)

    thread = threading.Thread(target=produce)
    thread.start()
    frames = wired.frames(1)
    assert [next(frames).index for _ in range(2)] == [0, 1]
    assert not outgoing.try_send(FrameKind.IDS, b"1")
    outgoing.grant(20 + 4 * limits.FRAME_COST)
    outgoing.grant(5)  # late: cumulative limits never shrink
    assert [next(frames).index for _ in range(2)] == [2, 3]
    thread.join(GIVE_UP_S)
    outgoing.end(End())
    outgoing.end(End())
    assert next(frames).kind is FrameKind.END
    with pytest.raises(CallEnded):
        outgoing.send(FrameKind.OUTPUT, b"", 1)


def test_without_a_reader_a_thread_gives_up(wired: Wired) -> None:
    outgoing = Outgoing(1, wired.sender, 1)
    with pytest.raises(CallEnded):
        outgoing.send(FrameKind.OUTPUT, b"12", 0.01)


async def test_credit_and_cancel_wake_a_coroutine(wired: Wired) -> None:
    wired.sender.start()
    outgoing = Outgoing(1, wired.sender, 0)
    first = asyncio.create_task(outgoing.asend(FrameKind.OUTPUT, b"12", 20))
    await asyncio.sleep(0)
    assert not first.done()
    outgoing.grant(2 + limits.FRAME_COST)
    await first
    second = asyncio.create_task(outgoing.asend(FrameKind.OUTPUT, b"12", 20))
    await asyncio.sleep(0)
    outgoing.cancel(Cancelled("enough").body())
    with pytest.raises(CallEnded, match="enough"):
        await second


@given(gaps=st.lists(st.floats(0, 0.004), max_size=200))
def test_a_pace_is_kept_and_nobody_waits_who_need_not(gaps: list[float]) -> None:
    pace, now, last, taken = Pace(4, 0.001, 0.0), 0.0, 0.0, 0
    for gap in gaps:
        now += gap
        if pace.take(now):
            last, taken = now, taken + 1
        else:
            assert now - last < 0.001 + 1e-9, "one is allowed for each millisecond that passes"
        assert taken <= 4 + now / 0.001 + 1e-6


@pytest.mark.parametrize("value", [object(), {"a": {1: object()}}, 1j, lambda: 0])
def test_values_that_are_no_json(value: Any) -> None:
    with pytest.raises(FunctionError, match=r"builtins\.(object|complex|function)|not JSON"):
        encode(value)


def test_a_value_that_holds_itself() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(FunctionError):
        encode(ring)


def template(source: Any, **config: Any) -> ChatTemplate:
    return ChatTemplate.from_files({"tokenizer_config.json": codec.to_json({"chat_template": source, **config})})


def test_who_began_the_answer_himself_says_so() -> None:
    """``add_generation_prompt`` is a variable of nearly every template."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure:"}]
    assert template(source).render(messages) == "qSure:<a>"
    assert template(source).render(messages, more={"add_generation_prompt": False}) == "qSure:"


def test_chat_templates() -> None:
    hello = [{"role": "user", "content": "<hi>"}]
    assert template("{{ bos_token }}{{ messages[0].content }}", bos_token={"content": "B"}).render(hello) == "B<hi>"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert template(named).render(hello) == "D"
    assert ChatTemplate.from_files({"tokenizer_config.json": codec.to_json({"chat_template": named})}, tools=True)
    files = {"chat_template.jinja": b"{{ tools | tojson }}", "tokenizer_config.json": b'{"chat_template": "no"}'}
    assert ChatTemplate.from_files(files).render(hello, [{"a": "<"}]) == '[{"a": "<"}]'
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate.from_files({})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(hello)
    with pytest.raises(InvalidRequest, match="broken"):
        template("{% for %}")
    with pytest.raises(InvalidRequest):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(hello)
    with pytest.raises(InvalidRequest):
        template("{{ messages.append(1) }}").render(hello)


def test_a_prompt_names_the_day_that_its_call_was_accepted() -> None:
    """Also on an instance that goes on with it another day."""
    head = CallHead(
        call="c", epoch=1, instance="i", function="f", version=1, kind="chat", stream=True, body_bytes=2,
        timeout_s=GIVE_UP_S, idle_timeout_s=GIVE_UP_S, seed=0, created=86_399.0,
    )  # fmt: skip
    dated = template("{{ messages and strftime_now('%Y-%m-%d') }}")
    today = dated.render([{"role": "user", "content": "x"}])
    assert today != "1970-01-01"
    token = current.set(Call(1, head, cast(Any, None)))
    assert dated.render([{"role": "user", "content": "x"}]) == "1970-01-01"
    current.reset(token)


CALLED: Any = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}]}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "<adds>"}}


def test_tools_reach_the_template() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a + 1 }}"
        "{% else %}{{ m.content }}{% endif %}{{ 'content' in m }};{% endfor %}"
        "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}{{ tool_choice }}{{ thinking }}"
    )
    made = template(source)
    told = made.render([CALLED, {"role": "tool", "content": "6", "name": None}], [TOOL], "required", {"thinking": True})
    assert told == '6False;6True;{"name": "add", "description": "<adds>"}requiredTrue'
    assert made.render([{"role": "user", "content": "x"}]) == "xTrue;"
    knows_none = template("{{ messages[0].content }}")
    for field, arguments in (
        ("tools", {"tools": [TOOL]}),
        ("chat_template_kwargs.thinking", {"more": {"thinking": True}}),
    ):
        with pytest.raises(InvalidRequest) as refused:
            knows_none.render([{"role": "user", "content": "x"}], **arguments)
        assert refused.value.field == field
    assert knows_none.render([{"role": "user", "content": "x"}], tool_choice="auto") == "x"


@pytest.mark.parametrize("calls", ["x", ["x"], [{"function": 5}], [{"function": {"arguments": "{"}}]])
def test_earlier_calls_that_are_none_are_refused(calls: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        template("{{ messages }}").render([{"role": "user"}, {"role": "assistant", "tool_calls": calls}])
    assert refused.value.field == "messages[1].tool_calls"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ messages[0].content.nothing.at_all }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_named(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as refused:
        template(source).render([{"role": "user", "content": "x"}])
    assert refused.value.field == "messages"


def test_a_template_as_transformers_renders_it() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{% set ns = namespace(last='') %}\n{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}[{{ m['content'] | trim }}]{% endif %}\n"
        "{% set ns.last = m.role %}{% if loop.index == 9 %}{% break %}{% endif %}{% endfor %}"
        "{{ {'b': '<é>', 'a': [1]} | tojson(indent=1, sort_keys=true) }}{{ ns.last }}{{ dict(x=1) | tojson }}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yo"}]
    rendered: Any = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
    assert template(source).render(messages) == rendered[0][0]

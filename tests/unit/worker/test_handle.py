"""The model handle of coroutines: what takes long is done in threads, and numbered as it was begun."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol.errors import (
    NEVER_RAN,
    ContextLengthExceeded,
    ErrorBody,
    InstanceLost,
    InvalidArgument,
    OutOfMemory,
    QueueFull,
    SllmError,
)
from sllm_runtime.protocol.frames import CallHead
from sllm_runtime.protocol.worker import Heartbeat, StartCall
from sllm_runtime.worker.call import Call, current
from sllm_runtime.worker.calls import Calls, run_async
from sllm_runtime.worker.console import Console
from sllm_runtime.worker.engine.base import Event, Request, Sampling
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.scripted import ScriptedEngine
from sllm_runtime.worker.engine.sinks import Mailbox, ThreadSink
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.outgoing import Outgoing
from sllm_runtime.worker.sender import Sender
from sllm_runtime.worker.tokens import Tokens
from tests.fixtures.vocabularies import byte_level
from tests.fixtures.waiting import GIVE_UP_S, until

SEED = 1000


class Slow(Tokens):
    """Waits within one text until it may go on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.go = threading.Event()

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        assert text != "slow" or self.go.wait(GIVE_UP_S), "nothing else has its turn"
        return super().encode(text, special=special)


class Heard(ScriptedEngine):
    """Says 65 whatever it is ``asked``."""

    def __init__(self, asked: list[Request]) -> None:
        super().__init__(lambda prompt, output: 65)
        self.asked = asked

    def add(self, request: Request) -> None:
        self.asked.append(request)
        super().add(request)


class Written:
    """A tokenizer, and how often it was written out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.times = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def to_str(self) -> str:
        self.times += 1
        return self._tokenizer.to_str()


@pytest.fixture
def tokens() -> Slow:
    return Slow(byte_level())


@pytest.fixture
def asked() -> list[Request]:
    return []


@pytest.fixture
def loop(tokens: Slow, asked: list[Request]) -> Iterator[EngineLoop]:
    made = EngineLoop(Heard(asked), tokens)
    made.start()
    yield made
    tokens.go.set()
    made.close()


@pytest.fixture
def call() -> Iterator[Call]:
    ours, theirs = socket.socketpair()
    head = CallHead(
        call="c", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True, body_bytes=2,
        timeout_s=GIVE_UP_S, idle_timeout_s=GIVE_UP_S, seed=SEED, credit=1 << 20,
    )  # fmt: skip
    yield Call(1, head, Outgoing(1, Sender(BlockingWire(ours), lambda: Heartbeat(running=0)), head.credit))
    ours.close()
    theirs.close()


def handle_of(loop: EngineLoop, tokens: Tokens, path: Path) -> ModelHandle:
    made = ModelHandle(lambda: None, {}, path, lambda: (loop, tokens))
    made.use_loop(Mailbox(asyncio.get_running_loop()))
    return made


async def text(handle: ModelHandle, prompt: Any, **more: Any) -> str:
    return "".join([piece async for piece in handle.agenerate(prompt, **more)])


async def test_a_prompt_that_takes_long_holds_up_nobody(
    loop: EngineLoop, tokens: Slow, asked: list[Request], call: Call, tmp_path: Path
) -> None:
    handle = handle_of(loop, tokens, tmp_path)
    current.set(call)
    first = asyncio.create_task(text(handle, "slow", max_tokens=3))
    await asyncio.sleep(0)
    said = await text(handle, "quick", max_tokens=3)
    assert not first.done()
    tokens.go.set()
    assert await first == said
    slow, quick = tokens.encode("slow"), tokens.encode("quick")
    assert [(each.prompt, each.sampling.seed) for each in asked] == [(quick, SEED + 1), (slow, SEED)], (
        "a resume would find the ids of another"
    )


async def test_what_is_wrong_is_said_where_that_is_known(loop: EngineLoop, tokens: Slow, tmp_path: Path) -> None:
    handle = handle_of(loop, tokens, tmp_path)
    for wrong in ({"max_tokens": -1}, {"temperature": 3}, {"top_q": 1}):
        with pytest.raises(InvalidArgument):
            handle.agenerate("quick", **wrong)
    with pytest.raises(ContextLengthExceeded):
        await text(handle, [65] * loop.engine.max_context)


async def test_a_prompt_is_what_it_was_when_it_was_given(
    loop: EngineLoop, tokens: Slow, asked: list[Request], tmp_path: Path
) -> None:
    handle, prompt = handle_of(loop, tokens, tmp_path), [65]
    coming = handle.agenerate(prompt, max_tokens=1)
    prompt.append(66)
    assert [piece async for piece in coming]
    assert asked[0].prompt == (65,)


async def test_so_is_a_chat(loop: EngineLoop, tokens: Slow, asked: list[Request], tmp_path: Path) -> None:
    """To its last message: what changes it meanwhile may be faster or slower when its call is resumed."""
    files = {"tokenizer_config.json": b'{"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}'}
    handle = ModelHandle(lambda: None, files, tmp_path, lambda: (loop, tokens))
    handle.use_loop(Mailbox(asyncio.get_running_loop()))
    messages = [{"role": "user", "content": "hello"}]
    coming = handle.agenerate(messages, max_tokens=1)
    messages[0]["content"] += " world"
    assert [piece async for piece in coming]
    assert asked[0].prompt == tokens.encode("hello", special=False)


class Broken(Heard):
    """Its device computes nothing more."""

    def step(self) -> list[Event]:
        raise InstanceLost("its device computes nothing more")


class Cramped(Heard):
    """The function's memory is too small for a step."""

    def __init__(self, error: Exception) -> None:
        super().__init__([])
        self._error = error

    def step(self) -> list[Event]:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:130] . DefaultCPUAllocator: not enough memory"),
        RuntimeError("could not create a primitive"),
    ],
)
def test_an_engine_without_memory_says_so_and_what_to_do(tokens: Slow, error: Exception) -> None:
    loop, sink = EngineLoop(Cramped(error), tokens), ThreadSink()
    loop.start()
    loop.submit(Request(id=-1, prompt=(65,), sampling=Sampling()), sink)
    with pytest.raises(OutOfMemory, match="raise memory="):
        list(sink)
    loop.close()


@pytest.mark.parametrize("begun", [True, False])
def test_an_engine_that_is_lost_is_told_of_whenever_it_began(tokens: Slow, tmp_path: Path, begun: bool) -> None:
    """Without ``engine=True`` the first ``generate`` begins it."""
    loop, lost = EngineLoop(Broken([]), tokens), queue.Queue[SllmError]()
    handle = ModelHandle(lambda: None, {}, tmp_path, lambda: (loop, tokens))
    if begun:
        handle.engine()
    handle.on_lost(lost.put)
    loop.start()
    sink = ThreadSink()
    handle.engine()[0].submit(Request(id=-1, prompt=(65,), sampling=Sampling()), sink)
    assert isinstance(lost.get(timeout=GIVE_UP_S), InstanceLost)
    handle.close()
    assert sink._pieces.empty()


def test_a_tokenizer_is_written_out_for_who_needs_that(tmp_path: Path) -> None:
    """Once: it may have megabytes, and most calls only have their texts encoded and decoded."""
    written = Written(byte_level())
    tokens = Tokens(cast(Tokenizer, written))
    loop = EngineLoop(ScriptedEngine(lambda prompt, output: 65, frozenset({2}), vocabulary=300), tokens)
    loop.start()
    handle = ModelHandle(lambda: None, {"config.json": b'{"eos_token_id": 2}'}, tmp_path, lambda: (loop, tokens))
    assert "".join(handle.generate("hello", max_tokens=2))
    assert written.times == 0
    for _ in range(2):
        assert "".join(handle.generate("hello", max_tokens=2, bad_words=["b"]))
        assert written.times == 1
    handle.close()


async def test_who_has_heard_enough_costs_the_engine_nothing_more(tokens: Slow, tmp_path: Path) -> None:
    """A function that leaves its loop over the pieces: else others would share each step with it to its last token."""
    said, left = list[int](), threading.Event()

    def say(prompt: object, output: object) -> int:
        assert len(said) < 3 or left.wait(GIVE_UP_S)
        said.append(65)
        return 65

    loop = EngineLoop(ScriptedEngine(say), tokens)
    loop.start()
    pieces = ModelHandle(lambda: None, {}, tmp_path, lambda: (loop, tokens)).generate("hello", max_tokens=500)
    assert next(pieces)
    cast(Generator[str, None, None], pieces).close()
    left.set()
    await until(lambda: not loop.engine.busy)
    assert len(said) < 10
    loop.close()


class Full(Heard):
    """So many wait for it that it takes no more."""

    def add(self, request: Request) -> None:
        raise QueueFull("1024 requests wait for this instance's engine; try again later")


async def test_what_a_function_that_ran_ends_with_is_no_proof_that_it_did_not(
    tokens: Slow, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK sends a call again after such a code: what the function did before would be done anew."""
    ended, ran = list[ErrorBody | None](), list[int]()
    monkeypatch.setattr(Call, "end", lambda call, error: ended.append(error))
    loop = EngineLoop(Full([]), tokens)
    loop.start()
    handle = handle_of(loop, tokens, tmp_path)

    async def function() -> str:
        ran.append(1)  # an order is placed, a mail is sent
        return await text(handle, "hello", max_tokens=1)

    made = Calls(
        call.outgoing._sender,
        Console(lambda *said: None, lambda: None),
        run_async(function, lambda body: {}),
        on_loop=True,
    )
    made.start(StartCall(number=1, head=call.head, body=b"{}"))
    await until(lambda: bool(ended), what="the call has ended")
    handle.close()
    assert ran == [1]
    assert ended[0] is not None
    assert ended[0].code not in NEVER_RAN, ended[0]
    assert "1024 requests wait" in ended[0].message

"""SSE responses that are no calls: what is written when, with a client that takes its time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from sllm_gateway.asgi import PIECE
from sllm_gateway.events import EventWriter, Source
from sllm_gateway.server import CLOSE_AFTER_S
from sllm_gateway.sse import DONE, HEARTBEAT
from sllm_runtime.platform.owned import Tasks, end
from tests.fixtures.waiting import GIVE_UP_S, until

HEADERS = b"headers"


class Line:
    """A client's connection, as far as it is used here."""

    def __init__(self) -> None:
        self.go: Callable[[], None] = lambda: None
        self.aborted: list[float] = []

    @contextmanager
    def watched(self, on_lost: Callable[[], None]) -> Iterator[None]:
        self.go = on_lost
        yield

    def unblock(self) -> None:
        pass

    def abort_after(self, seconds: float) -> None:
        self.aborted.append(seconds)


class Client(Line):
    """Is being written to until it takes that."""

    def __init__(self) -> None:
        super().__init__()
        self._written: asyncio.Queue[bytes] = asyncio.Queue()
        self._taken = asyncio.Semaphore(0)

    async def send(self, message: Any) -> None:
        self._written.put_nowait(message.get("body", HEADERS))
        await self._taken.acquire()

    async def looks(self) -> bytes:
        """What is being written to it."""
        return await self._written.get()

    def take(self) -> None:
        self._taken.release()

    async def reads(self) -> bytes:
        """The next thing that is written to it."""
        found = await self.looks()
        self.take()
        return found


class Buffered(Line):
    """Has room for so many writes, and takes one when it is told to."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = asyncio.Semaphore(room)
        self.waits = asyncio.Event()
        self.bodies: list[bytes] = []
        self.whole = False
        self._unblocked = False

    async def send(self, message: Any) -> None:
        if not self._unblocked:
            if self.room.locked():
                self.waits.set()
            await self.room.acquire()
        if "body" in message:
            assert not self.whole
            self.bodies.append(message["body"])
            self.whole = not message["more_body"]

    def unblock(self) -> None:
        self._unblocked = True


def scope_of(line: Line, method: str = "GET") -> dict[str, Any]:
    return {"method": method, "state": {"connection": line}}


@asynccontextmanager
async def written(source: Source, client: Any, *, method: str = "GET", **options: Any) -> AsyncIterator[None]:
    tasks = Tasks("test")
    writer = EventWriter(
        tasks, headers_wait=0.0, heartbeat=options.pop("heartbeat", 60.0), slow=options.pop("slow", 60.0)
    )
    writing = tasks.start(writer.write(source, scope_of(client, method), client.send, **options), "writes")
    try:
        async with asyncio.timeout(GIVE_UP_S):
            yield
            await writing
    finally:
        await tasks.close()


async def test_what_comes_while_the_client_is_being_written_to_is_not_lost() -> None:
    """The headers, and a heartbeat: one that lags takes them late."""
    client, come, came = Client(), asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def source() -> AsyncGenerator[bytes, None]:
        for number in range(2):
            await come.acquire()
            came.release()
            yield b"%d" % number

    read: list[bytes] = []
    async with written(source(), client, heartbeat=0.01):
        for expected in (HEADERS, HEARTBEAT):
            while (piece := await client.looks()) != expected:
                read.append(piece)
                client.take()
            come.release()
            await came.acquire()
            await asyncio.sleep(0)  # what has come is there, and the client is still being written to
            client.take()
        while DONE not in read:
            read.append(await client.reads())
    assert [piece for piece in read if piece not in (b"", HEARTBEAT)] == [b"0", b"1", DONE]


async def test_while_nothing_comes_it_says_what_there_is_to_say_else_a_heartbeat(monkeypatch: Any) -> None:
    monkeypatch.setattr("sllm_gateway.events.QUIET_S", 0.01)
    client, come = Client(), asyncio.Event()
    says = iter([b"", b"first", b"", b"second"])

    async def quiet() -> bytes:
        return next(says, b"")

    async def source() -> AsyncGenerator[bytes, None]:
        await come.wait()
        yield b"0"

    async with written(source(), client, heartbeat=0.03, quiet=quiet):
        read: list[bytes] = []
        while b"second" not in read or read[-1] != HEARTBEAT:
            read.append(await client.reads())
        come.set()
        while DONE not in read:
            read.append(await client.reads())
    assert [piece for piece in read if piece != HEARTBEAT] == [HEADERS, b"", b"first", b"second", b"0", DONE]


async def test_nothing_is_written_into_what_is_not_whole() -> None:
    """A value in parts that come far apart."""
    client, asked = Client(), asyncio.Semaphore(0)

    async def quiet() -> None:
        asked.release()

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"data: half"
        for _ in range(2):  # heartbeats are long due by then
            await asked.acquire()
        yield b" and half"

    read: list[bytes] = []
    async with written(source(), client, heartbeat=0.0, quiet=quiet):
        while b"data: half" not in read:
            read.append(await client.reads())
        while DONE not in read:
            read.append(await client.reads())
    assert read[read.index(b"data: half") :] == [b"data: half", b" and half", DONE]


async def test_what_comes_does_not_wait_for_what_is_to_be_said() -> None:
    """Who is asked may not answer."""
    client, asked = Client(), asyncio.Event()

    async def quiet() -> bytes:
        asked.set()
        await asyncio.Event().wait()
        return b"never"

    async def source() -> AsyncGenerator[bytes, None]:
        await asked.wait()
        yield b"0"

    read: list[bytes] = []
    async with written(source(), client, heartbeat=0.0, quiet=quiet):
        while DONE not in read:
            read.append(await client.reads())
    assert read[-2:] == [b"0", DONE]


LARGE = 4 * PIECE


async def large() -> AsyncGenerator[bytes, None]:
    """More than the client has room for, and then more."""
    yield b"x" * LARGE
    await asyncio.Event().wait()


async def test_a_client_that_takes_nothing_is_told_and_cut_off() -> None:
    """What is begun is written whole: the error would stand in the middle of it."""
    client = Buffered(room=2)
    async with written(large(), client, slow=0.05, failed=lambda error: error.code.encode()):
        pass
    assert b"".join(client.bodies) == b"x" * LARGE + b"slow_consumer"
    assert client.whole
    assert client.aborted == [CLOSE_AFTER_S]


async def test_a_slow_one_has_its_time_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take it longer than one may. Time passes while one waits, and only then."""
    client, slow = Buffered(room=1), 10.0
    loop = asyncio.get_running_loop()
    began = now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"x" * LARGE

    async def takes() -> None:
        nonlocal now
        while True:
            await client.waits.wait()
            client.waits.clear()
            now += slow / 3
            for _ in range(3):  # what is due by then comes first
                await asyncio.sleep(0)
            client.room.release()

    taking = asyncio.create_task(takes())
    async with written(source(), client, slow=slow):
        pass
    await end([taking])
    assert now - began > slow
    assert b"".join(client.bodies) == b"x" * LARGE + DONE
    assert client.aborted == []


async def test_of_a_whole_answer_a_client_that_takes_nothing_is_cut_off_too() -> None:
    client = Buffered(room=2)
    tasks = Tasks("test")
    try:
        writer = EventWriter(tasks, headers_wait=0.0, heartbeat=60.0, slow=0.05)
        await writer.whole(scope_of(client), client.send, [], b"x" * LARGE)
    finally:
        await tasks.close()
    assert client.whole
    assert client.aborted == [CLOSE_AFTER_S]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_who_goes_away_or_wants_headers_alone_ends_it(method: str) -> None:
    client, ended = Buffered(room=100), asyncio.Event()

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            yield b"0"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with written(source(), client, method=method):
        await until(lambda: client.bodies)
        if method == "GET":
            client.go()
        await ended.wait()
    assert client.whole == (method == "HEAD")

"""SSE responses that are no calls: what is written when, with a client that takes its time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sllm_gateway.events import EventWriter, Source
from sllm_gateway.sse import DONE, HEARTBEAT
from sllm_runtime.platform.owned import Tasks

HEADERS = b"headers"


class Client:
    """Is being written to until it takes that."""

    def __init__(self) -> None:
        self._written: asyncio.Queue[bytes] = asyncio.Queue()
        self._taken = asyncio.Semaphore(0)

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

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


@asynccontextmanager
async def written(source: Source, client: Client, **options: Any) -> AsyncIterator[None]:
    tasks = Tasks("test")
    writer = EventWriter(tasks, headers_wait=0.0, heartbeat=options.pop("heartbeat"), slow=60.0)
    writing = tasks.start(writer.write(source, client.receive, client.send, **options), "writes")
    try:
        async with asyncio.timeout(10):
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

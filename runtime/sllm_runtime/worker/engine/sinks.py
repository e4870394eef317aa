"""Where what an engine makes of a request goes: a thread that iterates, or coroutines, which are woken once a step."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Protocol

from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.worker.engine.base import Finish, TokenChoice


@dataclass(frozen=True, slots=True)
class Piece:
    """What became final for one request: text (maybe none yet), the ids behind it, and at its end why it ended."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenChoice, ...] = ()
    prompt: tuple[TokenChoice, ...] = ()
    """See ``Event.prompt``."""
    finish: Finish | None = None
    cached: int = 0
    """Prompt tokens that were not computed anew, as far as is known."""
    rests: bool = False
    """It is held, and told all that it drew. Nothing else is said with that."""
    error: SllmError | None = None

    @property
    def last(self) -> bool:
        """Nothing follows."""
        return self.finish is not None or self.error is not None


class Mailbox:
    """Pieces for the coroutines of one event loop: posted by the engine thread, handed out on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[AsyncSink, Piece]] = deque()

    def here(self) -> Mailbox:
        """That of the running loop: a function may run one of its own (``asyncio.run``)."""
        running = asyncio.get_running_loop()
        return self if running is self._loop else Mailbox(running)

    def post(self, sink: AsyncSink, piece: Piece) -> None:
        """Keep until ``flush``."""
        self._posted.append((sink, piece))

    def flush(self) -> None:
        """Wake the loop once for all that was posted. A loop that is closed has nobody waiting."""
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._posted.clear()

    def _deliver(self) -> None:
        while self._posted:
            sink, piece = self._posted.popleft()
            sink.pieces.put_nowait(piece)


class Sink(Protocol):
    """Where the pieces of one request go; called on the engine thread. ``mailbox``: flushed after the step."""

    @property
    def mailbox(self) -> Mailbox | None: ...

    def put(self, piece: Piece) -> None: ...


class ThreadSink:
    """For a thread that iterates. Holds at most what ``max_tokens`` allows."""

    mailbox: Mailbox | None = None

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()

    def put(self, piece: Piece) -> None:
        self._pieces.put(piece)

    def __iter__(self) -> Iterator[Piece]:
        """Pieces up to the last one; its error is raised."""
        while True:
            piece = self._pieces.get()
            if piece.error is not None:
                raise piece.error
            yield piece
            if piece.last:
                return


class AsyncSink:
    """For a coroutine that iterates. Holds at most what ``max_tokens`` allows."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox: Mailbox | None = mailbox
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()

    def put(self, piece: Piece) -> None:
        if self.mailbox is not None:
            self.mailbox.post(self, piece)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces up to the last one; its error is raised."""
        while True:
            piece = await self.pieces.get()
            if piece.error is not None:
                raise piece.error
            yield piece
            if piece.last:
                return

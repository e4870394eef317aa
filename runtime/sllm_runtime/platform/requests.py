"""Requests over NATS: asked with a deadline, answered each in a task of its own, every answer in a ``Reply``."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import msgspec
import nats.errors
from nats.aio.msg import Msg

from sllm_runtime.platform import trace
from sllm_runtime.platform.direct import DirectClient, header_of
from sllm_runtime.platform.outbox import Outbox, encode, text
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.ctl import Reply
from sllm_runtime.protocol.errors import DeadlineExceeded, InternalError, ProtocolError, SllmError, Unavailable

log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)
NO_RESPONDERS: Final = "503"


class Unserved(Unavailable):
    """Nobody serves what was asked: nobody has heard the question."""


class Questions:
    """What one client asks. The answers come to one inbox, and straight to who waits for them."""

    def __init__(self, client: DirectClient) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[bytes | None]] = {}
        """By inbox. None: nobody is there to answer."""
        self._numbers = itertools.count()
        self._inbox = ""

    async def start(self) -> None:
        """Listen for answers. Before the first question."""
        self._inbox = self._client.new_inbox()
        await self._client.listen(f"{self._inbox}.*", self._answered)

    async def ask(self, subject: str, request: Any, reply_type: type[R], timeout_s: float) -> R:
        """The answer of whoever serves ``subject``.

        Raises what the other side raised, ``Unserved`` if nobody is there, ``Unavailable`` where the connection is
        closed, ``DeadlineExceeded`` after ``timeout_s`` seconds.
        """
        found = await self._answer_to(subject, encode(request, subject), timeout_s)
        if found is None:
            raise Unserved(f"nobody serves {subject} now; try again")
        reply = codec.unpack(Reply, found)
        if reply.error is not None:
            raise reply.error.to_error()
        return codec.unpack(reply_type, bytes(reply.value))

    async def served(self, subject: str, message: Any, timeout_s: float) -> bool:
        """Whether anybody listens to ``subject``. If nobody does the server says so at once; so whoever says nothing
        within ``timeout_s`` seconds counts as there, and so does everybody while there is no connection."""
        try:
            return await self._answer_to(subject, encode(message, subject), timeout_s) is not None
        except (DeadlineExceeded, Unavailable):
            return True

    async def _answer_to(self, subject: str, data: bytes, timeout_s: float) -> bytes | None:
        """None: nobody is there to answer. Raises ``Unavailable``, ``DeadlineExceeded``."""
        inbox = f"{self._inbox}.{next(self._numbers)}"
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(subject, data, inbox)
                return await answer
        except TimeoutError as error:
            why = "" if self._client.is_connected else ": NATS is not connected"
            raise DeadlineExceeded(f"no answer from {subject} within {timeout_s:g} s{why}") from error
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot ask {subject}: {text(error)}") from error
        finally:
            del self._waiting[inbox]

    async def _send(self, subject: str, data: bytes, inbox: str) -> None:
        """With the trace of whoever asks, if there is one."""
        traced = trace.current()
        if not self._client.publish_now(subject, data, inbox, header_of(trace.HEADER, traced) if traced else b""):
            await self._client.publish(subject, data, inbox, {trace.HEADER: traced} if traced else None)

    def _answered(self, subject: str, _reply: str, data: bytes, status: str) -> None:
        answer = self._waiting.get(subject)
        if answer is not None and not answer.done():
            answer.set_result(None if status == NO_RESPONDERS else data)


class Server(Generic[Q]):
    """Answers the requests on one subject, at most ``concurrency`` at once. Whoever made it closes its ``tasks``."""

    def __init__(
        self,
        outbox: Outbox,
        subject: str,
        request_type: type[Q],
        handler: Callable[[Q], Awaitable[msgspec.Struct]],
        concurrency: int,
        *,
        to_asker: bool = False,
    ) -> None:
        """``to_asker``: the last token of a request's subject says which node asks, and nobody else is answered."""
        self.tasks = Tasks(f"serve {subject}")
        self._outbox = outbox
        self._subject = subject
        self._type = request_type
        self._handler = handler
        self._concurrency = concurrency
        self._to_asker = to_asker

    async def handle(self, message: Msg) -> None:
        """Begin to answer ``message``; above ``concurrency`` the answer is ``Unavailable``. What names another subject
        than an inbox is not answered: whoever asks may not speak there, or it would."""
        if message.reply and not message.reply.startswith(self._inbox(message.subject)):
            log.warning("a request on %s is refused: its answer is wanted at %s", message.subject, message.reply)
            return
        if len(self.tasks) >= self._concurrency:
            busy = Unavailable(f"{self._subject}: {self._concurrency} requests are being answered; try again")
            await self._answer(message, Reply(error=busy.body()))
            return
        self.tasks.start(self._serve(message), "request")

    def _inbox(self, subject: str) -> str:
        """What the answer's subject has to begin with."""
        return f"{subjects.inbox(subjects.NODE, subject.rpartition('.')[2])}." if self._to_asker else subjects.INBOXES

    async def _serve(self, message: Msg) -> None:
        with trace.within((message.headers or {}).get(trace.HEADER, "")):
            await self._handle(message)

    async def _handle(self, message: Msg) -> None:
        try:
            answer = await self._handler(codec.unpack(self._type, message.data))
            reply = Reply(value=msgspec.Raw(codec.pack(answer)))
        except SllmError as error:
            reply = Reply(error=error.body())
        except Exception as error:
            log.exception("answering %s failed", message.subject)
            reply = Reply(error=InternalError(f"{message.subject}: {type(error).__name__}: {error}").body())
        await self._answer(message, reply)

    async def _answer(self, message: Msg, reply: Reply) -> None:
        if not message.reply:
            return
        try:
            data = encode(reply, message.subject)
        except ProtocolError as error:
            data = codec.pack(Reply(error=InternalError(f"answer of {message.subject}: {error.message}").body()))
        try:
            await self._outbox.send(message.reply, data)
        except Unavailable as error:
            log.warning("an answer was lost: %s", error.message)

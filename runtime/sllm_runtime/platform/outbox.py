"""What waits to be sent: in order, bounded, without a task for each message."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import nats.errors

from sllm_runtime.platform.connection import PENDING_BYTES
from sllm_runtime.platform.direct import DirectClient
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.limits import MAX_MESSAGE, MIB, RPC_TIMEOUT_S

_MOST: Final = 64 * MIB


class Outbox:
    """In front of nats-py's own buffer, which it never makes a caller of ``send_now`` wait for."""

    def __init__(self, client: DirectClient, tasks: Tasks) -> None:
        self._client = client
        self._tasks = tasks
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._bytes = 0
        self._pump: asyncio.Task[None] | None = None
        self.lost = 0
        """Messages that found no room while the server was away."""

    async def send(self, subject: str, data: bytes) -> None:
        """Hand over to the connection, behind what waits. Raises ``Unavailable``."""
        if self._waiting:
            self._enqueue(subject, data)
        elif not self._client.publish_now(subject, data):
            await self._publish(subject, data)

    def send_now(self, subject: str, data: bytes) -> None:
        """Hand over or keep, without waiting. Raises ``Unavailable`` when 64 MiB wait."""
        client = self._client
        if not self._waiting and client.publish_now(subject, data):
            return
        if self._waiting or not client.is_connected or client.pending_data_size + len(data) > PENDING_BYTES // 2:
            self._enqueue(subject, data)
            return
        # nats-py's publish only buffers unless its buffer is full, which the line above rules out: one step ends it.
        sending = self._publish(subject, data)
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()

    @property
    def free(self) -> bool:
        """Whether the server is there and takes what it is sent: ``send_now`` would not keep anything."""
        return not self._waiting and self._client.is_connected and self._client.pending_data_size < PENDING_BYTES // 2

    def _enqueue(self, subject: str, data: bytes) -> None:
        if self._bytes > _MOST:
            raise Unavailable(f"NATS takes nothing: {self._bytes} bytes wait; {subject} was not sent")
        self._waiting.append((subject, data))
        self._bytes += len(data) + len(subject)
        if self._pump is None or self._pump.done():
            self._pump = self._tasks.start(self._send_waiting(), "send")

    async def _send_waiting(self) -> None:
        while self._waiting:
            subject, data = self._waiting[0]
            try:
                await self._publish(subject, data)
            except Unavailable:
                # The server is away and nats-py's buffer is full. Who needs it sends it again after the reconnect.
                self.lost += 1
            self._waiting.popleft()
            self._bytes -= len(data) + len(subject)

    async def _publish(self, subject: str, data: bytes) -> None:
        try:
            await self._client.publish(subject, data)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS does not take a message to {subject}: {text(error)}") from error

    async def drain(self) -> None:
        """Wait until nothing waits here. Raises ``Unavailable`` after 5 s."""
        if self._pump is not None and not self._pump.done():
            _done, waiting = await asyncio.wait([self._pump], timeout=RPC_TIMEOUT_S)
            if waiting:
                raise Unavailable(f"NATS takes nothing: {len(self._waiting)} messages wait")


def encode(message: Any, subject: str) -> bytes:
    """``message`` as it travels. Raises ``ProtocolError`` above MAX_MESSAGE."""
    data = codec.pack(message)
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(data)} bytes to {subject} is above the limit of {MAX_MESSAGE}")
    return data


def text(error: BaseException | None) -> str:
    """What an error of nats-py says; many say nothing but their name."""
    return str(error) or type(error).__name__

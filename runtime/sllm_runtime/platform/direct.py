"""nats-py's client with a short way in and out for the messages of running calls.

nats-py hands every message to a queue and a task of its subscription, and every publish to a task that writes it: two
more turns of the event loop for each message of each stream. Here a listener is called where its message is parsed,
and a message is written where it is published, whenever nothing waits before it. The rest (connecting, TLS, rights,
reconnecting, other subscriptions) is nats-py's own. What is overridden and read here is private to it: with a version
of it that works in another way all goes the ordinary way, and this module's tests fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import nats.errors
from nats.aio.client import Client, RawCredentials, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.limits import KIB

Listener: TypeAlias = Callable[[str, str, bytes, str], None]
"""Gets a message's subject, reply subject (or ""), data, and the status in its header (or ""). It must not raise: that
would end the connection."""
_STATUS: Final = slice(len(b"NATS/1.0 "), len(b"NATS/1.0 503"))
_WRITTEN_MOST: Final = 256 * KIB
"""Bytes that the socket has not taken yet, above which a message waits in nats-py's own buffer."""


def header_of(name: str, value: str) -> bytes:
    """One header, as it travels."""
    return f"NATS/1.0\r\n{name}: {value}\r\n\r\n".encode()


class DirectClient(Client):
    """``listen`` beside ``subscribe``, ``publish_now`` beside ``publish``."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[int, Listener] = {}
        self.heard = 0
        """Messages and answers to pings that came."""
        self.ended_by: Exception | None = None
        """What the last connection has ended by."""
        self.renewed: Callable[[], ssl.SSLContext | None] = lambda: None
        """TLS by its files, where these are others than they were."""

    async def listen(self, subject: str, listener: Listener) -> NatsSubscription:
        """Call ``listener`` for each message as soon as it is parsed: nothing is queued for it, and nothing dropped.
        A process that is too slow for what it listens to is disconnected by the server in the end."""

        async def ordinary(message: Msg) -> None:
            listener(message.subject, message.reply, message.data, (message.headers or {}).get("Status", ""))

        subscription = await self.subscribe(subject, cb=ordinary)
        self._listeners[getattr(subscription, "_id", 0)] = listener
        return subscription

    def publish_now(self, subject: str, data: bytes, reply: str = "", header: bytes = b"") -> bool:
        """Write a message in this turn of the loop, with a ``header`` as ``header_of`` makes it. False: something waits
        before it, or nobody is there."""
        if not self.is_connected or self.pending_data_size:
            return False
        transport = self._socket()
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > _WRITTEN_MOST:
            return False
        verb, size = ("HPUB", f"{len(header)} {len(header) + len(data)}") if header else ("PUB", str(len(data)))
        head = f"{verb} {subject} {reply} {size}\r\n" if reply else f"{verb} {subject} {size}\r\n"
        transport.write(b"%b%b%b\r\n" % (head.encode(), header, data))
        return True

    @property
    def server_certificate(self) -> bytes | None:
        """What the server has shown (DER); None without TLS, and while there is no connection."""
        transport = self._socket()
        tls = transport.get_extra_info("ssl_object") if transport is not None and self.is_connected else None
        shown: bytes | None = tls.getpeercert(binary_form=True) if tls is not None else None
        return shown

    def _socket(self) -> asyncio.WriteTransport | None:
        writer = getattr(getattr(self, "_transport", None), "_io_writer", None)
        return writer.transport if isinstance(writer, asyncio.StreamWriter) else None

    async def _connect_to_server(self, s: Srv) -> None:
        """At the first address of its name that takes the connection, each within ``connect_timeout``: nats-py gives
        that to all of them together and the resolver, so that one dead address, or a slow resolver, was the end of
        every try."""
        if (old := self._socket()) is not None:
            old.abort()  # of a try that was refused, or given up when it read already: nats-py leaves both as they are
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        with contextlib.suppress(SllmError):  # files that are half replaced: by those of before, and looked at again
            if (context := self.renewed()) is not None:
                self.options["tls"] = context
        s.last_attempt = time.monotonic()  # of a copy, below: nobody presses a server that ends each connection
        found = await asyncio.get_running_loop().getaddrinfo(s.uri.hostname, s.uri.port, type=socket.SOCK_STREAM)
        problem: Exception | None = None
        for host in dict.fromkeys(str(each[4][0]) for each in found):
            at = f"[{host}]" if ":" in host else host
            try:
                await super()._connect_to_server(replace(s, uri=s.uri._replace(netloc=f"{at}:{s.uri.port}")))
                return
            except (OSError, TimeoutError) as error:
                problem = error
        raise problem or OSError(f"{s.uri.hostname} has no address")

    def _connect_command(self) -> bytes:
        """A credentials file that is none (one that is just being written) fails this try alone: nats-py would make no
        other, and nobody would hear of it."""
        try:
            return super()._connect_command()
        except (OSError, nats.errors.Error):
            raise
        except Exception as error:
            raise nats.errors.Error(f"nats: the credentials are none ({type(error).__name__})") from error

    def _read_creds_user_jwt(self, creds: str | RawCredentials | Path) -> bytearray:
        """As nats-py, which reads on for ever where no line begins a JWT, and holds this process's loop."""
        said = creds if isinstance(creds, RawCredentials) else RawCredentials(Path(creds).read_text())
        if "BEGIN NATS USER JWT" not in said:
            raise nats.errors.Error("nats: the credentials are none (no JWT)")
        return bytearray(super()._read_creds_user_jwt(said))

    async def _process_op_err(self, e: Exception) -> None:
        """Remembered: nats-py tells nobody who connects anew why he has to."""
        if self.is_connected:
            self.ended_by = e
        await super()._process_op_err(e)

    async def _attempt_reconnect(self) -> None:
        """Without what the old connection has not taken: nats-py would wait until that is sent, and the kernel goes on
        with a connection that a link has silently dropped for a quarter of an hour."""
        if (old := self._socket()) is not None:
            old.abort()
        await super()._attempt_reconnect()

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._listeners.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_pong(self) -> None:
        """The answer to a ping that nobody waits for any more (a flush that was cancelled, or whose time was over) is
        taken like any other: nats-py would set a future that is done, fail, and never read again."""
        self.heard += 1
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.heard += 1
        listener = self._listeners.get(sid)
        if listener is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        listener(subject.decode(), reply.decode(), data, headers[_STATUS].decode() if headers else "")

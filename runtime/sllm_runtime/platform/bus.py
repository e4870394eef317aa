"""The bus: typed messages over NATS for one identity. Wraps nats-py and hides none of its losses.

Core NATS delivers at most once, so nothing here promises more. What was possibly lost is told: after a reconnect, and
when a slow subscriber of this process has dropped messages and has caught up, the ``on_reconnect`` callbacks run and
their owners ask for what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Self, TypeVar

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import JetStreamContext

from sllm_runtime.platform import requests
from sllm_runtime.platform.callbacks import Callback, Callbacks
from sllm_runtime.platform.connection import connection_options, is_refusal, open_connection
from sllm_runtime.platform.direct import DirectClient
from sllm_runtime.platform.outbox import Outbox, encode, text
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.subscription import Subscription
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.limits import MIB, RPC_TIMEOUT_S

__all__ = ["Bus", "Subscription"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)
Handler = Callable[[Msg], Awaitable[None]]

_CLOSE_S = 2.0
_AGAIN_S: Final = 60.0
"""A link that passes small packets alone lets a connection be made, and has it stand still with its first large
message; it takes 15 s to be given up."""

_PENDING_MESSAGES: Final = 65536
_PENDING_BYTES: Final = 64 * MIB


class Bus:
    """One connection. Make it with ``connect``, end it with ``close``."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._client = DirectClient()
        self._jetstream = self._client.jetstream()
        self._tasks = Tasks(f"bus {identity}")
        self._reconnected = Callbacks()
        self._disconnected = Callbacks()
        self._subscriptions: dict[NatsSubscription, Subscription] = {}
        self._outbox = Outbox(self._client, self._tasks)
        self._questions = requests.Questions(self._client)
        self._stood_still = -math.inf
        """When it was last given up for its silence."""
        self._closing, self._refused = False, True
        """``_refused``: it was said that NATS refuses this identity; who connects is told so himself."""

    @classmethod
    async def connect(
        cls, settings: Settings, identity: str, *, name: str, kind: str = "", jetstream: bool = True
    ) -> Self:
        """Connect as ``identity``; ``name`` is shown in the server's monitoring. ``kind``: what it is, one of
        ``subjects.RIGHTS``, where an identity file does not say it.

        ``jetstream=False`` (and always a node's identity file) leaves out the check that JetStream answers: a node has
        no right to its API and needs none, since it reads bundles by direct get and publishes logs plainly.

        Raises ``Unavailable`` if the server or its JetStream is missing, ``Unauthorized`` if it refuses this identity.
        """
        options = connection_options(settings, identity, kind)
        who = settings.identity()
        bus = cls(identity)
        try:
            await open_connection(
                bus._client,
                settings,
                identity,
                options,
                name=name,
                on_error=bus._error,
                on_disconnect=bus._when_disconnected,
                on_reconnect=bus._when_reconnected,
                on_closed=bus._when_closed,
                jetstream=jetstream and (who is None or who.kind != "node"),
            )
            bus._refused = False
            await bus._questions.start()
        except BaseException:
            await bus.close()
            raise
        return bus

    @property
    def connected(self) -> bool:
        """Whether the server is there at this moment."""
        return self._client.is_connected

    @property
    def heard(self) -> int:
        """How often something came from the server, which may stand still, or be out of reach, while ``connected``."""
        return self._client.heard

    @property
    def server_certificate(self) -> bytes | None:
        """The server's (DER), as this connection was shown it; None without TLS, and while it is gone."""
        return self._client.server_certificate

    @property
    def max_payload(self) -> int:
        """Most bytes of one message, its headers included, by the server's own word."""
        return self._client.max_payload

    @property
    def free(self) -> bool:
        """Whether the server is there and keeps up: what is published now does not wait here."""
        return self._outbox.free

    @property
    def jetstream(self) -> JetStreamContext:
        """nats-py's JetStream, on this connection."""
        return self._jetstream

    def new_inbox(self) -> str:
        """A subject that only this identity may listen to."""
        return self._client.new_inbox()

    # --- messages ---------------------------------------------------------------------------------
    async def publish(self, subject: str, message: Any) -> None:
        """Hand ``message`` to the connection, waiting while its buffer is full. Raises ``Unavailable``."""
        await self._outbox.send(subject, encode(message, subject))

    def publish_now(self, subject: str, message: Any) -> None:
        """``publish`` without waiting; what is published in one loop tick is written in one piece, in order. Raises
        ``Unavailable`` when so much waits that the connection cannot keep up."""
        self._outbox.send_now(subject, encode(message, subject))

    async def subscribe(
        self,
        subject: str,
        type_: type[T],
        handler: Callable[[T, str], Awaitable[None] | None],
        *,
        pending_messages: int = _PENDING_MESSAGES,
    ) -> Subscription:
        """Call ``handler(message, subject)`` for each message, one after another. Its exceptions are logged.

        The server knows of it when this returns. Of more than ``pending_messages``, or 64 MiB, that wait the newest
        are lost (see the module's text).
        """

        async def handle(message: Msg) -> None:
            try:
                result = handler(codec.unpack(type_, message.data), message.subject)
                if inspect.isawaitable(result):
                    await result
            except ProtocolError as error:
                log.warning("refused a message on %s: %s", message.subject, error.message)
            except Exception:
                log.exception("handling a message on %s failed", message.subject)
            if subscription.dropped and subscription.caught_up():
                subscription.dropped = False
                self._run(self._reconnected, "caught up")

        subscription = Subscription(subject)
        await self._queued(subscription, handle, most=pending_messages)
        return subscription

    async def listen(self, subject: str, handler: Callable[[str, str, bytes], None]) -> Subscription:
        """For the messages of running calls: call ``handler(subject, reply, data)`` where each is parsed, without a
        queue or a task between. It must not wait or work for long. Its exceptions are logged."""

        def handle(subject: str, reply: str, data: bytes, _status: str) -> None:
            try:
                handler(subject, reply, data)
            except ProtocolError as error:
                log.warning("refused a message on %s: %s", subject, error.message)
            except Exception:
                log.exception("handling a message on %s failed", subject)

        subscription = Subscription(subject)
        await self._begin(subscription, self._client.listen(subject, handle))
        return subscription

    async def subscribe_raw(self, subject: str, handler: Handler) -> Subscription:
        """``handler`` gets each message as nats-py made it: for JetStream's own answers."""
        subscription = Subscription(subject)
        await self._queued(subscription, handler)
        return subscription

    async def _queued(self, to: Subscription, handle: Handler, queue: str = "", most: int = _PENDING_MESSAGES) -> None:
        subscribing = self._client.subscribe(
            to.subject, queue, handle, pending_msgs_limit=most, pending_bytes_limit=_PENDING_BYTES
        )
        await self._begin(to, subscribing)

    async def _begin(self, subscription: Subscription, subscribing: Awaitable[NatsSubscription]) -> None:
        try:
            inner = await subscribing
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot subscribe to {subscription.subject}: {text(error)}") from error
        subscription.inner = inner
        self._subscriptions[inner] = subscription
        subscription.forget = partial(self._subscriptions.pop, inner, None)
        if self._client.is_connected:
            # So that who asks next is heard; if the server dies just now, nats-py subscribes again by itself.
            try:
                with contextlib.suppress(Unavailable):
                    await self.flush()
            except asyncio.CancelledError:  # nobody gets it, so nobody else could end it
                await subscription.unsubscribe()
                raise

    # --- requests ---------------------------------------------------------------------------------
    async def call(self, subject: str, request: Any, reply_type: type[R], *, timeout_s: float = RPC_TIMEOUT_S) -> R:
        """Ask and wait for the answer, or the error, in its ``Reply`` envelope.

        Raises what the other side raised, ``Unavailable`` if nobody serves ``subject``, ``DeadlineExceeded`` after
        ``timeout_s`` seconds.
        """
        return await self._questions.ask(subject, request, reply_type, timeout_s)

    async def ask_raw(self, subject: str, question: bytes, inbox: str) -> None:
        """Ask JetStream itself, which answers to ``inbox``: see ``subscribe_raw``. Raises ``Unavailable``."""
        try:
            if not self._client.publish_now(subject, question, inbox):
                await self._client.publish(subject, question, inbox)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot ask {subject}: {text(error)}") from error

    async def served(self, subject: str, message: Any, *, timeout_s: float) -> bool:
        """Whether anybody listens to ``subject``, by the server's word; whoever listens gets ``message``. True where it
        is not known: see ``Questions.served``."""
        return await self._questions.served(subject, message, timeout_s)

    async def serve(
        self,
        subject: str,
        request_type: type[Q],
        handler: Callable[[Q], Awaitable[msgspec.Struct]],
        *,
        queue: str = "",
        concurrency: int = 256,
        to_asker: bool = False,
    ) -> Subscription:
        """Answer requests on ``subject``, each in a task of its own, at most ``concurrency`` at once. ``to_asker``: its
        last token says which node asks, and nobody else is answered.

        An ``SllmError`` of ``handler`` is the answer; any other exception is logged and answered ``InternalError``.
        """
        server = requests.Server(self._outbox, subject, request_type, handler, concurrency, to_asker=to_asker)
        subscription = Subscription(subject)
        subscription.tasks = server.tasks
        await self._queued(subscription, server.handle, queue)
        return subscription

    # --- life -------------------------------------------------------------------------------------
    def on_reconnect(self, callback: Callback) -> Callable[[], None]:
        """Run ``callback`` whenever messages may have been lost. Returns a function that takes it off."""
        return self._reconnected.add(callback)

    def on_disconnect(self, callback: Callback) -> Callable[[], None]:
        """Run ``callback`` when the server is gone. Returns a function that takes it off."""
        return self._disconnected.add(callback)

    async def flush(self) -> None:
        """Wait until the server has everything published so far. Raises ``Unavailable``."""
        await self._outbox.drain()
        try:
            # nats-py writes the first ping before what it has buffered; the second comes after it.
            for _ in range(2):
                await self._client.flush(timeout=int(RPC_TIMEOUT_S))
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS does not answer: {text(error)}") from error

    async def close(self) -> None:
        """Send what waits (at most 2 s), then disconnect. Repeatable."""
        if self._closing:
            return
        self._closing = True
        if self._client.is_connected:
            with contextlib.suppress(TimeoutError, SllmError):
                async with asyncio.timeout(_CLOSE_S):
                    await self.flush()
        for subscription in list(self._subscriptions.values()):
            if subscription.tasks is not None:
                await subscription.tasks.close()
        await self._tasks.close()
        with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
            async with asyncio.timeout(_CLOSE_S):
                await self._client.close()

    async def _error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            subscription = self._subscriptions.get(error.sub)
            if subscription is not None and not subscription.dropped:
                subscription.dropped = True
                log.error("messages on %s were lost: the subscriber is slow", subscription.subject)
            return
        if is_refusal(error) and not self._client.is_connected and not self._refused:
            self._refused = True
            log.warning(
                "NATS refuses %s: %s; asked again for ever: see SLLM_NATS_CREDS, SLLM_NATS_CA and"
                " SLLM_NATS_CERT, whose files are read anew each time",
                self.identity,
                text(error),
            )
        level = logging.ERROR if "permissions violation" in str(error).lower() else logging.DEBUG
        log.log(level, "NATS: %s", text(error))

    async def _when_disconnected(self) -> None:
        if self._closing:
            return
        why, self._client.ended_by = self._client.ended_by, None
        log.warning("NATS is gone (%s); reconnecting", "closed by it" if why is None else text(why))
        if isinstance(why, nats.errors.StaleConnectionError) and not isinstance(why, nats.errors.UnexpectedEOF):
            now = asyncio.get_running_loop().time()
            if now - self._stood_still < _AGAIN_S:
                log.error(
                    "the connection to NATS stands still again and again: a link that loses large packets does that; "
                    "compare the MTU of this machine's network with that on the way (`ping -M do -s 1472`, `tracepath`)"
                )
            self._stood_still = now
        self._run(self._disconnected, "disconnected")

    async def _when_reconnected(self) -> None:
        log.info("NATS is there again; %d messages were not sent meanwhile", self._outbox.lost)
        self._outbox.lost, self._refused = 0, False
        self._run(self._reconnected, "reconnected")

    async def _when_closed(self) -> None:
        if self._closing:
            return
        # The server has thrown this identity out. Nothing works any more: let it crash, the supervisor starts anew.
        log.critical("NATS has closed the connection for good: %s", text(self._client.last_error))
        os.kill(os.getpid(), signal.SIGTERM)

    def _run(self, callbacks: Callbacks, name: str) -> None:
        if not self._closing:
            self._tasks.start(callbacks.run(), name)

"""The worker's side: one connection to loaderd, blocking calls with deadlines, threads behind them. No torch."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any, cast

from sllm_loaderd.client.load import DEADLINE_S, SessionLoad
from sllm_runtime.platform import descriptors
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol.codec import pack, unpack
from sllm_runtime.protocol.errors import InstanceLost, ProtocolError, SllmError
from sllm_runtime.protocol.loader import (
    CPU,
    START,
    Answer,
    Chunks,
    DeviceMemory,
    Failed,
    Files,
    Hello,
    Load,
    Message,
    Welcome,
)

log = logging.getLogger(__name__)


def _decoded(payload: bytes) -> Answer:
    answer: Answer = unpack(cast(Any, Answer), payload)
    return answer


def _lost(why: str) -> InstanceLost:
    """Another loaderd has no load of this session: its instance is to begin anew, and may at once."""
    return InstanceLost(f"the node's loaderd {why}; call again", stage="weights")


class LoaderSession:
    """A sandbox's connection to loaderd, from the descriptor that its invoker handed over. Owns it.
    Without loaderd it is of no use, and its loads raise ``InstanceLost``: that says nothing of the model.

    Its reader thread starts here, so open it after any fork.
    """

    def __init__(self, fd: int, *, name: str = "", timeout: float = DEADLINE_S) -> None:
        descriptors.make_room(descriptors.OF_WORKER)
        sock = socket.socket(fileno=fd)
        sock.settimeout(timeout)
        self._wire = BlockingWire(sock)
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._loads: dict[int, SessionLoad] = {}
        self._closed = False
        try:
            self._welcome = self._greet(name)
        except BaseException:
            self._wire.close()
            raise
        sock.settimeout(None)  # from here on the reader waits for as long as the connection lives
        self._reader = threading.Thread(target=self._read, name="sllm-loader", daemon=True)
        self._reader.start()

    @property
    def model(self) -> str:
        """Digest of the model that this session has rights to."""
        return self._welcome.model

    @property
    def partitions(self) -> tuple[int, ...]:
        """Partitions it has rights to; empty: all."""
        return self._welcome.partitions

    @property
    def adapters(self) -> tuple[str, ...]:
        """Digests of the adapters (LoRA) that it may load beside the model."""
        return self._welcome.adapters

    def load(
        self,
        partition: int = 0,
        blocks: Sequence[tuple[int, int]] = (),
        *,
        device: str = CPU,
        priority: str = START,
        adapter: str = "",
    ) -> SessionLoad:
        """Ask for a partition, or ordered ranges of its blocks; returns at once. Raises ``InstanceLost``.

        ``device``: where its memory shall be: ``cpu`` or what the node has (``fake:0``, ``cuda:0``).
        ``adapter``: one of ``adapters``, in place of the model.
        """
        number = next(self._numbers)
        load = SessionLoad(self.send, self._drop, number, partition)
        self._loads[number] = load
        request = Load(
            request=number,
            partition=partition,
            blocks=tuple(blocks),
            device=device,
            priority=priority,
            model=adapter or self.model,
        )
        try:
            self.send(request)
        except InstanceLost:
            del self._loads[number]
            raise
        return load

    def send(self, message: Message) -> None:
        """Send one message. Raises ``InstanceLost`` if loaderd is gone."""
        try:
            with self._sending:
                self._wire.send(pack(message))
        except OSError as error:
            raise _lost(f"is gone: {error}") from error

    def _drop(self, number: int) -> None:
        """Forget a load."""
        self._loads.pop(number, None)

    def close(self) -> None:
        """End the connection. Mappings stay until they are detached. Repeatable."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wire.sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _greet(self, name: str) -> Welcome:
        try:
            self._wire.send(pack(Hello(name=name)))
            payload = self._wire.receive()
        except OSError as error:
            raise _lost(f"does not answer: {error}") from error
        if payload is None:
            raise _lost("closed the connection")
        message = _decoded(payload)
        if isinstance(message, Failed):
            raise message.error.to_error()
        if not isinstance(message, Welcome):
            raise ProtocolError(f"loaderd answered {type(message).__name__} to a hello")
        return message

    def _read(self) -> None:
        """Hand messages to their loads until the end. A thread of its own."""
        error: SllmError = _lost("is gone")
        try:
            while (payload := self._wire.receive()) is not None:
                self._dispatch(payload)
        except OSError as failure:
            if not self._closed:
                log.warning("connection to loaderd: %s", failure)
        except SllmError as failure:
            error = failure
        finally:
            for load in list(self._loads.values()):
                load.fail(error)
            self._wire.close()

    def _dispatch(self, payload: bytes) -> None:
        message = _decoded(payload)
        fds = self._wire.fds.take(message.fds) if isinstance(message, Files | Chunks | DeviceMemory) else []
        load = self._loads.get(getattr(message, "request", 0))
        if load is not None:
            load.heard(message, fds)
            return
        for fd in fds:
            os.close(fd)
        # That of a load which was let go meanwhile concerns nobody; of the connection itself it ends everything.
        if isinstance(message, Failed) and not message.request:
            raise message.error.to_error()

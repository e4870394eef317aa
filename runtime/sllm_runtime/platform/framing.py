"""Bytes of a unix stream socket into messages: u32 big-endian length + payload, descriptors by SCM_RIGHTS. Sans-I/O but
for ``receive``, which reads both once.

A message that carries descriptors says how many in its own ``fds`` field; they arrive no later than its first byte.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable

from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.limits import MAX_FDS, MAX_MESSAGE

HEADER = struct.Struct(">I")
READ_BYTES = 256 * 1024
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


class Splitter:
    """Bytes in, whole payloads out."""

    def __init__(self, max_message: int = MAX_MESSAGE) -> None:
        self._buffer = bytearray()
        self._max = max_message

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Payloads that are complete now; ``data`` is the caller's again afterwards. Raises ``ProtocolError`` when a
        length is above the limit."""
        if not self._buffer:  # nearly always: a read ends where a message does
            payloads, used = self._split(data)
            self._buffer += data[used:]
            return payloads
        self._buffer += data
        payloads, used = self._split(self._buffer)
        del self._buffer[:used]
        return payloads

    def _split(self, data: bytes | bytearray | memoryview) -> tuple[list[bytes], int]:
        """Whole payloads at the beginning of ``data``, and how many bytes of it they take."""
        payloads: list[bytes] = []
        start, size = 0, len(data)
        while size - start >= HEADER.size:
            (length,) = HEADER.unpack_from(data, start)
            if length > self._max:
                raise ProtocolError(f"message of {length} bytes is above the limit of {self._max}")
            end = start + HEADER.size + length
            if end > size:
                break
            payloads.append(bytes(data[start + HEADER.size : end]))
            start = end
        return payloads, start


class Descriptors:
    """Descriptors that arrived and were not taken yet, at most ``most``; owns them until ``take``."""

    def __init__(self, most: int = 4 * MAX_FDS) -> None:
        self._most = most
        self._waiting: deque[int] = deque()

    def add(self, fds: Iterable[int]) -> None:
        self._waiting.extend(fds)
        if len(self._waiting) > self._most:
            self.close()
            raise ProtocolError("more descriptors arrived than messages name")

    def take(self, count: int) -> list[int]:
        """The next ``count`` descriptors; the caller owns them. Raises ``ProtocolError`` if they are not here."""
        if count > len(self._waiting):
            raise ProtocolError(f"message names {count} descriptors, {len(self._waiting)} arrived")
        return [self._waiting.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close what nobody took."""
        while self._waiting:
            os.close(self._waiting.popleft())


def frame(payload: bytes) -> bytes:
    """``payload`` as it travels. Raises ``ProtocolError`` above MAX_MESSAGE."""
    if len(payload) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(payload)} bytes is above the limit of {MAX_MESSAGE}")
    return HEADER.pack(len(payload)) + payload


def receive(sock: socket.socket, fds: Descriptors, into: bytearray) -> memoryview:
    """One ``recvmsg``: what it brought, valid until the next one; nothing at the end of the stream.

    ``into`` is the reader's own, of READ_BYTES. Memory made for each read would be mapped, shrunk and unmapped again by
    the kernel, which takes longer than most messages.
    """
    size, ancillary, _flags, _address = sock.recvmsg_into([into], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            fds.add(numbers)
    return memoryview(into)[:size]

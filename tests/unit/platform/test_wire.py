"""Framing over unix sockets, with descriptors; sans-I/O parts by Hypothesis, the rest on real socket pairs."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.platform import wire as wire_module
from sllm_runtime.platform.framing import HEADER, Descriptors, Splitter
from sllm_runtime.platform.wire import AsyncWire, BlockingWire
from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.limits import MAX_FDS, MAX_MESSAGE
from tests.fixtures.waiting import GIVE_UP_S, until


def framed(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


@given(payloads=st.lists(st.binary(max_size=200), max_size=10), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_payloads_come_out_whole_however_the_bytes_are_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(framed(payload) for payload in payloads)
    splitter, found, at = Splitter(), [], 0
    read = bytearray(max(cuts))  # every read is into the same memory
    for turn in range(len(stream) + 1):
        piece = stream[at : at + cuts[turn % len(cuts)]]
        read[: len(piece)] = piece
        found += splitter.feed(memoryview(read)[: len(piece)])
        at += len(piece)
        if at >= len(stream):
            break
    assert found == payloads


def test_a_length_above_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError, match="above the limit"):
        Splitter(100).feed(HEADER.pack(101))


def test_descriptors_that_did_not_come_cannot_be_taken() -> None:
    with pytest.raises(ProtocolError, match="names 1 descriptors, 0 arrived"):
        Descriptors().take(1)


def test_a_flood_of_descriptors_is_closed_and_refused() -> None:
    fds = Descriptors()
    read, write = os.pipe()
    with pytest.raises(ProtocolError, match="more descriptors"):
        fds.add(os.dup(read) for _ in range(4 * MAX_FDS + 1))
    os.close(read)
    os.close(write)  # the leak check of every test sees to the rest


ROOM = """
import os
from sllm_runtime.platform.descriptors import OF_WORKER, make_room
def size():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("FDSize"))
before = sorted(os.listdir("/proc/self/fd"))
make_room(OF_WORKER)
print(size(), before == sorted(os.listdir("/proc/self/fd")))
"""


def test_room_for_descriptors_is_made_before_they_come() -> None:
    said = subprocess.run([sys.executable, "-c", ROOM], capture_output=True, text=True, check=True, timeout=GIVE_UP_S)
    size, same = said.stdout.split()
    assert int(size) >= 2 * MAX_FDS
    assert same == "True"  # and none of them is left open


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def test_blocking_wires_exchange_messages_and_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = BlockingWire(pair[0]), BlockingWire(pair[1])
    pipes = [os.pipe() for _ in range(100)]
    fds = [fd for pipe in pipes for fd in pipe]
    left.send(b"fds", fds)
    left.send(b"")
    left.send(b"plain")
    assert right.receive() == b"fds"
    got = right.fds.take(len(fds))
    assert [inode(fd) for fd in got] == [inode(fd) for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in got)
    assert (right.receive(), right.receive()) == (b"", b"plain")
    left.close()
    assert right.receive() is None
    right.close()
    for fd in fds + got:
        os.close(fd)


def test_a_blocking_wire_sends_more_than_the_kernel_buffers(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = BlockingWire(pair[0]), BlockingWire(pair[1])
    data = os.urandom(MAX_MESSAGE)
    read, write = os.pipe()

    def send() -> None:
        for _ in range(4):
            left.send(data, [read])

    sender = threading.Thread(target=send)
    sender.start()
    got = [right.receive() for _ in range(4)]
    sender.join(GIVE_UP_S)
    assert got == [data] * 4
    for fd in [*right.fds.take(4), read, write]:
        os.close(fd)


def test_what_nobody_took_is_closed_with_the_wire(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = BlockingWire(pair[0]), BlockingWire(pair[1])
    read, write = os.pipe()
    left.send(b"x", [write])
    assert right.receive() == b"x"
    os.close(write)
    right.close()
    assert os.read(read, 1) == b""  # the last copy of the other end is closed
    os.close(read)


async def test_async_wires_keep_the_order_and_hand_over_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = AsyncWire(pair[0]), AsyncWire(pair[1])
    read, write = os.pipe()
    messages = [os.urandom(size) for size in (0, 1, 100_000, 300_000, 5)]
    for message in messages:
        left.send(message, [read])
    os.close(read)  # the wire has its own
    for message in messages:
        assert await asyncio.wait_for(right.receive(), GIVE_UP_S) == message
        (fd,) = right.fds.take(1)
        os.close(fd)
    await asyncio.wait_for(left.drain(), GIVE_UP_S)
    left.close()
    assert await asyncio.wait_for(right.receive(), GIVE_UP_S) is None
    right.close()
    os.close(write)


def send(wire: AsyncWire, payload: bytes, times: int) -> None:
    for _ in range(times):
        wire.send(payload)


async def test_what_is_sent_together_is_read_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    wire, peer = AsyncWire(pair[0]), BlockingWire(pair[1])
    wire.send_together(bytes([number]) for number in range(5))
    assert await asyncio.to_thread(peer.receive_all) == [bytes([number]) for number in range(5)]
    wire.close()
    with pytest.raises(Unavailable):
        wire.send_together([b"1"])
    peer.close()


async def test_a_peer_that_takes_nothing_ends_in_unavailable_not_in_memory(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left = AsyncWire(pair[0])
    with pytest.raises(Unavailable, match="takes nothing"):
        send(left, bytes(MAX_MESSAGE), 100)
    left.close()


async def test_sending_to_a_peer_that_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    left = AsyncWire(pair[0])
    pair[1].close()
    with pytest.raises(Unavailable, match="is gone"):
        send(left, b"x", 3)
    await asyncio.wait_for(left.drain(), GIVE_UP_S)
    assert await left.receive() is None


async def test_what_a_peer_had_sent_before_it_went_is_received(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = AsyncWire(pair[0]), BlockingWire(pair[1])
    for number in range(3):
        right.send(b"%d" % number)
    right.close()
    left.send(b"too late")
    assert left.peer_gone
    assert [await left.receive() for _ in range(4)] == [b"0", b"1", b"2", None]
    left.close()


async def test_close_wakes_a_receiver(pair: tuple[socket.socket, socket.socket]) -> None:
    wire = AsyncWire(pair[0])
    receiving = asyncio.ensure_future(wire.receive())
    await asyncio.sleep(0)
    wire.close()
    wire.close()
    assert await asyncio.wait_for(receiving, GIVE_UP_S) is None


async def test_a_cancelled_receive_can_be_repeated(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = AsyncWire(pair[0]), AsyncWire(pair[1])
    receiving = asyncio.ensure_future(right.receive())
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    left.send(b"later")
    assert await asyncio.wait_for(right.receive(), GIVE_UP_S) == b"later"
    left.close()
    right.close()


async def test_messages_that_nobody_asks_for_stay_with_the_kernel(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = BlockingWire(pair[0]), AsyncWire(pair[1], max_fds=1)
    for number in range(3):
        read, write = os.pipe()
        left.send(b"%d" % number, [read])  # each has its descriptor; only one may wait to be taken
        os.close(read)
        os.close(write)
    for number in range(3):
        assert await asyncio.wait_for(right.receive(), GIVE_UP_S) == b"%d" % number
        await asyncio.sleep(0)
        (fd,) = right.fds.take(1)
        os.close(fd)
    left.close()
    assert await asyncio.wait_for(right.receive(), GIVE_UP_S) is None
    right.close()


async def test_what_is_no_message_is_told_to_who_receives(pair: tuple[socket.socket, socket.socket]) -> None:
    right = AsyncWire(pair[1])
    pair[0].sendall(b"\xff" * 100)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="above the limit"):
            await asyncio.wait_for(right.receive(), GIVE_UP_S)
    right.close()


def test_too_large_a_message_is_refused_by_the_sender(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ProtocolError, match="above the limit"):
        BlockingWire(pair[0]).send(bytes(MAX_MESSAGE + 1))


async def test_a_listener_gets_all_messages_in_order_where_they_are_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = AsyncWire(pair[0]), AsyncWire(pair[1])
    left.send(b"early")
    assert await asyncio.wait_for(right.receive(), GIVE_UP_S) == b"early"
    messages = [os.urandom(size) for size in (0, 1, 100_000, 300_000, 5)]
    for message in messages:
        left.send(message)
    got: list[bytes] = []
    listening = asyncio.create_task(right.listen(got.append))
    await until(lambda: len(got) == len(messages))
    left.send(b"late")
    await until(lambda: len(got) > len(messages))
    assert got == [*messages, b"late"]
    left.close()
    await asyncio.wait_for(listening, GIVE_UP_S)
    assert await asyncio.wait_for(right.receive(), GIVE_UP_S) is None
    right.close()


@pytest.mark.parametrize("error", [ValueError("mine"), ConnectionResetError("mine"), BlockingIOError("mine")])
async def test_what_a_listener_raises_ends_its_listening(
    pair: tuple[socket.socket, socket.socket], error: Exception
) -> None:
    left, right = AsyncWire(pair[0]), AsyncWire(pair[1])
    got: list[bytes] = []

    def listener(payload: bytes) -> None:
        got.append(payload)
        if len(got) == 3:
            raise error

    send(left, b"x", 2)
    listening = asyncio.create_task(right.listen(listener))
    await until(lambda: len(got) == 2)
    left.send(b"y")
    with pytest.raises(type(error), match="mine"):
        await asyncio.wait_for(listening, GIVE_UP_S)
    assert got == [b"x", b"x", b"y"]
    left.close()
    right.close()


async def test_who_no_longer_listens_leaves_the_rest_to_who_receives(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = AsyncWire(pair[0]), AsyncWire(pair[1])
    got: list[bytes] = []
    listening = asyncio.create_task(right.listen(got.append))
    left.send(b"a")
    await until(lambda: got == [b"a"])
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    left.send(b"b")
    assert await asyncio.wait_for(right.receive(), GIVE_UP_S) == b"b"
    listening = asyncio.create_task(right.listen(got.append))
    await asyncio.sleep(0)
    right.close()
    await asyncio.wait_for(listening, GIVE_UP_S)
    left.close()
    assert got == [b"a"]


async def test_a_listener_hears_of_a_broken_framing(pair: tuple[socket.socket, socket.socket]) -> None:
    right = AsyncWire(pair[1])
    listening = asyncio.create_task(right.listen(lambda _payload: None))
    pair[0].sendall(HEADER.pack(MAX_MESSAGE + 1))
    with pytest.raises(ProtocolError, match="above the limit"):
        await asyncio.wait_for(listening, GIVE_UP_S)
    right.close()


class Short:
    """A kernel that refuses the first ``times`` messages with descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> None:
        self.left = times
        really = socket.send_fds

        def send_fds(sock: socket.socket, data: list[bytes], fds: list[int]) -> int:
            if self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number))
            return really(sock, data, fds)

        monkeypatch.setattr(socket, "send_fds", send_fds)


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM])
async def test_what_the_kernel_has_no_room_for_is_sent_later(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """In its order, with its descriptors: the peer is there, and would wait for it for ever."""
    left, right = AsyncWire(pair[0]), AsyncWire(pair[1])
    short = Short(monkeypatch, number, 3)
    read, write = os.pipe()
    left.send(b"1", [read])
    left.send(b"2")
    assert not left.peer_gone
    await asyncio.wait_for(left.drain(), GIVE_UP_S)
    assert short.left == 0
    assert [await right.receive() for _ in range(2)] == [b"1", b"2"]
    (got,) = right.fds.take(1)
    assert inode(got) == inode(read)
    for fd in (got, read, write):
        os.close(fd)
    left.close()
    right.close()


async def test_of_descriptors_that_cannot_all_be_sent_none_stays_open(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left = AsyncWire(pair[0])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        left.send(b"1", [0, 0, 1_000_000])
    assert len(os.listdir("/proc/self/fd")) == before
    left.send(b"2")
    pair[1].setblocking(True)
    assert pair[1].recv(9) == HEADER.pack(1) + b"2"
    left.close()


async def test_a_shortage_that_is_over_does_not_count_for_the_next(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = AsyncWire(pair[0]), AsyncWire(pair[1])
    monkeypatch.setattr(wire_module, "SHORT_S", 0.1)
    for payload in (b"1", b"2"):
        short = Short(monkeypatch, errno.ENOBUFS, 1)
        left.send(payload, [0])
        await asyncio.wait_for(left.drain(), GIVE_UP_S)
        assert short.left == 0
        assert not left.peer_gone
        assert await asyncio.wait_for(right.receive(), GIVE_UP_S) == payload
        await asyncio.sleep(wire_module.SHORT_S)
    left.close()
    right.close()


async def test_who_can_send_nothing_is_told(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever receives: a peer that lacks what was sent says nothing."""
    left = AsyncWire(pair[0])
    monkeypatch.setattr(wire_module, "SHORT_S", 0.0)
    Short(monkeypatch, errno.ETOOMANYREFS, 100)
    receiving = asyncio.ensure_future(left.receive())
    await asyncio.sleep(0)
    left.send(b"1", [0])
    with pytest.raises(Unavailable, match=r"nothing can be sent over this socket: .* Too many references"):
        await asyncio.wait_for(receiving, GIVE_UP_S)
    with pytest.raises(Unavailable):
        left.send(b"2")
    await asyncio.wait_for(left.drain(), GIVE_UP_S)
    left.close()


async def test_a_wire_that_waits_for_the_kernel_can_be_closed(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = AsyncWire(pair[0])
    short = Short(monkeypatch, errno.ENOMEM, 1)
    left.send(b"1", [0])
    assert short.left == 0
    left.close()
    await asyncio.wait_for(left.drain(), GIVE_UP_S)
    await asyncio.sleep(2 * wire_module._AGAIN_S)
    pair[1].setblocking(False)
    assert pair[1].recv(1) == b""

"""Ranges of an HTTP server: what is resumed, what is repeated, what is refused and how it is said."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.reader import SourceClosed
from sllm_loaderd.sources import Entry, open_source
from sllm_loaderd.sources.attempts import GAIN, Attempts, RemoteLimits, TryAgain
from sllm_loaderd.sources.connection import Connection, Connections, parse_head, split_url
from sllm_loaderd.sources.http import HttpSource
from sllm_loaderd.sources.remote import Remote
from sllm_loaderd.sources.remote_object import RemoteObject
from sllm_runtime.protocol.errors import (
    Conflict,
    CorruptCheckpoint,
    Forbidden,
    InvalidCheckpoint,
    ModelNotFound,
    ProtocolError,
    SllmError,
    Unavailable,
)
from tests.fixtures.certificates import make_certificates
from tests.fixtures.range_server import RangeServer, range_server
from tests.fixtures.waiting import GIVE_UP_S, until

SIZE = 300_000
PATIENT = RemoteLimits(GIVE_UP_S, GIVE_UP_S, attempts=3, first_delay_s=0.001, longest_delay_s=0.01)
HASTY = replace(PATIENT, stall_s=0.3)
"""For a server that stalls; one on a busy machine may do so unasked."""
STUBBORN = replace(HASTY, attempts=100)


@pytest.fixture
def data() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def server(tmp_path: Path, data: bytes) -> Iterator[RangeServer]:
    (tmp_path / "weights.bin").write_bytes(data)
    with range_server(tmp_path) as running:
        yield running


@contextlib.contextmanager
def opened(server: RangeServer, limits: RemoteLimits = PATIENT, **changes: object) -> Iterator[RemoteObject]:
    remote = Remote("http test", limits=limits)
    entry = {entry.name: entry for entry in [Entry("weights.bin", SIZE)]}["weights.bin"]
    fields = {"name": entry.name, "nbytes": entry.nbytes, "etag": entry.etag, **changes}
    try:
        yield RemoteObject(remote, f"{server.url}/weights.bin", Entry(**fields))  # type: ignore[arg-type]
    finally:
        remote.close()


def read(source: RemoteObject, offset: int = 0, count: int = SIZE) -> bytes:
    buffer = bytearray(count)
    source.read(memoryview(buffer), offset)
    return bytes(buffer)


def test_ranges_come_over_one_connection(server: RangeServer, data: bytes) -> None:
    with opened(server) as source:
        assert read(source) == data
        assert read(source, 1000, 17) == data[1000:1017]
        assert read(source, SIZE - 1, 1) == data[-1:]
        assert read(source, 5, 0) == b""
    assert server.connections == 1
    assert server.ranges == [f"bytes=0-{SIZE - 1}", "bytes=1000-1016", f"bytes={SIZE - 1}-{SIZE - 1}"]


async def test_connections_that_the_server_has_reset_cost_no_attempt(
    server: RangeServer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be more of them than attempts, and a server that is there."""
    theirs: list[socket.socket] = []
    accept = server.process_request

    def kept(request: Any, address: Any) -> None:
        theirs.append(request)
        accept(request, address)

    monkeypatch.setattr(server, "process_request", kept)
    with opened(server) as source:
        idle = kept_idle(server, source, 2 * PATIENT.attempts)
        for request in theirs:
            request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.shutdown(socket.SHUT_RD)  # its thread closes it, by a reset
        await until(lambda: not any(map(is_connected, idle)), what="all are reset")
        assert await asyncio.to_thread(read, source) == data


async def test_connections_that_went_silent_cost_one_attempt(server: RangeServer, data: bytes) -> None:
    """What translates addresses has forgotten them, or this node has another address by now: nobody resets them, there
    are more of them than attempts, and a server that is there."""
    with opened(server, HASTY) as source, contextlib.ExitStack() as stack:
        for connection in kept_idle(server, source, 2 * HASTY.attempts):
            here, there = socket.socketpair()
            stack.callback(there.close)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(HASTY.stall_s * 1e6)))
            connection._socket.close()
            connection._socket = here  # takes what is sent, and never says anything
        assert await asyncio.to_thread(read, source) == data


def kept_idle(server: RangeServer, source: RemoteObject, count: int) -> list[Connection]:
    """So many connections of the source, each used once and kept for the next load."""
    connections = source._remote._connections
    origin, target = split_url(f"{server.url}/weights.bin")
    idle = [connections.take(origin)[0] for _ in range(count)]
    for connection in idle:
        connection.request("HEAD", target, {})
        connections.give_back(connection)
    return idle


def is_connected(connection: Connection) -> bool:
    try:
        connection._socket.getpeername()
    except OSError:
        return False
    return True


def test_a_torn_connection_resumes_where_it_broke(server: RangeServer, data: bytes) -> None:
    server.script.extend(["cut 100000", "cut 0", "cut 150000", None])
    with opened(server) as source:
        assert read(source, 10, SIZE - 10) == data[10:]
    assert [int(text.split("=")[1].split("-")[0]) for text in server.ranges] == [10, 100_010, 100_010, 250_010]


@pytest.mark.parametrize(
    "word", ["status 500", "status 503", "status 520", "status 529", "later 429 0", "rubbish", "cut 0", "stall 10"]
)
def test_what_may_pass_is_tried_again(server: RangeServer, data: bytes, word: str) -> None:
    server.script.extend([word, word])
    with opened(server, STUBBORN if word.startswith("stall") else PATIENT) as source:
        assert read(source, 7, 5000) == data[7:5007]


@pytest.mark.parametrize(
    "word", ["status 500", "status 429", "rubbish", "endless-head", "slow-head", "cut 10", "stall 0", "trickle"]
)
def test_patience_ends_with_an_error_that_names_object_and_offset(server: RangeServer, word: str) -> None:
    server.script.extend([word] * PATIENT.attempts)
    limits = HASTY if word in ("stall 0", "trickle", "slow-head") else PATIENT
    with opened(server, limits) as source, pytest.raises(Unavailable, match=r"weights\.bin \(bytes \d+ to 200000\)"):
        read(source, 100_000, 100_000)
    # A hasty one may be gone before a server that had no processor has heard of it.
    assert len(server.ranges) == PATIENT.attempts or limits is HASTY


@pytest.mark.parametrize(
    ("word", "error", "text"),
    [
        ("status 401", Forbidden, "refused with 401.*Said.*credentials"),
        ("status 403", Forbidden, "refused with 403"),
        ("status 404", ModelNotFound, "not there"),
        ("status 412", Conflict, "has changed"),
        ("status 416", Conflict, "has changed"),
        ("status 418", Unavailable, "answered 418"),
        ("wrong-range", Unavailable, "other than what was asked for"),
        ("short-length", Unavailable, "other than what was asked for"),
        ("bigger", Conflict, f"has {SIZE + 1} bytes, not {SIZE}"),
        ("no-ranges", Unavailable, "range requests"),
    ],
)
def test_a_refusal_is_final_and_says_what_to_do(
    server: RangeServer, word: str, error: type[SllmError], text: str
) -> None:
    server.script.append(word)
    with opened(server) as source:
        with pytest.raises(error, match=rf"(?s)weights\.bin \(bytes 10 to 110\).*{text}"):
            read(source, 10, 100)
        assert len(server.ranges) == 1
        assert len(read(source, 10, 100)) == 100  # the next read is served again


def test_an_object_that_changes_is_refused(server: RangeServer, tmp_path: Path, data: bytes) -> None:
    source = HttpSource(server.url)
    entry = Entry("weights.bin", SIZE, "0123456789abcdef")
    with contextlib.closing(source), pytest.raises(Conflict, match="has changed since it was registered"):
        read(source.open(entry))
    with opened(server, etag="W/weak") as weak, pytest.raises(Conflict, match="entity tag"):
        read(weak)  # If-Match does not know weak tags: the answer's own is compared


def test_an_answer_of_the_whole_object_serves_a_read_of_the_whole(server: RangeServer, data: bytes) -> None:
    server.script.append("no-ranges")
    with opened(server) as source:
        assert read(source) == data


def test_redirects_are_remembered_and_given_up_when_they_no_longer_serve(server: RangeServer, data: bytes) -> None:
    server.script.extend(
        [f"to {server.url}/weights.bin?signed", None, None, "status 403", "to /weights.bin?again", None]
    )
    with opened(server) as source:
        for offset in (0, 100, 200):
            assert read(source, offset, 50) == data[offset : offset + 50]
    assert len(server.ranges) == 6
    server.script.extend(["to /weights.bin"] * 20)
    with opened(server) as source, pytest.raises(Unavailable, match="redirects"):
        read(source)


@pytest.mark.parametrize("word", ["status 503", "cut 0"])
def test_where_we_were_sent_to_is_left_when_it_fails(
    server: RangeServer, tmp_path: Path, data: bytes, word: str
) -> None:
    """The address that was registered still serves, and knows where the bytes are now."""
    with range_server(tmp_path) as mirror, opened(server) as source:
        server.script.append(f"to {mirror.url}/weights.bin")
        assert read(source, 0, 50) == data[:50]
        mirror.script.extend([word] * 20)
        assert read(source, 100, 50) == data[100:150]


def test_where_we_were_sent_to_is_tried_again_before_it_is_left(
    server: RangeServer, tmp_path: Path, data: bytes
) -> None:
    """A hub that is down, or refuses more of its redirects, is not needed for what one cut connection lacks."""
    with range_server(tmp_path) as mirror, opened(server) as source:
        server.script.append(f"to {mirror.url}/weights.bin")
        assert read(source, 0, 50) == data[:50]
        server.script.extend(["status 503"] * 20)
        mirror.script.append("cut 10")
        assert read(source, 100, 50) == data[100:150]


def test_where_we_were_sent_to_has_not_failed_where_it_brings_much_each_time(
    server: RangeServer, tmp_path: Path, data: bytes
) -> None:
    """A chunk takes many cut connections as long as each brings some of it (``GAIN``)."""
    with range_server(tmp_path) as mirror, opened(server) as source:
        server.script.append(f"to {mirror.url}/weights.bin")
        assert read(source, 0, 50) == data[:50]
        server.script.extend(["status 503"] * 20)
        mirror.script.extend([f"cut {GAIN}"] * 3)
        assert read(source) == data


def test_what_was_registered_is_asked_for_by_its_tag(server: RangeServer) -> None:
    with opened(server, etag="abc") as source, pytest.raises(Conflict):
        read(source)
    assert server.headers[-1]["If-Match"] == '"abc"'


def test_a_source_that_is_closed_has_no_connection(server: RangeServer) -> None:
    """Neither one that is made then, nor one whose answer was just read: nobody would end them."""
    origin, target = split_url(f"{server.url}/weights.bin")
    connections = Connections(GIVE_UP_S, GIVE_UP_S)
    connection, _ = connections.take(origin)
    connection.request("HEAD", target, {})
    assert connection.reusable
    connections.close()
    connections.give_back(connection)
    assert connection._socket.fileno() == -1
    with pytest.raises(ConnectionAbortedError):
        connections.take(origin)


def test_bytes_beyond_the_object_are_never_asked_for(server: RangeServer) -> None:
    with opened(server) as source, pytest.raises(CorruptCheckpoint, match="it has 300000"):
        read(source, SIZE - 1, 2)
    assert not server.ranges


def test_closing_a_source_ends_a_read(server: RangeServer) -> None:
    server.script.append("stall 10")
    remote = Remote("http test", limits=RemoteLimits(stall_s=60))
    source = RemoteObject(remote, f"{server.url}/weights.bin", Entry("weights.bin", SIZE))
    failures: list[SllmError] = []

    def attempt() -> None:
        try:
            read(source)
        except SllmError as error:
            failures.append(error)

    reader = threading.Thread(target=attempt)
    reader.start()
    with server_asked(server):
        remote.close()
    reader.join(GIVE_UP_S)
    assert [(type(error), error.code) for error in failures] == [(SourceClosed, Unavailable.code)]
    assert "closed" in failures[0].message


@contextlib.contextmanager
def server_asked(server: RangeServer) -> Iterator[None]:
    """The server has received a request when the block begins."""
    pause = threading.Event()
    while not server.ranges:
        pause.wait(0.005)
    yield


def test_a_server_that_is_not_there(server: RangeServer) -> None:
    gone = RemoteObject(Remote("http test", limits=PATIENT), "http://127.0.0.1:9/x", Entry("x", 10))
    with pytest.raises(Unavailable, match=r"/x \(bytes 0 to 10\): no connection to 127\.0\.0\.1:9"):
        read(gone, 0, 10)


def test_the_files_of_a_url(server: RangeServer, tmp_path: Path) -> None:
    source = open_source(f"{server.url}/model/")
    with contextlib.closing(source):
        with pytest.raises(ModelNotFound):
            source.entries()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors").write_bytes(b"12345")
        (tmp_path / "model" / "config.json").write_text("{}")
        (tmp_path / "model" / "run.py").write_text("code")
        entries = source.entries()
        assert [(entry.name, entry.nbytes) for entry in entries] == [("config.json", 2), ("model.safetensors", 5)]
        before = source.fingerprint()
        (tmp_path / "model" / "config.json").write_text("[]")
        assert source.fingerprint() != before


@pytest.mark.parametrize("url", ["http://", "http://user:secret@host/x", "http://host:99999999/x", "ftp://host/x"])
def test_what_is_no_http_url(url: str) -> None:
    with pytest.raises(InvalidCheckpoint):
        split_url(url)


@pytest.mark.parametrize("path", ["a b?c=d e", "\u00fc/\u4e2d", "a\r\nInjected: yes", "%20already", "'\"<>"])
def test_any_address_is_one_request_line(path: str) -> None:
    target = split_url(f"http://host/{path}")[1]
    assert target.isascii()
    assert target.isprintable()
    assert " " not in target
    assert "%25" not in target  # nothing is quoted twice


@given(data=st.binary(max_size=300) | st.text(max_size=200).map(lambda text: f"HTTP/1.1 200 OK\r\n{text}".encode()))
def test_any_head_is_taken_or_refused(data: bytes) -> None:
    try:
        head = parse_head(data)
    except ProtocolError:
        return
    assert 0 <= head.status <= 999
    assert head.length is None or 0 <= head.length < 10**16


# --- patience -------------------------------------------------------------------------------------
@given(gains=st.lists(st.integers(0, 2 * GAIN), max_size=60), after=st.floats(0, 1e6), seed=st.integers())
def test_attempts_end_when_they_bring_nothing_and_no_wait_is_long(gains: list[int], after: float, seed: int) -> None:
    attempts = Attempts(RemoteLimits(), random.Random(seed))
    idle = 0
    for gained in gains:
        idle = 1 if gained >= GAIN else idle + 1
        try:
            delay = attempts.delay(TryAgain(Unavailable("x"), after), gained)
        except Unavailable:
            assert idle >= RemoteLimits().attempts
            return
        assert 0 <= delay <= RemoteLimits().longest_delay_s
        assert idle < RemoteLimits().attempts


@pytest.mark.parametrize(("gains", "tries"), [([0] * 9, 5), ([GAIN] + [0] * 9, 5), ([0, 0, 0, GAIN - 1, 0], 5),
                                              ([0, 0, 0, 0, GAIN, 0, 0, 0, 0], 9)])  # fmt: skip
def test_of_five_tries_that_fail_in_a_row_the_first_alone_may_have_brought_something(
    gains: list[int], tries: int
) -> None:
    attempts, *made = Attempts(RemoteLimits(), random.Random(1)), *gains[:tries]
    for gained in made[:-1]:
        attempts.delay(TryAgain(Unavailable("x")), gained)
    with pytest.raises(Unavailable):
        attempts.delay(TryAgain(Unavailable("x")), made[-1])


# --- TLS --------------------------------------------------------------------------------------------
@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A certificate of 127.0.0.1 that this process trusts, with its key."""
    made = make_certificates(tmp_path)
    pem = made / "both.pem"
    pem.write_text((made / "server.key").read_text() + (made / "server.pem").read_text())
    monkeypatch.setenv("SSL_CERT_FILE", str(made / "ca.pem"))
    return pem


def test_https_is_read_and_resumed_and_an_unknown_certificate_refused(
    certificate: Path, tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights.bin").write_bytes(data)
    with range_server(tmp_path, certificate) as server:
        server.script.extend(["cut 1000", "stall 5", None])
        with opened(server, STUBBORN) as source:
            assert read(source) == data
            assert read(source, 100_000, 5) == data[100_000:100_005]
        monkeypatch.delenv("SSL_CERT_FILE")
        with opened(server) as source, pytest.raises(Unavailable, match="certificate"):
            read(source)


def test_where_a_hub_sends_us_to_is_told_without_what_opens_it(server: RangeServer) -> None:
    """A hub answers with an address that is signed for an hour: it stands in no error, event or record."""
    server.script.extend([f"to {server.url}/weights.bin?X-Amz-Signature=opensesame", "status 403"] * PATIENT.attempts)
    with opened(server) as source, pytest.raises(SllmError) as told:
        read(source, 0, 50)
    assert "opensesame" not in told.value.message


@pytest.mark.parametrize(
    ("word", "error", "text"),
    [
        ("status 403", Forbidden, "refused with 403"),
        ("status 404", ModelNotFound, "not there"),
        ("status 412", Conflict, "has changed"),
        ("bigger", Conflict, f"has {SIZE + 1} bytes, not {SIZE}"),
    ],
)
def test_a_refusal_behind_a_redirect_is_said_as_what_it_is(
    server: RangeServer, word: str, error: type[SllmError], text: str
) -> None:
    """By where we have just been sent to: asked again it sends us there again."""
    server.script.extend([f"to {server.url}/weights.bin?signed", word] * 10)
    with opened(server) as source, pytest.raises(error, match=text):
        read(source, 5, 1000)
    assert len(server.ranges) <= 4

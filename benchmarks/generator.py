"""The load generator: a process of its own, so that its CPU is apart. ``python -m benchmarks.generator``.

Reads one ``Load`` as a line of JSON, answers with one ``Outcome``, and so on. While streams run it does nothing but
``epoll``, ``recv`` and note the time of each; what the bytes hold is worked out afterwards. One connection per stream,
opened beforehand. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import resource
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.record import percentile

TOKEN = re.compile(rb"t(\d+)@(\d+)\.")
_RECEIVE = 1 << 16
_CONNECT_S = 30.0


@dataclass(frozen=True)
class Load:
    """``streams`` requests. ``spread_s``: they are sent evenly over this time; 0: at once; -1: one after the other."""

    port: int
    path: str
    headers: dict[str, str]
    body: str
    streams: int
    count: int
    """Tokens that every stream must bring."""
    interval: float
    spread_s: float = 0.0
    deadline_s: float = 60.0


@dataclass
class Outcome:
    """What came of a load. Times in ms but for ``seconds`` (first request to last byte) and ``cpu_s`` (of this
    process, in that time). Percentiles of delay are over all tokens of all streams."""

    completed: int = 0
    failed: int = 0
    wrong: int = 0
    """Streams whose tokens were not 0, 1, 2, … or not due when they should have been."""
    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    receives: int = 0
    late_ms: float = 0.0
    """Longest that a request was sent after its time."""
    ttft_ms: list[float] = field(default_factory=list)
    delay_p50_ms: float = 0.0
    delay_p99_ms: float = 0.0
    delay_max_ms: float = 0.0
    errors: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Stream:
    """One request on its connection, and every piece that came, with the time it came at."""

    sock: socket.socket
    sent: int = 0
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    ended: bool = False


def run(load: Load) -> Outcome:
    """Carry out one load."""
    request = _request(load)
    streams: list[Stream] = []
    outcome = Outcome()
    try:
        streams.extend(Stream(_connect(load.port)) for _ in range(load.streams))
    except OSError as error:  # a peer that is stuck in an earlier load takes no connection any more
        for stream in streams:
            stream.sock.close()
        outcome.failed = load.streams
        outcome.errors.append(f"{len(streams)} of {load.streams} connections; the next: {error}")
        return outcome
    gc.collect()
    gc.disable()
    cpu = _cpu()
    began = time.monotonic_ns()
    try:
        with select.epoll() as poll:
            _drive(load, request, streams, poll, began, outcome)
    finally:
        outcome.cpu_s = _cpu() - cpu
        gc.enable()
        for stream in streams:
            stream.sock.close()
    last = max((stream.pieces[-1][0] for stream in streams if stream.pieces), default=began)
    outcome.seconds = (last - began) / 1e9
    _judge(load, streams, outcome)
    return outcome


def _drive(
    load: Load, request: bytes, streams: Sequence[Stream], poll: select.epoll, began: int, outcome: Outcome
) -> None:
    by_fd = {stream.sock.fileno(): stream for stream in streams}
    deadline = began + round(load.deadline_s * 1e9)
    gap = round(load.spread_s * 1e9 / max(1, len(streams))) if load.spread_s > 0 else 0
    unsent, living = 0, len(streams)
    clock = time.monotonic_ns
    while living and (now := clock()) < deadline:
        wait = deadline - now
        if unsent < len(streams):
            one_by_one = load.spread_s < 0
            due = began + unsent * gap
            if living == len(streams) - unsent if one_by_one else now >= due:
                stream = streams[unsent]
                poll.register(stream.sock, select.EPOLLIN)
                stream.sent = clock()
                stream.sock.send(request)
                if not one_by_one:
                    outcome.late_ms = max(outcome.late_ms, (stream.sent - due) / 1e6)
                unsent += 1
                wait = 0
            elif not one_by_one:
                wait = due - now
        for fd, _ in poll.poll(wait / 1e9):
            stream = by_fd[fd]
            try:
                data = stream.sock.recv(_RECEIVE)
            except OSError:
                data = b""
            if data:
                stream.pieces.append((clock(), data))
            else:
                poll.unregister(fd)
                stream.ended = True
                living -= 1


def _request(load: Load) -> bytes:
    body = load.body.encode()
    headers = {
        "Host": f"127.0.0.1:{load.port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Accept": "text/event-stream",
        "Connection": "close",
        **load.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {load.path} HTTP/1.1\r\n{head}\r\n".encode() + body


def _connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _judge(load: Load, streams: Sequence[Stream], outcome: Outcome) -> None:
    """What the bytes say."""
    delays: list[float] = []
    for stream in streams:
        outcome.receives += len(stream.pieces)
        arrived = arrivals(stream.pieces)
        outcome.tokens += len(arrived)
        delays.extend((at - due) / 1e6 for at, _, due in arrived)
        if arrived:
            outcome.ttft_ms.append((arrived[0][0] - stream.sent) / 1e6)
        if len(arrived) < load.count or not stream.ended:
            outcome.failed += 1
            if len(outcome.errors) < 3:
                text = b"".join(data for _, data in stream.pieces)[-300:].decode(errors="replace")
                outcome.errors.append(f"{len(arrived)} tokens, {'ended' if stream.ended else 'not ended'}: {text}")
        elif not regular(arrived, load.count, load.interval):
            outcome.wrong += 1
        else:
            outcome.completed += 1
    if delays:
        outcome.delay_p50_ms, outcome.delay_p99_ms = percentile(delays, 50), percentile(delays, 99)
        outcome.delay_max_ms = max(delays)


def arrivals(pieces: Sequence[tuple[int, bytes]]) -> list[tuple[int, int, int]]:
    """``(arrived, index, due)`` of every token; one cut by a border of pieces arrived with its last byte. ns."""
    data = b"".join(piece for _, piece in pieces)
    ends: list[int] = []
    total = 0
    for _, piece in pieces:
        total += len(piece)
        ends.append(total)
    found, at = [], 0
    for match in TOKEN.finditer(data):
        while ends[at] < match.end():
            at += 1
        found.append((pieces[at][0], int(match[1]), int(match[2])))
    return found


def regular(arrived: Sequence[tuple[int, int, int]], count: int, interval: float) -> bool:
    """Whether the tokens are exactly 0 … ``count`` - 1 in order, each due when the pace says."""
    if [index for _, index, _ in arrived] != list(range(count)):
        return False
    first = arrived[0][2]
    return not interval or all(abs(due - first - index * interval * 1e9) < 2 for _, index, due in arrived)


def main() -> None:
    """Loads from stdin to outcomes on stdout, until stdin ends."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            sys.stdout.write(json.dumps(asdict(run(Load(**json.loads(line))))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Plays the invoker to a real fork server, real workers and a real loaderd, over the sockets they would have."""

from __future__ import annotations

import io
import os
import select
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.frames import CallHead, Delta, End, Frame, FrameKind, Ids
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.worker import (
    PRELOAD,
    Assign,
    CallBody,
    CallFrames,
    CancelCall,
    Complete,
    Credit,
    Exited,
    Failed,
    FromWorker,
    FromZygote,
    Heartbeat,
    Hello,
    Log,
    Ready,
    Spawn,
    Spawned,
    Stage,
    StartCall,
    Started,
    Stop,
    ToWorker,
    ToZygote,
    ZygoteReady,
)
from tests.fixtures.waiting import GIVE_UP_S

DEADLINE_S = 60.0
GENEROUS = 10 * limits.MIB


def bundle_of(files: Mapping[str, str | bytes]) -> bytes:
    """A bundle as the SDK packs it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def sealed(data: bytes) -> int:
    """A memfd that holds ``data``."""
    fd = os.memfd_create("bundle", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def manifest(entry: str = "user:fn", kind: Any = "function", **changes: Any) -> Manifest:
    """A small function's manifest."""
    handler = Handler(entry=entry, kind=kind, streams=changes.pop("streams", False), python=changes.pop("python", None))
    return Manifest(name="test", handler=handler, **changes)


@dataclass
class Answer:
    """All frames of one call, put together."""

    outputs: list[Any] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    end: End | None = None
    indexes: list[int] = field(default_factory=list)
    _parts: bytearray = field(default_factory=bytearray)

    def add(self, frame: Frame) -> None:
        self.indexes.append(frame.index)
        assert self.end is None, "a frame after the end"
        if frame.kind is FrameKind.END:
            self.end = codec.unpack(End, frame.data)
            return
        self._parts += frame.data
        if frame.more:
            return
        data, self._parts = bytes(self._parts), bytearray()
        if frame.kind is FrameKind.OUTPUT:
            self.outputs.append(msgspec.json.decode(data))
        elif frame.kind is FrameKind.DELTA:
            self.deltas.append(codec.unpack(Delta, data))
        elif frame.kind is FrameKind.IDS:
            self.ids.append(codec.unpack(Ids, data))

    @property
    def error(self) -> ErrorBody:
        assert self.end is not None
        assert self.end.error is not None, f"it succeeded: {self.outputs}"
        return self.end.error

    @property
    def text(self) -> str:
        return "".join(self.outputs)


class Worker:
    """The other end of one worker's socket."""

    def __init__(self, wire: BlockingWire, pidfd: int, pid: int, pipes: tuple[int, int]) -> None:
        self.wire = wire
        self.pidfd, self.pid, self._pipes = pidfd, pid, pipes
        wire.sock.settimeout(DEADLINE_S)
        self.hello = self._next()
        assert isinstance(self.hello, Hello)
        self.answers: dict[int, Answer] = {}
        self.logs: list[Log] = []
        self.stages: list[Stage] = []
        self.beats: list[Heartbeat] = []
        self.batches: list[CallFrames] = []
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self._number = 0

    def send(self, body: Any, fds: tuple[int, ...] = ()) -> None:
        self.wire.send(codec.pack(ToWorker(body)), fds)

    def assign(
        self, made: Manifest, bundle: bytes, *, workdir: Path, session: int | None = None, edges: Sequence[int] = (),
        **more: Any,
    ) -> None:  # fmt: skip
        """Send the assignment; owns ``session`` and ``edges``, which lead to other processes of the instance."""
        fds = (sealed(bundle), *([session] if session is not None else []), *edges)
        try:
            model = "sha256:" + "0" * 64 if session is not None else None
            given = {"instance": "i1", "function": made.name, "version": 1, "bundle": "", "model": model, **more}
            body = Assign(manifest=made, workdir=str(workdir), fds=len(fds), **given)
            self.send(body, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def start(self, made: Manifest, bundle: bytes, **more: Any) -> Ready:
        self.assign(made, bundle, **more)
        self.until(lambda: self.ready is not None or self.failed is not None)
        assert self.ready is not None, self.failed
        return self.ready

    def fail(self, made: Manifest, bundle: bytes, **more: Any) -> ErrorBody:
        self.assign(made, bundle, **more)
        self.until(lambda: self.ready is not None or self.failed is not None)
        assert self.failed is not None, "it became ready"
        return self.failed.error

    def call(self, arguments: Any = None, *, body: bytes | None = None, **head: Any) -> int:
        """Begin a call; its number."""
        self._number += 1
        if head.get("kind", "fn") != "fn":  # no gateway hands on one without
            arguments = {"model": "m", **arguments}
        data = body if body is not None else msgspec.json.encode(arguments if arguments is not None else {})
        made: dict[str, Any] = {"kind": "fn", "stream": True, "timeout_s": 60.0, "idle_timeout_s": 60.0, "seed": 7}
        made |= {"credit": GENEROUS, **head}
        made |= {"call": f"c{self._number}", "epoch": 1, "instance": "i1", "function": "test", "version": 1}
        self.answers[self._number] = Answer()
        first, rest = data[: limits.MAX_PART], data[limits.MAX_PART :]
        self.send(StartCall(number=self._number, head=CallHead(**made, body_bytes=len(data)), body=first))
        for start in range(0, len(rest), limits.MAX_PART):
            self.send(CallBody(self._number, rest[start : start + limits.MAX_PART]))
        return self._number

    def run(self, arguments: Any = None, **head: Any) -> Answer:
        """A whole call."""
        return self.finish(self.call(arguments, **head))

    def finish(self, number: int) -> Answer:
        answer = self.answers[number]
        self.until(lambda: answer.end is not None)
        assert answer.indexes == list(range(len(answer.indexes)))
        return answer

    def outputs(self, number: int, count: int) -> Answer:
        """Wait for some outputs of a running call."""
        answer = self.answers[number]
        self.until(lambda: len(answer.outputs) >= count or answer.end is not None)
        return answer

    def cancel(self, number: int, code: str = "cancelled", reason: str = "") -> None:
        self.send(CancelCall(number=number, code=code, reason=reason))

    def credit(self, number: int, limit: int) -> None:
        self.send(Credit(number=number, limit=limit))

    def until(self, met: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Read messages until ``met``."""
        end = time.monotonic() + deadline_s
        while not met():
            left = end - time.monotonic()
            assert left > 0, "deadline"
            self.wire.sock.settimeout(left)
            self._take(self._next())

    def _next(self) -> Any:
        payload = self.wire.receive()
        if payload is None:
            raise EOFError("the worker is gone")
        return codec.unpack(FromWorker, payload).body

    def _take(self, body: Any) -> None:
        if isinstance(body, CallFrames):
            self.batches.append(body)
            for number, frames in body.items:
                for frame in frames:
                    self.answers[number].add(frame)
        elif isinstance(body, Log):
            self.logs.append(body)
        elif isinstance(body, Stage):
            self.stages.append(body)
        elif isinstance(body, Heartbeat):
            self.beats.append(body)
        elif isinstance(body, Ready):
            self.ready = body
        elif isinstance(body, Failed):
            self.failed = body

    def stop(self, grace_s: float = 5.0) -> None:
        self.send(Stop(grace_s=grace_s))

    def wait_dead(self, deadline_s: float = DEADLINE_S) -> None:
        """Until the pidfd says so; what it still wrote is read, so that it cannot block on it."""
        end = time.monotonic() + deadline_s
        while not select.select([self.pidfd], [], [], 0.02)[0]:
            assert time.monotonic() < end, "the worker lives"
            if select.select([self.wire.sock], [], [], 0)[0]:
                try:
                    self._take(self._next())
                except (EOFError, OSError):
                    select.select([self.pidfd], [], [], max(0.0, end - time.monotonic()))

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return

    def stderr(self) -> str:
        os.set_blocking(self._pipes[1], False)
        try:
            return os.read(self._pipes[1], 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return ""

    def close(self) -> None:
        self.kill()
        select.select([self.pidfd], [], [], DEADLINE_S)
        self.wire.close()
        for fd in (*self._pipes, self.pidfd):
            os.close(fd)


class Zygote:
    """A real fork server, as the invoker starts it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sllm_runtime.worker.zygote", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, PRELOAD: "all"},
        )
        theirs.close()
        self.wire = BlockingWire(ours)
        ours.settimeout(120)
        self.ready: ZygoteReady | None = None
        self.exits: dict[str, Exited] = {}
        self.complete = False
        self._count = 0

    def receive(self) -> Any:
        payload = self.wire.receive()
        assert payload is not None, "the fork server is gone"
        return codec.unpack(FromZygote, payload).body

    def wait_ready(self) -> ZygoteReady:
        if self.ready is None:
            hello = self.receive()
            assert isinstance(hello, ZygoteReady)
            self.ready = hello
        return self.ready

    def spawn(self) -> Worker:
        self.wait_ready()
        self._count += 1
        ours, theirs = socket.socketpair()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        request = codec.pack(ToZygote(Spawn(sandbox=f"s{self._count}")))
        self.wire.send(request, (theirs.fileno(), out_end, err_end))
        theirs.close()
        os.close(out_end)
        os.close(err_end)
        while not isinstance(body := self.receive(), Spawned):
            self._exit(body)
        (pidfd,) = self.wire.fds.take(1)
        return Worker(BlockingWire(ours), pidfd, body.pid, (out, err))

    def started(self, number: int) -> None:
        """The ``number``-th worker's instance is ready."""
        self.wire.send(codec.pack(ToZygote(Started(sandbox=f"s{number}"))))

    def exited(self, number: int) -> Exited:
        """The exit report of the ``number``-th worker."""
        while f"s{number}" not in self.exits:
            self._exit(self.receive())
        return self.exits[f"s{number}"]

    @property
    def count(self) -> int:
        return self._count

    def wait_complete(self) -> None:
        """Until it has imported all. To ask for a worker disturbs it."""
        while not self.complete:
            self._exit(self.receive())

    def _exit(self, body: Any) -> None:
        if isinstance(body, Complete):
            self.complete = True
            return
        assert isinstance(body, Exited)
        self.exits[body.sandbox] = body

    def close(self) -> None:
        self.wire.close()
        self.process.wait(GIVE_UP_S)

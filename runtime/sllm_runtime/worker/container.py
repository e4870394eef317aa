"""Process 1 of a container: fetches the worker's socket and pipes from the invoker, forks the worker, reaps what that
leaves behind, hands SIGTERM on, and says how the worker ended. When it ends, the kernel ends all the rest. It ends
everything itself when the invoker says no more to it, dead or not: so it can still say what there was to say.

Run as ``python -m sllm_runtime.worker.container``. It imports no user code and none of the large libraries: those are
the worker's. No process of the container can trace it, though it has the same user, nor kill it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from typing import Final

from sllm_runtime.platform import oom_kills
from sllm_runtime.platform.process import step_back
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.worker import RENDEZVOUS, Exited, FromZygote, ToZygote
from sllm_runtime.worker.imports import preload
from sllm_runtime.worker.zygote import become_worker

MEET_S: Final = 60.0
"""The invoker answers a connection as soon as it knows that the container runs."""
_PR_SET_DUMPABLE: Final = 4
_LOST: Final = 71


def report(sandbox: str, status: int, kills: int) -> Exited:
    """What the invoker is told of a worker that ended with this wait status."""
    code = os.waitstatus_to_exitcode(status)
    killed = code == -signal.SIGKILL
    return Exited(sandbox=sandbox, code=max(code, 0), signal=max(-code, 0), out_of_memory=killed and kills > 0)


class First:
    """Process 1 behind ``wire``. ``serve`` returns the container's exit status."""

    def __init__(self, wire: BlockingWire) -> None:
        self._wire = wire
        self._worker = 0
        self._status: int | None = None
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> int:
        """Fork the worker and outlive it, but not the invoker."""
        sandbox, fds = self._receive()
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._hand_on(signal.SIGTERM))
        parent = os.getpid()
        self._worker = os.fork()
        if self._worker == 0:
            become_worker(fds, parent, preload, adopts=False)
        # Said after the fork: the worker, whose user is the same, stays one that its user may look into.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        for fd in fds:
            os.close(fd)
        return self._outlive(sandbox)

    def _receive(self) -> tuple[str, list[int]]:
        self._wire.sock.settimeout(MEET_S)
        payload = self._wire.receive()
        if payload is None:
            raise ProtocolError("the invoker has closed the connection")
        message = codec.unpack(ToZygote, payload).body
        self._wire.sock.settimeout(None)
        return message.sandbox, self._wire.fds.take(message.fds)

    def _hand_on(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._worker, number)

    def _outlive(self, sandbox: str) -> int:
        poll = select.poll()
        poll.register(self._wire.sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._status is None:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                else:
                    self._end_all()
        ended = report(sandbox, self._status, oom_kills.of_group() or 0)
        with contextlib.suppress(OSError):
            self._wire.send(codec.pack(FromZygote(ended)))
        return ended.code or (128 + ended.signal if ended.signal else 0)

    def _end_all(self) -> None:
        self._reap()
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all that there is here but this process
            _, self._status = os.waitpid(self._worker, 0)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._worker:
                self._status = status


def main() -> int:
    """The container's exit status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(RENDEZVOUS)
        except OSError as error:
            sys.stderr.write(f"no invoker waits at {RENDEZVOUS}: {error}\n")
            return _LOST
        step_back()
        wire = BlockingWire(sock)
        try:
            return First(wire).serve()
        finally:
            wire.close()


if __name__ == "__main__":
    sys.exit(main())

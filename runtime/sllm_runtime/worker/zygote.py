"""The fork server: imports what workers need once (``imports``), and forks one worker for each ``Spawn``.

It runs no tensor operation and starts no thread: after either, a forked child may hang for ever (DESIGN, Processes).
Run as ``python -m sllm_runtime.worker.zygote --fd N``; N is its end of a socketpair with the invoker.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import os
import platform
import re
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from sllm_runtime.platform import descriptors
from sllm_runtime.platform.process import (
    become_subreaper,
    children,
    die_with_parent,
    end_orphans,
    lead_group,
    set_title,
    step_back,
)
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.worker import (
    KERNELS,
    PRELOAD,
    PRIVATE,
    Complete,
    Exited,
    FromZygote,
    Private,
    Spawn,
    Spawned,
    Started,
    ToZygote,
    Unborn,
    ZygoteReady,
)
from sllm_runtime.worker import isolation
from sllm_runtime.worker.imports import QUIET_S, Later, preload

if TYPE_CHECKING:
    from sllm_runtime.worker.main import Warming
    from sllm_runtime.worker.working_set import WorkingSet

_SEND_S: Final = 10.0
GO_FIRST: Final = 1000
_END_S: Final = 5.0
_LOOK_S: Final = 0.05
"""When nobody has asked for a worker for so long, one that has started is looked at: the first tokens of its call, and
other starts, need the cores more. A pool is refilled later than that."""
_LOOKED_AT: Final = 8
"""Of those that wait for it, the last ones."""
_MOST = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


class Zygote:
    """Forks and reaps workers. Single-threaded; ``serve`` returns when the invoker is gone."""

    def __init__(
        self,
        wire: BlockingWire,
        import_s: float,
        later: Later,
        working_set: WorkingSet,
        rehearse: Callable[[], None],
        leave: isolation.Leave,
    ) -> None:
        """``rehearse`` records a start in ``working_set``."""
        self._wire = wire
        self._import_s = import_s
        self._later = later
        self._workers: dict[int, str] = {}
        self._working_set = working_set
        self._rehearse = rehearse
        self._incomplete: frozenset[str] = frozenset()
        """Workers that were forked before all was imported."""
        self._started: deque[str] = deque(maxlen=_LOOKED_AT)
        """Workers whose pages are to be recorded."""
        self._leave = leave
        self._stopping = False
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        """Until the socket ends or SIGTERM: fork on request, report deaths, import the rest while it is quiet."""
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
        self._send(ZygoteReady(import_s=self._import_s, python=platform.python_version()))
        poll = select.poll()
        poll.register(self._wire.sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        quiet_s = QUIET_S
        while not self._stopping:
            wait_s = _LOOK_S if self._started else None if self._later.done else quiet_s
            happened = poll.poll(None if wait_s is None else wait_s * 1000)
            if happened:
                quiet_s = QUIET_S
            elif self._started:
                self._look(self._started.popleft())
            else:
                quiet_s = 0
                self._import_more()
                if self._later.done:
                    self._complete()
            for fd, _ in happened:
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                else:
                    self._receive()

    def close(self) -> None:
        """Kill every worker and what it left."""
        for pid in self._workers:
            _kill_group(pid)
        _end_all()
        self._wire.close()

    def _on_term(self, *_: object) -> None:
        self._stopping = True

    def _import_more(self) -> None:
        """Deaths are told meanwhile: who waits for one does not wait long."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        try:
            self._later.step()
        finally:
            signal.signal(signal.SIGCHLD, lambda *_: None)

    def _complete(self) -> None:
        """Nothing is left to import. It has written to half of what starts touch: another one is rehearsed."""
        self._incomplete = frozenset(self._workers.values())
        self._rehearse()
        self._send(Complete())

    def _receive(self) -> None:
        """Every message that is there."""
        while True:
            self._wire.sock.settimeout(0)
            try:
                payload = self._wire.receive()
            except BlockingIOError:
                return
            except OSError:
                payload = None
            if payload is None:
                self._stopping = True
                return
            message = codec.unpack(ToZygote, payload).body
            fds = self._wire.fds.take(message.fds)
            if isinstance(message, Started):
                self._started.append(message.sandbox)
            else:
                self._spawn(message, fds)

    def _look(self, sandbox: str) -> None:
        if sandbox in self._incomplete:  # what this process has written to since is that worker's alone as well
            return
        for pid, name in self._workers.items():
            if name == sandbox:
                self._working_set.look(pid)

    def _warming(self) -> Warming:
        from sllm_runtime.worker.main import Warming  # of what is imported for workers

        return Warming(self._working_set.pages, self._leave)

    def _spawn(self, request: Spawn, fds: list[int]) -> None:
        """Where the machine has no room for it, or no pidfd, who waits for it is told: others live on."""
        try:
            pid = self._fork(fds)
            self._workers[pid] = request.sandbox
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            sys.stderr.write(f"no worker for {request.sandbox}: {error}\n")
            self._send(Unborn(sandbox=request.sandbox, why=error.strerror or str(error)))
            return
        try:
            self._send(Spawned(sandbox=request.sandbox, pid=pid), (pidfd,))
        finally:
            os.close(pidfd)

    def _fork(self, fds: list[int]) -> int:
        """The new worker's process id. ``fds`` are its own, and closed here. Raises ``OSError``."""
        parent = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                become_worker(fds, parent, lambda: self._import_s, self._warming())
            return pid
        finally:
            for fd in fds:
                os.close(fd)

    def _reap(self) -> None:
        """Report workers that died. Their process group, and what they left to this process, dies before the report."""
        dead = []
        for pid, sandbox in list(self._workers.items()):
            with contextlib.suppress(ChildProcessError):
                # The zombie is left until its group is killed: so its id cannot belong to somebody else.
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                _kill_group(pid)
                _, status, used = os.wait4(pid, 0)
                dead.append(_exited(sandbox, os.waitstatus_to_exitcode(status), used.ru_maxrss))
                del self._workers[pid]
        # Workers adopt what their own children leave; so an unknown child of ours was a dead worker's. What is killed
        # here wakes us again, and then shows what it left.
        end_orphans(set(self._workers))
        for exited in dead:
            self._send(exited)

    def _send(self, body: ZygoteReady | Spawned | Unborn | Exited | Complete, fds: tuple[int, ...] = ()) -> None:
        self._wire.sock.settimeout(_SEND_S)
        try:
            self._wire.send(codec.pack(FromZygote(body)), fds)
        except OSError:
            self._stopping = True


def _exited(sandbox: str, code: int, peak_kib: int) -> Exited:
    peak = max(0, peak_kib - _most_kib()) * 1024
    return Exited(sandbox=sandbox, code=max(code, 0), signal=max(-code, 0), peak=peak)


def _most_kib() -> int:
    """Memory that this process had at its most. Its ru_maxrss would be that of whoever started it, if that had more:
    the kernel hands it on over an exec."""
    found = _MOST.search(Path("/proc/self/status").read_text())
    return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end_all() -> None:
    """Kill and reap every child; each that dies may leave its own children to us. Bounded in time."""
    until = time.monotonic() + _END_S
    while (left := children()) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                pidfd = os.pidfd_open(pid)
                try:
                    select.select([pidfd], [], [], max(0.0, until - time.monotonic()))
                finally:
                    os.close(pidfd)
                os.waitpid(pid, os.WNOHANG)


def become_worker(
    fds: list[int], parent: int, importing: Callable[[], float], warming: Warming | None = None, *, adopts: bool = True
) -> NoReturn:
    """In a child: nothing of its parent is left but its imports; ``importing`` does the rest of them and returns the
    seconds that all took. ``warming`` is done while it waits. It ``adopts`` what its children leave behind, unless its
    parent reaps that. Ends by ``os._exit`` whatever happens."""
    status = 70
    try:
        lead_group()
        die_with_parent(signal.SIGKILL, parent)
        _go_first()
        if adopts:
            become_subreaper()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        sock = _take_descriptors(fds)
        import_s = importing()
        _reseed()
        from sllm_runtime.worker.main import main

        status = main(sock, import_s, warming)
    except BaseException as error:  # nothing may return into the fork server's loop
        import traceback

        os.write(2, "".join(traceback.format_exception(error)).encode())
    finally:
        os._exit(status)


def _go_first() -> None:
    """Where memory is short the kernel takes one worker, and not loaderd, whose pool counts as its own, nor the fork
    server, with which all workers go: as if it had GO_FIRST thousandths of the memory that there is beside its own."""
    own = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        own.write_text(str(min(1000, int(own.read_text()) + GO_FIRST)))


def _take_descriptors(fds: list[int]) -> socket.socket:
    """stdin from nowhere, stdout and stderr into their pipes, the socket as 3, everything else closed."""
    null = os.open(os.devnull, os.O_RDONLY)
    # Out of the way first: a number to be taken may be in use as a source.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (null, *fds)]
    for source, target in zip(high, (0, 3, 1, 2), strict=True):
        os.dup2(source, target, inheritable=target != 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    descriptors.keep_half()
    descriptors.make_room(descriptors.OF_WORKER)
    return socket.socket(fileno=3)


def _reseed() -> None:
    """Forked twins must not draw the same numbers."""
    import numpy as np
    import torch

    seed = int.from_bytes(os.urandom(8), "big")
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


def _load_kernels() -> None:
    """While the node's own directory, which no worker may see, is in sight."""
    from sllm_runtime.worker.engine.ours.kernels.loaded import kernels

    kernels()
    os.environ.pop(KERNELS, None)


def _isolate() -> isolation.Leave:
    """Hide the platform's files from the workers to come, where this process is the first of a namespace of its own.
    Whether they can leave the network."""
    private = Private.from_json(os.environ.pop(PRIVATE, "{}"))
    if os.getpid() != 1 and private.hide:
        sys.stderr.write("no mount namespace here: functions can read the platform's files\n")
    elif private.hide:
        try:
            for path in isolation.hide(map(Path, private.hide), map(Path, private.keep)):
                sys.stderr.write(
                    f"functions can read {path}: Python runs from there; move it, or the platform's data\n"
                )
        except OSError as error:
            sys.stderr.write(f"functions can read the platform's files: {error}\n")
    leave = isolation.leave()
    if leave is isolation.Leave.NEVER:
        sys.stderr.write("no network namespaces here: functions reach the network whatever their manifest says\n")
    elif os.getpid() == 1 and os.geteuid() != 0:  # the user namespace that gave it its rights is its own
        try:
            isolation.forbid_namespaces()
        except OSError as error:
            sys.stderr.write(f"functions can use up the network namespaces of this user: {error}\n")
    return leave


def run(fd: int, node: str) -> int:
    """Serve the invoker behind ``fd`` until it is gone."""
    die_with_parent(signal.SIGKILL)  # whether the parent is dead already, the socket's end tells
    become_subreaper()
    step_back()
    set_title(f"sllm-zygote {node}".strip())
    wire = BlockingWire(socket.socket(fileno=fd))
    _load_kernels()
    leave = _isolate()
    import_s = preload()
    from sllm_runtime.worker.rehearsal import rehearse
    from sllm_runtime.worker.working_set import WorkingSet

    working_set = WorkingSet()
    rehearsal = functools.partial(rehearse, working_set, become_worker)
    rehearsal()
    zygote = Zygote(wire, import_s, Later(os.environ.pop(PRELOAD, "all")), working_set, rehearsal, leave)
    try:
        zygote.serve()
    finally:
        zygote.close()
    return 0


def main() -> None:
    """Entry of ``python -m``."""
    parser = argparse.ArgumentParser(description="Fork server for workers; started by the invoker.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the invoker")
    parser.add_argument("--node", default=os.environ.get("SLLM_NODE", ""), help="the node's name, for ps")
    options = parser.parse_args()
    sys.exit(run(options.fd, options.node))


if __name__ == "__main__":
    main()

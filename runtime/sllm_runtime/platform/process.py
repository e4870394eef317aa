"""Processes: born with their parent's death sentence, named for ``ps``, stopped in order, reaped when orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from sllm_runtime.platform.log_files import open_log
from sllm_runtime.protocol.errors import Unavailable

log = logging.getLogger(__name__)

KILLED_S: Final = 5.0
"""What has not ended so long after SIGKILL hangs in the kernel (a dead disk, a driver): nobody waits for it longer."""
ON_LINUX = sys.platform == "linux"
PARENT = "SLLM_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if ON_LINUX else None
_TELLS_CHILDREN: Final = os.path.exists("/proc/thread-self/children")
"""Whether the kernel tells the children of a thread (CONFIG_PROC_CHILDREN)."""


def die_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send ``number`` when the parent dies. With ``parent``, exit if it has died already.

    Linux only; elsewhere nothing happens. Survives ``exec``, not ``fork``.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt what descendants leave behind, so that ``orphans`` sees it. Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


NICE: Final = 10
"""Of what computes, reads and copies for functions: workers, their fork server, loaderd."""


def step_back() -> None:
    """This process, and all that it will start, has a tenth of the share of those that serve functions (gateways,
    controllers, NATS, invokers), which want little, where they want the same core: what a node says and the frames that
    it passes on do not wait for what is computed there (docs/decisions/0066). Within one control group."""
    os.nice(NICE)


def lead_group() -> None:
    """In a new process: a process group of its own, and no terminal. No Ctrl-C reaches it, and what it runs can type
    nothing into the terminal of who started the platform.

    Not a session of its own: Linux makes a group of its scheduler of each (``sched_autogroup``), and beside two such
    groups that compute, a process that wakes in a third waited up to 150 ms for a core (decision 0039).
    """
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


def require_calls(*, nodes: bool) -> None:
    """Raise ``Unavailable`` where the kernel, or a filter of system calls, refuses what a platform (its end, by
    ``sllm down``), or one with ``nodes``, cannot do without."""
    if not ON_LINUX:
        return
    calls: dict[str, Callable[[], int]] = {"pidfd_open": lambda: os.pidfd_open(os.getpid())}
    if nodes:
        calls["memfd_create"] = lambda: os.memfd_create("sllm-up")
    for name, call in calls.items():
        try:
            os.close(call())
        except AttributeError as error:
            raise Unavailable(f"{name}: this Python was built without it (for an older Linux or libc)") from error
        except OSError as error:
            raise Unavailable(
                f"{name}: {error.strerror}. It takes Linux 5.3, and a sandbox around it that lets this call through: "
                "of docker or podman a newer version, or --security-opt seccomp=unconfined"
            ) from error


def set_title(title: str) -> None:
    """The name in ``ps`` and ``top``."""
    import setproctitle

    setproctitle.setproctitle(title)


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of ``pid``: with the pid it names one process. ``None``: no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def children() -> set[int]:
    """Direct children of this process, zombies too. One that comes to us while others end may be seen the next time."""
    if not _TELLS_CHILDREN:
        return _children_of_all()
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_bytes().split()))
    return found


def _children_of_all() -> set[int]:
    """By a look at each process of the machine: half a millisecond for 60 of them."""
    mine = os.getpid()
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{name}/stat").read_bytes()
            if int(stat.rpartition(b")")[2].split()[1]) == mine:
                found.add(int(name))
    return found


def end_orphans(known: set[int]) -> int:
    """Kill and reap every child that is not in ``known``: adopted ones. Returns how many were ended."""
    ended = 0
    if not ON_LINUX or Child.starting:  # one of ours may have been born whose id nobody knows yet
        return 0
    for pid in children() - known:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's keeps no other alive
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            gone, _status = os.waitpid(pid, os.WNOHANG)
            ended += gone == pid
    return ended


@dataclass(kw_only=True)
class Child:
    """One child process that leads a process group, and dies with this process. ``await start``, then ``stop``."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    output: Path | None = None
    """File that its stdout and stderr are appended to; none: inherited."""
    pass_fds: Sequence[int] = ()
    cwd: Path | None = None
    process: asyncio.subprocess.Process | None = field(default=None, init=False)
    starting: ClassVar[int] = 0
    """How many are being started in this process now."""

    @property
    def pid(self) -> int:
        """Its process id. Raises ``RuntimeError`` before ``start``."""
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self.process.pid

    async def start(self) -> None:
        """Start it. Raises ``Unavailable`` if the program cannot be run."""
        parent = os.getpid()

        def born() -> None:
            lead_group()
            die_with_parent(signal.SIGKILL, parent)

        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open_log(self.output)) if self.output else None
            Child.starting += 1
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    env={**self.env, PARENT: str(parent)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=tuple(self.pass_fds),
                    cwd=self.cwd,
                    preexec_fn=born,
                )
            except OSError as error:
                raise Unavailable(f"{self.name} cannot be started: {error}") from error
            finally:
                Child.starting -= 1

    async def wait(self) -> int:
        """Its exit status once it has ended (negative: the signal that killed it)."""
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        return await self.process.wait()

    def kill_group(self) -> None:
        """SIGKILL to everything in its process group; nothing if all are gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self) -> int | None:
        """SIGKILL to its group. Its exit status; ``None`` if it hangs in the kernel and was given up."""
        self.kill_group()
        try:
            async with asyncio.timeout(KILLED_S):
                return await self.wait()
        except TimeoutError:
            log.error("%s (pid %d) has not ended %g s after SIGKILL and is given up", self.name, self.pid, KILLED_S)
            return None

    async def stop(self, grace_s: float) -> int | None:
        """SIGTERM, after ``grace_s`` seconds ``end``; what is left of its group is killed. Its exit status."""
        process = self.process
        if process is None:
            return 0
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                return await process.wait()
        except TimeoutError:
            return await self.end()
        finally:
            self.kill_group()


def size(path: Path | None) -> int:
    """Bytes of a log; 0 if there is none."""
    return path.stat().st_size if path is not None and path.exists() else 0


def tail(path: Path | None, lines: int = 15, since: int = 0) -> str:
    """The last ``lines`` of a log, for an error message; "" if there is none. ``since``: its ``size`` when that began
    which is asked about, unless it was rotated meanwhile; what stands before is of others."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        whole = path.stat().st_size
        file.seek(max(0, since if since <= whole else 0, whole - 16384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

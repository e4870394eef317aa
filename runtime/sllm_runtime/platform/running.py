"""Which platform runs on a data directory: a lock held for life, a file that says who holds it, and how to end it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import msgspec

from sllm_runtime.platform.nats_server import write_private
from sllm_runtime.platform.process import start_time
from sllm_runtime.protocol.errors import Conflict, Unavailable
from sllm_runtime.protocol.profiles import PLATFORM_LOCK

log = logging.getLogger(__name__)

RUNNING_FILE: Final = "up.json"
"""In a platform's data directory: who runs there."""
_KILLED_S: Final = 15.0


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A platform that runs. ``started`` tells its process from a later one with the same id."""

    pid: int
    started: int | None
    url: str
    urls: tuple[str, ...]
    profile: str
    nats_url: str
    data: str
    stop_s: float = 15.0
    """What it may take to stop: calls that run are given their time."""
    pids: dict[str, int] = msgspec.field(default_factory=dict)
    notes: dict[str, str] = msgspec.field(default_factory=dict)
    """What its processes want a person to know, by their names."""


@dataclass
class Lock:
    """``PLATFORM_LOCK`` there, held until this process ends, however it ends."""

    data: Path
    _fd: int | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.data / PLATFORM_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            there = read_running(self.data)
            where = f" at {there.url} (pid {there.pid})" if there else ""
            raise Conflict(f"a platform already runs on {self.data}{where}; `sllm down` stops it") from None
        self._fd = fd
        return self

    def __exit__(self, *_error: object) -> None:
        (self.data / RUNNING_FILE).unlink(missing_ok=True)
        if self._fd is not None:
            os.close(self._fd)

    def write(self, running: Running) -> None:
        """Say who runs here."""
        write_private(self.data / RUNNING_FILE, msgspec.json.encode(running).decode())

    def changed(self, running: Running) -> None:
        """``write``, while it runs: on a disk that is full, say, what was said before stays until the next change."""
        try:
            self.write(running)
        except OSError as error:
            log.warning("%s cannot be written: %s", self.data / RUNNING_FILE, error)


def read_running(data: Path) -> Running | None:
    """The platform that runs on ``data``, or ``None``; what a killed one left behind counts as none."""
    try:
        running = msgspec.json.decode((data / RUNNING_FILE).read_bytes(), type=Running)
    except (OSError, msgspec.MsgspecError):
        return None
    return running if running.started is not None and start_time(running.pid) == running.started else None


def stop_running(running: Running) -> None:
    """End it: SIGTERM, after ``running.stop_s`` seconds SIGKILL, whereupon the kernel ends its children.

    Raises ``Unavailable`` if it is not ours to end.
    """
    with contextlib.ExitStack() as stack:
        try:
            handle = os.pidfd_open(running.pid)
            stack.callback(os.close, handle)
            if start_time(running.pid) != running.started:
                return
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            if not _ended(handle, running.stop_s):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                _ended(handle, _KILLED_S)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise Unavailable(f"pid {running.pid} belongs to somebody else: {error}") from error


def _ended(handle: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(int(seconds * 1000)))

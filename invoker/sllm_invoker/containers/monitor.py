"""A container's monitor (podman's conmon): a process of the engine's that becomes our child, since nobody else is left
above it. Somebody has to wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path


class Monitor:
    """The process whose id stands in ``file``; none where the engine wrote none (docker). Owns a pidfd till it ends."""

    def __init__(self, file: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._pidfd: int | None = None
        with contextlib.suppress(OSError, ValueError):
            self._pidfd = os.pidfd_open(int(file.read_text()))
        if self._pidfd is None:
            self._ended.set_result(None)
        else:
            self._loop.add_reader(self._pidfd, self._dead)

    def _dead(self) -> None:
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        reap(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(None)

    @property
    def gone(self) -> bool:
        """Whether it has ended, or there never was one."""
        return self._ended.done()

    async def ended(self, within_s: float) -> bool:
        """Whether it has ended by then."""
        _, late = await asyncio.wait([self._ended], timeout=within_s)
        return not late


def reap(pidfd: int) -> None:
    """Wait for a process that has ended, if it is our child: it may have become so when its parent died."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)

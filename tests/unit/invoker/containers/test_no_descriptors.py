"""What was opened for a container that cannot be equipped is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sllm_invoker.containers.driver import _equip


def pipes() -> list[str]:
    """Pipes and sockets that are open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    found = []
    for link in links:
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(link))
    return sorted(each for each in found if each.startswith(("pipe:", "socket:")))


@pytest.mark.parametrize("room", [0, 1])
async def test_nothing_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    before, pipe2, made = pipes(), os.pipe2, list[tuple[int, int]]()

    def short(flags: int) -> tuple[int, int]:
        if len(made) >= room:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(pipe2(flags))
        return made[-1]

    monkeypatch.setattr(os, "pipe2", short)
    rendezvous: Any = SimpleNamespace(monitor=tmp_path / "monitor")
    connection, other = socket.socketpair()
    with connection, other, pytest.raises(OSError, match="Too many open files"):
        _equip("a", rendezvous, connection, 1, -1, None)
    assert pipes() == before

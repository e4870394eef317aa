"""Where a container meets its invoker: a directory of its own with one listening socket, for one connection.

Docker passes no descriptors to a container, so its first process fetches them here. Who may connect is who sees the
directory: the container that it is mounted into (and the host's root). Process and user ids prove nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
from pathlib import Path

from sllm_invoker.containers.arguments import User
from sllm_runtime.protocol.worker import RENDEZVOUS

_CREDENTIALS = struct.Struct("3i")


class Rendezvous:
    """``root``/``name`` and what is in it, until ``close``."""

    def __init__(self, root: Path, name: str, user: User) -> None:
        self._root = root / name
        self._root.mkdir(mode=0o700, parents=True)
        self.door = self._root / "door"
        """What the container sees."""
        self.monitor = self._root / "monitor"
        """For the engine alone."""
        self.door.mkdir(mode=0o700)
        socket_path = self.door / Path(RENDEZVOUS).name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            _bind(self._listener, socket_path)
            if os.geteuid() == 0:
                for path in (socket_path, self.door):
                    os.chown(path, user.uid, user.gid)
            self._listener.listen(1)
        except BaseException:
            self.close()
            raise

    async def admit(self) -> socket.socket:
        """The first connection; from then on there is no second. The caller sets the deadline and owns the socket."""
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self._listener)
        self._shut()
        return connection

    def _shut(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            (self.door / Path(RENDEZVOUS).name).unlink()

    def close(self) -> None:
        """Nobody is waited for any more. Repeatable."""
        self._shut()
        shutil.rmtree(self._root, ignore_errors=True)


def _bind(listener: socket.socket, path: Path) -> None:
    """A socket's path has 107 bytes; a node's data may lie deeper."""
    directory = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def peer_pid(connection: socket.socket) -> int:
    """The process, as seen from here, that connected; 0 if it is of no process namespace below ours."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[0])

"""Programs of one machine that do something one after the other: who has a name has the turn, and its end, however it
comes, is the next one's beginning."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Final

_AGAIN_S: Final = 0.02
"""Somebody has the name and does not listen, as for a moment before it does: it is tried again after this."""


@contextlib.asynccontextmanager
async def turn(name: str) -> AsyncIterator[None]:
    """Wait until nobody else on this machine has ``name``, and have it. The caller sets the deadline.

    The name is an abstract Unix socket's: no file is left by who is killed, and who waits is told by its connection's
    end. Programs in other network namespaces have names of their own, and anybody in this one may take a name.
    """
    loop = asyncio.get_running_loop()
    address = f"\0{name}"
    while True:
        with _socket() as mine:
            if _taken(mine, address):
                with _socket() as waits, contextlib.suppress(OSError):  # it has just ended
                    await loop.sock_connect(waits, address)
                    await loop.sock_recv(waits, 1)
                await asyncio.sleep(_AGAIN_S)
                continue
            yield
            return


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _taken(mine: socket.socket, address: str) -> bool:
    try:
        mine.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return True
    mine.listen(socket.SOMAXCONN)
    return False

"""How ranks meet: over the sockets that their invoker made, each to each other one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from sllm_runtime.protocol.errors import InstanceLost

Peers = Mapping[int, socket.socket]
"""A stream socket to each other rank, by its number. What waits on one has the socket's own deadline."""
TOLD: Final = b"\1"


def exchanged(peers: Peers, fd: int) -> dict[int, int]:
    """The descriptor that each other rank gives for ``fd``; all have come then. The caller owns them.

    Raises ``InstanceLost`` naming the rank that is gone or does not come.
    """
    for number, peer in peers.items():
        try:
            socket.send_fds(peer, [TOLD], [fd])
        except OSError as error:
            raise lost(number, len(peers) + 1, error) from error
    found: dict[int, int] = {}
    try:
        for number, peer in peers.items():
            found[number] = _given(peers, number, peer)
    except BaseException:
        for each in found.values():
            os.close(each)
        raise
    return found


def _given(peers: Peers, number: int, peer: socket.socket) -> int:
    try:
        told, fds, _, _ = socket.recv_fds(peer, len(TOLD), 1)
    except OSError as error:
        raise lost(number, len(peers) + 1, error) from error
    if not told or not fds:
        raise lost(number, len(peers) + 1)
    return fds[0]


def lost(number: int, size: int, error: OSError | None = None) -> InstanceLost:
    """That rank ``number`` of ``size`` is gone, or hangs: then ``error`` is a time-out."""
    why = "says nothing although it is due" if isinstance(error, TimeoutError) else "is gone"
    return InstanceLost(f"rank {number} of {size} {why}")

"""One network for the ranks of an instance (``network = cluster``): nothing is in it but a loopback, and they."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from sllm_runtime.protocol.errors import StartFailed
from sllm_runtime.protocol.worker import Assign
from sllm_runtime.worker import isolation
from sllm_runtime.worker.engine.ours.parallel.meeting import TOLD, lost

LONGEST_S: Final = 1e6
"""That another process of an instance is waited for: ``poll`` counts milliseconds, of which 31 bits hold 24 days."""
_OWN: Final = Path("/proc/self/ns/net")


def leave_network(assign: Assign, fds: Sequence[int], left: int | None = None, *, can: bool = False) -> None:
    """Leave the network for one that has nothing but a loopback, unless the function may have it: each process for its
    own, or, in a cluster, all for rank 0's. ``fds``: those that came with ``assign``. ``left``: the network, where this
    process has left it for now; it goes back if the function may have it.

    ``can``: the kernel permits it, as the fork server has found: who stays all the same does not start. Else it is
    only tried; members that are containers are in one namespace already. Raises ``StartFailed`` where it stays,
    ``InstanceLost`` where rank 0 is gone or hangs, ``OSError`` if it cannot go back.
    """
    member, network = assign.member, assign.manifest.network
    edges = fds[-member.edges :] if assign.cluster else ()
    if network and left is not None and not isolation.enter_network(left):
        raise OSError("the network that this worker had left cannot be entered again")
    if left is None and not network and not (edges and member.number):
        _left(isolation.leave_network(), can)
    if network or not edges:
        return
    with ExitStack() as stack:
        own = [stack.enter_context(socket.socket(fileno=os.dup(fd))) for fd in edges]
        for each in own:
            each.settimeout(min(assign.manifest.startup_timeout, LONGEST_S))
        if member.number:
            _follow(own[1], member.ranks, can)
        else:
            _lead(own[member.ranks - 1 :])


def _left(done: bool, can: bool) -> None:
    if can and not done:
        raise StartFailed(
            "the function may have no network, and its process cannot leave the node's: the kernel makes no further"
            " network namespace (user.max_net_namespaces, or memory); start it again, or look what runs on the node"
        )


def _lead(peers: Sequence[socket.socket]) -> None:
    fd = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number, peer in enumerate(peers, 1):
            try:
                socket.send_fds(peer, [TOLD], [fd])
            except OSError as error:
                raise lost(number, len(peers) + 1, error) from error
    finally:
        os.close(fd)


def _follow(first: socket.socket, ranks: int, can: bool) -> None:
    try:
        told, fds, _, _ = socket.recv_fds(first, len(TOLD), 1)
    except OSError as error:
        raise lost(0, ranks, error) from error
    if not told or not fds:
        raise lost(0, ranks)
    try:
        _left(isolation.enter_network(fds[0]), can)
    finally:
        os.close(fds[0])

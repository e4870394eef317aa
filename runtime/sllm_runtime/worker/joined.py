"""What joins the processes of an instance: the sockets that its invoker gave to this one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

from sllm_runtime.protocol.errors import ProtocolError, SllmError
from sllm_runtime.protocol.worker import Assign, Member
from sllm_runtime.worker.cluster import LONGEST_S
from sllm_runtime.worker.engine.ours.edge import Edges
from sllm_runtime.worker.engine.ours.parallel.group import Group, Library, ProcessGroup
from sllm_runtime.worker.engine.ours.parallel.shared import SharedGroup


class Joined:
    """The edges of ``member``, until ``edges`` or ``group`` take them over. ``patience_s``: longest wait for another
    process: a whole start, since it may owe what its weights are still awaited for."""

    def __init__(self, member: Member, fds: Sequence[int], patience_s: float) -> None:
        self.member = member
        self.patience_s = patience_s = min(patience_s, LONGEST_S)
        own = [socket.socket(fileno=fd) for fd in fds]
        self._peers: list[socket.socket] = []
        if member.stages > 1:
            self.edges = [Edges(*own, patience_s=patience_s)]
            """Of a stage: before and behind. Of a rank: to rank 0, or from it to each other one."""
        else:
            streams = len(own) - (member.ranks - 1)
            self.edges = [Edges.duplex(each, patience_s=patience_s) for each in own[:streams]]
            self._peers = own[streams:]

    @classmethod
    def of(cls, assign: Assign, fds: list[int]) -> Joined | None:
        """Takes the edges off the end of ``fds``; ``None`` where the instance is one process."""
        member = assign.member
        if member.count == 1:
            return None
        if len(fds) != 2 + member.edges:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"{len(fds)} descriptors came for {member}, {2 + member.edges} were due")
        edges = fds[2:]
        del fds[2:]
        return cls(member, edges, assign.manifest.startup_timeout)

    def group(self, library: Library | None = None) -> Group:
        """All ranks, met; they gather through ``library`` (``library_of``). Raises ``InstanceLost`` if one is gone."""
        number, own = self.member.number, self._peers
        others = [each for each in range(self.member.ranks) if each != number]
        peers, self._peers = dict(zip(others, own, strict=True)), []
        if library is None:
            return SharedGroup(number, peers, patience_s=self.patience_s)
        return ProcessGroup(library, number, peers, patience_s=self.patience_s)

    def fail(self, error: SllmError) -> None:
        """Tell the others why this process ends, and part from them."""
        for edges in self.edges:
            edges.tell(error)
            edges.close()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()

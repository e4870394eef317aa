"""Ranks on one node gather over shared memory: no network, which sandboxes do not have, and no library's threads.

Each rank writes its part into memory that the others read, and tells each of them by a byte. Two slots are used in
turns: a rank writes a slot again when everybody has told it of the next, which they do after they have read this one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch

from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.worker.engine.ours import ring
from sllm_runtime.worker.engine.ours.parallel.group import Gathering
from sllm_runtime.worker.engine.ours.parallel.meeting import TOLD, Peers, exchanged, lost
from sllm_runtime.worker.engine.ours.ring import Slots

SLOT_BYTES: Final = 1 << 20
"""What is larger goes in pieces."""
_SLOTS: Final = Slots(2, 1, SLOT_BYTES, torch.uint8)


class SharedGroup(Gathering):
    """``peers``: a stream socket to each other rank, by its number; owns them. ``patience_s``: longest wait for a rank.

    The constructor returns when all ranks have met. Raises ``InstanceLost`` if one is gone or does not come,
    ``ProtocolError`` if what one gives to read is not what this makes.
    """

    def __init__(self, rank: int, peers: Peers, *, patience_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._peers = dict(sorted(peers.items()))
        self._theirs: dict[int, torch.Tensor] = {}
        self._turn = 0
        self._closed = False
        for peer in self._peers.values():
            peer.settimeout(patience_s)
        try:
            self._mine = self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> torch.Tensor:
        fd, mine = ring.create(_SLOTS)
        try:
            given = exchanged(self._peers, fd)
        finally:
            os.close(fd)
        try:
            self._theirs = {number: ring.attach(theirs, _SLOTS) for number, theirs in given.items()}
        finally:
            for theirs in given.values():
                os.close(theirs)
        return mine

    def _gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._closed:
            raise InstanceLost("the ranks of this instance have parted")
        parts = list(x.new_empty(self.size, *x.shape))
        parts[self.rank].copy_(x)
        flat = [part.view(-1).view(torch.uint8) for part in parts]
        for at in range(0, len(flat[0]), SLOT_BYTES):
            self._exchange([part[at : at + SLOT_BYTES] for part in flat])
        return parts

    def _exchange(self, pieces: Sequence[torch.Tensor]) -> None:
        slot, self._turn = self._turn % _SLOTS.count, self._turn + 1
        count = len(pieces[0])
        self._mine[slot, 0, :count].copy_(pieces[self.rank])
        for number, peer in self._peers.items():
            try:
                peer.sendall(TOLD)
            except OSError as error:
                raise lost(number, self.size, error) from error
        for number, peer in self._peers.items():
            try:
                told = peer.recv(1)
            except OSError as error:
                raise lost(number, self.size, error) from error
            if not told:
                raise lost(number, self.size)
            pieces[number].copy_(self._theirs[number][slot, 0, :count])

    def close(self) -> None:
        """Part from the others, who see it at their next sum. Repeatable."""
        self._closed = True
        for peer in self._peers.values():
            peer.close()
        self._theirs.clear()

"""What ranks compute together. Each rank makes a sum for itself, in the order of ranks: all have the same bits, and a
row's do not depend on how a library would have shared the sum out.
"""

from __future__ import annotations

import datetime
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.worker.engine.ours.parallel.meeting import Peers, exchanged, lost

Library = Literal["gloo", "nccl"]
_LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_NAME: Final = "lo"


class Group(Protocol):
    """All ranks call the same methods in the same order, with as many rows. Raises ``InstanceLost`` if one is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, made in float32, of the dtype of ``x``."""

    def columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """``x`` (rows, widths[rank]) of all ranks side by side."""

    def close(self) -> None:
        """Part from the others, who see it at their next sum. Repeatable."""


class Gathering(ABC):
    """A ``Group`` whose ranks each get the parts of all."""

    rank: int
    size: int

    @abstractmethod
    def _gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """``x`` of each rank, in their order. Raises ``InstanceLost``."""

    @abstractmethod
    def close(self) -> None:
        """See ``Group.close``."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Group.total``."""
        parts = self._gather(x)
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See ``Group.columns``."""
        wide = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1]))
        return torch.cat([part[:, :width] for part, width in zip(self._gather(wide), widths, strict=True)], 1)


def library_of(device: torch.device) -> Library | None:
    """What ranks gather through whose weights are on ``device``; None: memory that they share (``SharedGroup``)."""
    return "nccl" if device.type == "cuda" else None


class ProcessGroup(Gathering):
    """Over torch.distributed: gloo for CPUs, NCCL for GPUs (which has not been run yet). All ranks are on one node and
    in one network namespace: the library's own connections are on the loopback interface.

    ``peers``: a stream socket to each other rank, by its number; owns them. ``patience_s``: longest wait for a rank.
    The ranks find each other by what they write to a file in memory (``FileStore``) that rank 0 hands to the others
    over ``peers``. Raises ``InstanceLost`` if one is gone or does not come.
    """

    def __init__(self, library: Library, rank: int, peers: Peers, *, patience_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._library = library
        self._peers = dict(sorted(peers.items()))
        self._file = -1
        self._group: Any = None
        for peer in self._peers.values():
            peer.settimeout(patience_s)
        try:
            self._file = _file(rank, self._peers)
            self._group = self._made(datetime.timedelta(seconds=patience_s))
        except BaseException:
            self.close()
            raise

    def _made(self, patience: datetime.timedelta) -> Any:
        store = FileStore(f"/proc/self/fd/{self._file}", self.size)
        store.set_timeout(patience)
        make = _gloo if self._library == "gloo" else _nccl
        try:
            return make(store, self.rank, self.size, patience)
        except RuntimeError as error:
            raise self._lost(f"rank {self.rank} of {self.size} did not meet the others", error) from error

    def _gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._group is None:
            raise InstanceLost("the ranks of this instance have parted")
        parts = list(x.new_empty(self.size, *x.shape))
        try:
            self._group.allgather([parts], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise self._lost(f"a rank of {self.size} is gone", error) from error
        return parts

    def _lost(self, what: str, error: RuntimeError) -> InstanceLost:
        """Named by the end of its socket, where that is seen as soon as the library's."""
        for number, peer in self._peers.items():
            try:
                if not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return lost(number, self.size)
            except BlockingIOError:
                continue
            except OSError as gone:
                return lost(number, self.size, gone)
        return InstanceLost(f"{what}: {_line(error)}")

    def close(self) -> None:
        """See ``Group.close``."""
        if self._group is not None and self._library == "nccl":
            self._group.abort()  # what waits on a GPU for a rank that is gone waits no more
        self._group = None  # and the store with it, which opens the file by this number until its end
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        for peer in self._peers.values():
            peer.close()


def _file(rank: int, peers: Peers) -> int:
    """A descriptor of the file that rank 0 made, which the caller owns; all ranks have come."""
    own = os.memfd_create("sllm-ranks", os.MFD_CLOEXEC)
    given: dict[int, int] = {}
    try:
        given = exchanged(peers, own)
        return os.dup(own if rank == 0 else given[0])
    finally:
        for fd in (own, *given.values()):
            os.close(fd)


def _gloo(store: Any, rank: int, size: int, patience: datetime.timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = patience
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, patience: datetime.timedelta) -> Any:
    os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK_NAME  # it passes the loopback over where it sees another one
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]

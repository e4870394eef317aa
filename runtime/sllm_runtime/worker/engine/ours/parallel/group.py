"""What ranks compute together. Each rank makes a sum for itself, in the order of ranks: all have the same bits, and a
row's do not depend on how a library would have shared the sum out.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from sllm_runtime.protocol.errors import InstanceLost

_LOOPBACK: Final = "127.0.0.1"


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


class ProcessGroup(Gathering):
    """Over torch.distributed: gloo for CPUs, NCCL for GPUs (which has not been run yet). All ranks are on one node.

    ``meeting``: a file that does not exist, in a directory of these ranks alone: they find each other by it, not at a
    port. Gloo's own connections are on the loopback interface, so the ranks share one network namespace.
    """

    def __init__(
        self, backend: Literal["gloo", "nccl"], meeting: Path, rank: int, size: int, *, patience_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        store = FileStore(str(meeting), size)
        patience = datetime.timedelta(seconds=patience_s)
        store.set_timeout(patience)
        try:
            make = _gloo if backend == "gloo" else _nccl
            self._group: Any = make(store, rank, size, patience)
        except RuntimeError as error:
            raise InstanceLost(f"rank {rank} of {size} did not meet the others: {_line(error)}") from error

    def _gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._group is None:
            raise InstanceLost("the ranks of this instance have parted")
        parts = list(x.new_empty(self.size, *x.shape))
        try:
            self._group.allgather([parts], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise InstanceLost(f"a rank of {self.size} is gone: {_line(error)}") from error
        return parts

    def close(self) -> None:
        """See ``Group.close``."""
        self._group = None


def _gloo(store: Any, rank: int, size: int, patience: datetime.timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = patience
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, patience: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]

"""Adapters on stages: the head brings one, and hands the others the halves of their layers before a step names it.

They travel in a sealed memory file that goes round with its message, so each stage copies its own part out of it and
nobody waits for bytes in a socket. A stage keeps an adapter as long as the head has it: the table of those that
requests may name, and those that run, decide about all processes.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as Names
from typing import Final

import torch

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import OutOfMemory, ProtocolError
from sllm_runtime.protocol.stages import Lend, Lent, LowRankShape, Step
from sllm_runtime.worker.engine.ours.adapter import Adapter, LowRank
from sllm_runtime.worker.engine.ours.lora import Lora

SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Lender:
    """What the head has lent. ``mine``: tensors of its own layers; of others it keeps no halves once they are lent."""

    def __init__(self, mine: Names[str]) -> None:
        self._mine = mine
        self._numbers: weakref.WeakKeyDictionary[Adapter, int] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        """Numbers of those that nobody has here any more; whichever thread was the last to have them adds to it."""
        self._next = 0

    def number(self, adapter: Adapter | None) -> int | None:
        """By which the stages know ``adapter``."""
        return None if adapter is None else self._numbers[adapter]

    def news(self, adapters: Iterable[Adapter | None]) -> tuple[Lend, int | None] | None:
        """What the stages are to be told before a step names ``adapters``, and the descriptor that goes along, which
        the caller owns; ``None`` if they know. Raises ``OutOfMemory``."""
        new = [each for each in dict.fromkeys(adapters) if each is not None and each not in self._numbers]
        gone = tuple(self._gone.popleft() for _ in range(len(self._gone)))
        if not new:
            return (Lend(drop=gone), None) if gone else None
        numbers = range(self._next, self._next + len(new))
        message, fd = pack(dict(zip(numbers, new, strict=True)), gone)
        self._next += len(new)
        for number, adapter in zip(numbers, new, strict=True):
            self._numbers[adapter] = number
            weakref.finalize(adapter, self._gone.append, number).atexit = False
            adapter.keep(lambda module: f"{module}.weight" in self._mine)
        return message, fd


class Borrowed:
    """The adapters of a stage. ``mine``: tensors of its layers; it keeps the halves of these."""

    def __init__(self, lora: Lora, mine: Names[str]) -> None:
        self._lora = lora
        self._mine = mine
        self._adapters: dict[int, Adapter] = {}

    def take(self, message: Lend, fd: int | None) -> None:
        """Heed ``message``; ``fd`` stays the caller's. Raises ``ProtocolError``, and as ``Lora.put`` does."""
        for number in message.drop:
            if self._adapters.pop(number, None) is None:
                raise ProtocolError(f"adapter {number}, which is to be dropped, is not here")
        for number, adapter in () if fd is None else unpack(message, fd, self._mine):
            if number in self._adapters:
                raise ProtocolError(f"adapter {number} came twice")
            self._lora.bring(str(number), adapter)
            self._adapters[number] = adapter

    def begin(self, step: Step) -> None:
        """The next rows are those of ``step``. Raises ``ProtocolError`` if it names an adapter that is not here."""
        for part in step.parts:
            if part.adapter is not None and part.adapter not in self._adapters:
                raise ProtocolError(f"step {step.number} names adapter {part.adapter}, which is not here")
        self._lora.begin(
            (None if part.adapter is None else self._adapters[part.adapter], part.count) for part in step.parts
        )


def pack(adapters: Mapping[int, Adapter], drop: tuple[int, ...]) -> tuple[Lend, int]:
    """The message for ``adapters`` by their numbers, and their memory file, which the caller owns. Raises
    ``OutOfMemory``."""
    lent = tuple(
        Lent(number, adapter.tile, tuple(_shape(*module) for module in adapter.modules.items()))
        for number, adapter in adapters.items()
    )
    table = codec.pack(lent)
    fd = -1
    try:
        fd = os.memfd_create("sllm-adapters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(fd, "wb", closefd=False) as file:
            file.write(table)
            for adapter in adapters.values():
                for half in adapter.modules.values():
                    file.write(half.a.cpu().numpy().data)
                    file.write(half.b.cpu().numpy().data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError):
            raise OutOfMemory(f"an adapter cannot be handed to the other stages: {error.strerror}") from error
        raise
    return Lend(len(table), drop), fd


def unpack(message: Lend, fd: int, mine: Names[str]) -> Iterator[tuple[int, Adapter]]:
    """Copies of what ``pack`` put there, of each adapter the modules of the tensors ``mine``. Raises ``ProtocolError``
    if it is not what the message says: no sender can change or shorten what is read here."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False
    size = os.fstat(fd).st_size
    if not sealed or message.table > size:
        raise ProtocolError(f"adapters come in no sealed memory file with a table of {message.table} bytes")
    lent = codec.unpack(tuple[Lent, ...], _read(fd, torch.empty(message.table, dtype=torch.uint8), 0).numpy().tobytes())
    due = message.table + sum(shape.nbytes for each in lent for shape in each.modules)
    if due != size:
        raise ProtocolError(f"adapters of {due} bytes come in a memory file of {size}")
    at = message.table
    for each in lent:
        modules = {}
        for shape in each.modules:
            if f"{shape.module}.weight" in mine:
                modules[shape.module] = _half(fd, shape, at)
            at += shape.nbytes
        yield each.number, Adapter("", modules, each.tile)


def _shape(module: str, half: LowRank) -> LowRankShape:
    return LowRankShape(module, half.a.shape[0], half.a.shape[1], half.b.shape[1])


def _half(fd: int, shape: LowRankShape, at: int) -> LowRank:
    a = _read(fd, torch.empty(shape.inputs, shape.rank), at)
    return LowRank(a, _read(fd, torch.empty(shape.rank, shape.outputs), at + a.nbytes))


def _read(fd: int, into: torch.Tensor, at: int) -> torch.Tensor:
    """Fill ``into`` from byte ``at`` on. Not by the file's own position, which all stages have in common."""
    left = into.numpy().data.cast("B") if into.numel() else memoryview(b"")
    while left:
        got = os.preadv(fd, [left], at)
        if not got:
            raise ProtocolError("a memory file of adapters ends early")
        left, at = left[got:], at + got
    return into

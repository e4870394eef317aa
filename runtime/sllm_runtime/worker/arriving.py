"""A load on its way: what of a model is there, when each of its layers is, and how it ended."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sllm_loaderd.client import LoaderSession, PartitionMemory, SessionLoad
from sllm_runtime.protocol.checkpoint import CheckpointIndex, TensorRecord, block_spans, rank_blocks
from sllm_runtime.protocol.errors import DeadlineExceeded, SllmError
from sllm_runtime.protocol.loader import CPU, place_of
from sllm_runtime.protocol.timeline import WEIGHTS, Span

_PROGRESS_S: Final = 0.25
Report = Callable[[str, int, int], None]
"""Told of each stage's beginning and of bytes: ``(stage, done, total)``."""
Place = tuple[int, int]
"""A block: its partition's rank, its number there."""


class Weights:
    """A model's loads, one for each partition, from the request to when every byte is there. Thread-safe."""

    def __init__(self, session: LoaderSession, loads: Sequence[SessionLoad], began: float, timeout_s: float) -> None:
        self.session = session
        self.loads = tuple(loads)
        self.began = began
        """``perf_counter``."""
        self.ended: float | None = None
        """When every byte was there."""
        self.error: SllmError | None = None
        self._until = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._on_failure: Callable[[SllmError], None] | None = None

    @classmethod
    def begin(cls, fd: int, name: str, timeout_s: float, devices: Sequence[str] = (CPU,)) -> Weights:
        """Ask loaderd for the model behind the session ``fd``; ``timeout_s`` for all of it. Each partition that the
        session names (none: the first) goes to its own of ``devices`` (``place_of``)."""
        began = time.perf_counter()
        session = LoaderSession(fd, name=name)
        ranks = session.partitions or (0,)
        return cls(session, [session.load(rank, device=place_of(rank, devices)) for rank in ranks], began, timeout_s)

    @property
    def load(self) -> SessionLoad:
        """The first of them; the index and the small files are the same in all."""
        return self.loads[0]

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes there, bytes asked for."""
        done, total = zip(*(load.progress for load in self.loads), strict=True)
        return sum(done), sum(total)

    def attach(self) -> dict[int, PartitionMemory]:
        """The memory of each partition, all in place; see ``SessionLoad.attach``."""
        return {load.partition: load.attach(self.left) for load in self.loads}

    @property
    def left(self) -> float:
        """Seconds until it is too late."""
        return max(0.0, self._until - time.monotonic())

    def wait(self, report: Report) -> None:
        """Until every byte is there, telling of progress. Raises the load's error or ``DeadlineExceeded``."""
        try:
            while not self._all_there():
                report(WEIGHTS, *self.progress)
        except SllmError as error:
            self.fail(error)
            raise
        self.ended = self.ended or time.perf_counter()

    def wait_for(self, place: Place) -> None:
        """Until that block is there. Raises as ``wait`` does."""
        rank, block = place
        next(load for load in self.loads if load.partition == rank).wait(block, self.left)

    def wait_all(self) -> None:
        """Until every byte is there. Raises as ``wait`` does."""
        for load in self.loads:
            load.wait_all(self.left)

    def watch(self, report: Report) -> None:
        """``wait`` in a thread of its own, which ends with the load."""
        threading.Thread(target=self._watch, args=(report,), name="weights", daemon=True).start()

    def on_failure(self, call: Callable[[SllmError], None]) -> None:
        """Call ``call`` once when something of the model is not to be had, at once if that is so."""
        with self._lock:
            self._on_failure, error = call, self.error
        if error is not None:
            call(error)

    def span(self, since: float) -> tuple[Span, ...]:
        """From the request to the last byte, as seen from ``since`` (``perf_counter``); none before its end."""
        if self.ended is None and all(load.ready for load in self.loads):  # who waits for it has not had his turn
            self.ended = time.perf_counter()
        if self.ended is None:
            return ()
        return (Span(WEIGHTS, round((self.began - since) * 1e3, 3), round((self.ended - self.began) * 1e3, 3)),)

    def _all_there(self) -> bool:
        left, there = self.left, True
        for load in self.loads:  # each in turn, so that whichever fails is heard of
            try:
                load.wait_all(min(_PROGRESS_S / len(self.loads), left))
            except DeadlineExceeded:
                if left <= _PROGRESS_S:
                    raise
                there = False
        return there

    def _watch(self, report: Report) -> None:
        try:
            self.wait(report)
        except SllmError:
            return  # whoever needs a byte hears of it, and so does ``on_failure``

    def fail(self, error: SllmError) -> None:
        """Something of the model is not to be had, now or later: whoever asked for ``on_failure`` is told, once."""
        with self._lock:
            first, self.error = self.error is None, self.error or error
            call = self._on_failure
        if first and call is not None:
            call(error)


@dataclass(frozen=True, slots=True)
class Layers:
    """``decoder.Arrival`` over a model's loads: ``blocks`` that each layer needs, in whichever partitions. What stands
    behind the layers, ``last``, waits for all there is: so no token is told before the load's end is known."""

    weights: Weights
    blocks: Mapping[int, tuple[Place, ...]]
    last: int

    def wait(self, layer: int) -> None:
        """See ``Arrival.wait``."""
        for place in self.blocks.get(layer, ()):
            self.weights.wait_for(place)
        if layer == self.last:
            self.weights.wait_all()


def blocks_of(
    index: CheckpointIndex, ranks: Collection[int], needs: Mapping[int, frozenset[str]]
) -> dict[int, tuple[Place, ...]]:
    """For each layer, the blocks of ``ranks`` that hold what it reads (names, aliases and views among them). Of what
    several ranks have, those of the first, as ``CheckpointTensors`` reads it."""
    aliases = {alias.name: alias.of for alias in index.aliases}
    there = [record for record in (*index.views, *index.tensors) if record.rank in ranks]
    records = {record.name: record for record in sorted(there, key=lambda record: -record.rank)}
    spans = {rank: _spans(index, rank) for rank in ranks}

    def found(name: str) -> Iterator[Place]:
        record = records.get(aliases.get(name, name)) or records[name]
        return ((record.rank, number) for number in _touched(spans[record.rank], record))

    return {layer: tuple(sorted({place for name in names for place in found(name)})) for layer, names in needs.items()}


def _spans(index: CheckpointIndex, rank: int) -> list[tuple[int, ...]]:
    """Start, end and number of the block of everything that the rank's blocks wait for, by its start."""
    return sorted(
        (start, start + nbytes, number)
        for number, block in enumerate(rank_blocks(index, rank))
        for start, nbytes in block_spans(index, block)
    )


def _touched(spans: Sequence[tuple[int, ...]], record: TensorRecord) -> Iterator[int]:
    first = max(0, bisect_left(spans, (record.offset + 1,)) - 1)
    last = bisect_left(spans, (record.offset + record.nbytes,))
    return (number for _, stop, number in spans[first:last] if stop > record.offset)

"""One load as the worker sees it: its index, its files, its memory, and when each block is there. No torch."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from sllm_loaderd.client.device_memory import open_device_memory
from sllm_loaderd.client.mapping import Mapping, PartitionMemory
from sllm_runtime.protocol.checkpoint import (
    INDEX_NAME,
    BlockRecord,
    CheckpointIndex,
    block_spans,
    decode_checked,
    rank_blocks,
)
from sllm_runtime.protocol.errors import Cancelled, DeadlineExceeded, InstanceLost, ProtocolError, SllmError
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import (
    Cancel,
    Chunks,
    Detach,
    DeviceMemory,
    Done,
    Failed,
    Files,
    LoadProgress,
    Message,
    Ready,
    Reorder,
)

DEADLINE_S: Final = 60.0
_RUN: Final = 256 * MIB
"""Bytes of one call that fills in page tables: on pages of 4 KiB others cannot map memory for 10 to 20 ms meanwhile."""
T = TypeVar("T")


def runs(spans: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Ranges (offset, bytes), those that touch put together to at most ``most`` bytes each; empty ones are left out."""
    start = end = 0
    for offset, nbytes in spans:
        if not nbytes:
            continue
        if offset == end and offset + nbytes - start <= most:
            end = offset + nbytes
            continue
        if end > start:
            yield start, end - start
        start, end = offset, offset + nbytes
    if end > start:
        yield start, end - start


class SessionLoad:
    """One load of one partition: wait for its parts, then use its memory. Thread-safe."""

    def __init__(
        self, send: Callable[[Message], None], forget: Callable[[int], object], number: int, partition: int
    ) -> None:
        self._send = send
        self._forget = forget
        self._number = number
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._landed = threading.Condition(lock)
        """A block came, too: of these there are many, and who waits for all of them need not wake for each."""
        self._error: SllmError | None = None
        self._files: dict[str, bytes] = {}
        self._index: CheckpointIndex | None = None
        self._placing: Mapping | None = None  # chunks come one message after the other
        self._memory: PartitionMemory | None = None
        self._ready: set[int] = set()
        self._done = False
        self._cold: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # holds each block at most once, and the end
        self._populator: threading.Thread | None = None
        self._detached = False
        self.partition = partition
        self.progress = (0, 0)
        """Bytes there, bytes asked for."""

    # --- for the worker -----------------------------------------------------------------------------
    def index(self, timeout: float = DEADLINE_S) -> CheckpointIndex:
        """The checked index. Raises the load's error or ``DeadlineExceeded``, as all waits here."""
        return self._wait(lambda: self._index, timeout, "its index")

    def files(self, timeout: float = DEADLINE_S) -> dict[str, bytes]:
        """The model's small files (configuration, tokenizer) by name."""
        self.index(timeout)
        return {name: data for name, data in self._files.items() if name != INDEX_NAME}

    def blocks(self) -> list[BlockRecord]:
        """Blocks of this partition; a block's number is its place."""
        return rank_blocks(self.index(), self.partition)

    def attach(self, timeout: float = DEADLINE_S) -> PartitionMemory:
        """The partition's memory, all in place. No byte of a block may be touched before ``wait(block)``."""
        return self._wait(lambda: self._memory, timeout, "its memory")

    def wait(self, block: int, timeout: float = DEADLINE_S) -> None:
        """Until a block's bytes are there."""
        self._wait(lambda: self._done or block in self._ready or None, timeout, f"block {block}", self._landed)
        self._warm_up()

    def wait_all(self, timeout: float = DEADLINE_S) -> None:
        """Until all that was asked for is there."""
        self._wait(lambda: self._done or None, timeout, "all blocks")
        self._warm_up()

    @property
    def ready(self) -> bool:
        """Whether all that was asked for is there."""
        return self._done

    def reorder(self, blocks: Sequence[tuple[int, int]]) -> None:
        """From now on bring the blocks of these ranges first, in this order. Blocks that are not there end the load."""
        self._send(Reorder(request=self._number, blocks=tuple(blocks)))

    def cancel(self) -> None:
        """Stop it; who waits gets ``Cancelled``."""
        self._send(Cancel(request=self._number))

    def detach(self) -> None:
        """Give back the mapping as soon as nothing made from it lives, and end the load if it runs. Repeatable."""
        with contextlib.suppress(InstanceLost):
            self._send(Detach(request=self._number))
        self._forget(self._number)
        self._end(Cancelled("the load was given up here"))
        with self._changed:
            self._detached, populator = True, self._populator
        if populator is not None and populator is not threading.current_thread():
            populator.join()
        for memory in (self._placing, self._memory):
            if memory is not None:
                memory.release()

    # --- for the session's reader ---------------------------------------------------------------------
    def heard(self, message: Message, fds: Sequence[int]) -> None:
        """A message for this load; ``fds`` are this method's own. Runs in the reader's thread."""
        if isinstance(message, Files):
            self._take_files(message, fds[0])
        elif isinstance(message, Chunks):
            self._place(message, fds)
        elif isinstance(message, DeviceMemory):
            self._attach(open_device_memory(message, fds))
        elif isinstance(message, LoadProgress):
            self.progress = (message.done, message.total)
        elif isinstance(message, Ready):
            self._cold.put(message.block)
            self._warm_up()
            with self._landed:
                self._ready.add(message.block)
                self._landed.notify_all()
        elif isinstance(message, Done):
            self._change(lambda: setattr(self, "_done", True))
            self._cold.put(None)
        elif isinstance(message, Failed):
            self._end(message.error.to_error())

    def _take_files(self, message: Files, fd: int) -> None:
        try:
            files = {entry.name: os.pread(fd, entry.nbytes, entry.offset) for entry in message.files}
        finally:
            os.close(fd)
        self._files = files
        # loaderd has checked it and sealed it. To do so again costs a worker more than to read it (1,000 tensors: 1 ms
        # beside 0.4), before it can bind the first.
        index = decode_checked(files[INDEX_NAME])
        self._change(lambda: setattr(self, "_index", index))

    def _place(self, message: Chunks, fds: Sequence[int]) -> None:
        waiting = list(fds)
        # Held all the time: what ``detach`` gives back meanwhile may be somebody else's memory before a chunk is there.
        with self._changed:
            try:
                if self._index is None:
                    raise ProtocolError("chunks came before the index")
                if self._detached:
                    return
                if self._placing is None:
                    self._placing = Mapping(self._index.partition(self.partition).nbytes, message.chunk_bytes)
                for number in message.numbers:
                    self._placing.place(number, waiting.pop(0))
                if message.last:
                    self._placing.placed()
                    self._attach(self._placing)
            finally:
                for fd in waiting:
                    os.close(fd)
        if message.last and not message.huge_pages:  # so many pages that who reads them catches up with a late begin
            self._warm_up()

    def _attach(self, memory: PartitionMemory) -> None:
        with self._changed:
            if self._detached:
                memory.release()
                return
            self._change(lambda: setattr(self, "_memory", memory))

    def _warm_up(self) -> None:
        """Begin to fill in page tables, once there is something to fill in. If all is there in large pages, not before
        somebody waits: two threads that fault at once cost each other time, and tensors are made first."""
        with self._changed:  # who finds it may join it
            memory = self._memory
            if memory is None or self._detached or self._populator is not None:
                return
            populator = threading.Thread(target=self._populate, args=(memory,), name="sllm-populate", daemon=True)
            try:
                populator.start()
            except RuntimeError:  # no memory is left for its stack: pages come one by one, when they are read
                return
            self._populator = populator

    def _populate(self, memory: PartitionMemory) -> None:
        """Fill in page tables behind the blocks that come, and of all others at the end. A thread of its own."""
        blocks = self.blocks()
        warm: set[int] = set()
        while (number := self._cold.get()) is not None:
            self._populate_spans(memory, block_spans(self.index(0), blocks[number]))
            warm.add(number)
        if self._done and self._error is None and not self._partial:
            index = self.index(0)
            cold = (block for number, block in enumerate(blocks) if number not in warm)
            self._populate_spans(memory, [span for block in cold for span in block_spans(index, block)])

    def _populate_spans(self, memory: PartitionMemory, spans: Sequence[tuple[int, int]]) -> None:
        for offset, nbytes in runs(spans, _RUN):
            memory.populate(offset, nbytes)

    @property
    def _partial(self) -> bool:
        """Whether less than the whole partition was asked for."""
        index = self._index
        return index is None or self.progress[1] < index.partition(self.partition).nbytes

    def _end(self, error: SllmError) -> None:
        def end() -> None:
            if not self._done and self._error is None:
                self._error = error

        self._change(end)
        self._cold.put(None)

    def fail(self, error: SllmError) -> None:
        """The connection is gone: nothing more will come."""
        self._end(error)

    def _change(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
            self._landed.notify_all()

    def _wait(
        self, value: Callable[[], T | None], timeout: float, what: str, changed: threading.Condition | None = None
    ) -> T:
        until, changed = time.monotonic() + timeout, changed or self._changed
        with changed:
            while (found := value()) is None:
                if self._error is not None:
                    raise self._error
                if (left := until - time.monotonic()) <= 0:
                    done, total = self.progress
                    raise DeadlineExceeded(
                        f"{what} of partition {self.partition} did not come in {timeout} s ({done} of {total} bytes)",
                        stage="weights",
                    )
                changed.wait(left)
            return found

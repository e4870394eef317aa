"""A partition of a remote model comes to the SSD tier through a few chunks of the pool, and for no load: nothing of it
stays in memory.

Reads wait behind those of starts on their path, writes behind all reads of the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.paths import Paths
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.reader import ChunkSource
from sllm_loaderd.residency import Residency
from sllm_loaderd.ssd.write import CopyWrite
from sllm_loaderd.store import StoredModel
from sllm_loaderd.task import ReadChunk, Task, TaskState
from sllm_runtime.protocol.checkpoint import chunk_count
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.loader import DISK, PREWARM, PRIORITIES, WRITE_BACK

log = logging.getLogger(__name__)

LANES: Final = 4
"""Chunks on their way at once: of 16 MiB, enough for a source and a disk of several GB/s."""
Done = Callable[[Task, SllmError | None], None]
T = TypeVar("T", bound=Task)


class Fill:
    """One partition on its way to ``write``. ``run`` once; ``sources`` (best first) are the caller's."""

    def __init__(
        self,
        model: StoredModel,
        rank: int,
        write: CopyWrite,
        sources: Sequence[ChunkSource],
        paths: Paths,
        *,
        integrity: bool,
        written: Callable[[int], None],
    ) -> None:
        self._model, self._rank, self._write = model, rank, write
        self._sources, self._paths = sources, paths
        self._digests = model.index.partitions[rank].digests if integrity else None
        self._written = written
        self._loop = asyncio.get_running_loop()

    async def run(self, pool: ChunkPool, residency: Residency) -> None:
        """The copy is there when this returns; else nothing is left of it. Raises what a source or the disk raises,
        and ``PoolExhausted``."""
        nbytes = self._model.index.partitions[self._rank].nbytes
        count = chunk_count(nbytes, self._model.index.chunk_bytes)
        chunks: list[Chunk] = []
        try:
            chunks = residency.spare(min(count, LANES), pool.size_for(nbytes), self._model.checkpoint.digest)
            numbers = iter(range(count))
            await self._all([self._lane(chunk, numbers) for chunk in chunks])
            await asyncio.to_thread(self._write.finish)
        except OSError as error:
            raise _cannot(error) from error
        finally:
            pool.free(chunks)
            # Nothing where it was finished. Cancelled once more it happens all the same.
            await asyncio.shield(self._loop.run_in_executor(None, self._write.abandon))

    async def _all(self, lanes: Sequence[Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for lane in lanes:
                    group.create_task(lane)
        except* SllmError as errors:
            raise errors.exceptions[0] from None

    async def _lane(self, chunk: Chunk, numbers: Iterator[int]) -> None:
        """Brings the chunks that no other lane has begun, one after the other."""
        size = self._model.index.chunk_bytes
        total = self._model.index.partitions[self._rank].nbytes
        for number in numbers:
            nbytes = min(size, total - number * size)
            await self._read(number, nbytes, chunk)
            await self._do(partial(_Write, number, nbytes, chunk, self._write), WRITE_BACK)
            self._written(nbytes)

    async def _read(self, number: int, nbytes: int, chunk: Chunk) -> None:
        """From the first source that has it right. Raises what the last one failed with."""
        digest = self._digests[number] if self._digests is not None else None
        offset = number * self._model.index.chunk_bytes
        failure: SllmError | None = None
        for source in sorted(self._sources, key=lambda source: self._paths.doubted(source.path)):
            try:
                task = await self._do(partial(ReadChunk, number, offset, nbytes, digest, chunk, [source]), PREWARM)
            except SllmError as error:
                log.log(logging.DEBUG if failure else logging.WARNING, "%s; another source is read", error)
                failure = error
                continue
            failure = self._model.learn(self._rank, number, task.found) if task.found else None
            if failure is None:
                return
        if failure is not None:
            raise failure

    async def _do(self, make: Callable[[Done], T], priority: str) -> T:
        """Run one task on its path. Raises what it failed with. Cancelled, it lets go of the chunk first."""
        over: asyncio.Future[SllmError | None] = self._loop.create_future()

        def tell(error: SllmError | None) -> None:
            if not over.done():
                over.set_result(error)

        def done(_: Task, error: SllmError | None) -> None:
            self._loop.call_soon_threadsafe(tell, error)

        task = make(done)
        self._paths.put([task], PRIORITIES.index(priority))
        try:
            error = await asyncio.shield(over)
        except asyncio.CancelledError:
            while not (over.done() or task.state is TaskState.NEW or self._paths.cancel(task)):
                await asyncio.wait([over], timeout=0.1)
            raise
        if error is not None:
            raise error
        return task


class _Write(Task):
    def __init__(
        self,
        number: int,
        nbytes: int,
        chunk: Chunk,
        write: CopyWrite,
        done: Done,
    ) -> None:
        super().__init__(number, nbytes, (DISK,), done)
        self._chunk, self._write = chunk, write

    def run(self, path: str) -> None:
        try:
            with self._chunk.view[: self.nbytes] as view:
                self._write.write(self.number, view)
        except OSError as error:
            raise _cannot(error) from error


def _cannot(error: OSError) -> Unavailable:
    return Unavailable(f"the copy on the SSD tier cannot be written: {error.strerror or error}")

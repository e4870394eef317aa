"""A wish for blocks: how a request becomes one, and what it still lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.errors import InvalidCheckpoint, SllmError
from sllm_runtime.protocol.loader import PRIORITIES


@dataclass(eq=False, slots=True)
class LoadJob:
    """Somebody's wish for blocks. The callbacks are called in the event loop, ``failed`` or ``done`` last, once.

    ``chunks`` are wanted in this order; ``needs`` are the chunks of each block, ``sizes(chunk)`` the bytes of one.
    ``arrived(chunk)``, where given, is told each chunk the moment it is there.
    """

    needs: dict[int, frozenset[int]]
    chunks: tuple[int, ...]
    sizes: Callable[[int], int]
    priority: int
    ready: Callable[[int], None]
    progress: Callable[[int, int], None]
    done: Callable[[], None]
    failed: Callable[[SllmError], None]
    arrived: Callable[[int], None] = lambda number: None
    waiting: dict[int, set[int]] = field(default_factory=dict)
    """Block → chunks it still lacks."""
    lacking: set[int] = field(default_factory=set)
    total: int = 0
    there: int = 0
    """Bytes of ``chunks`` in all, and there."""

    def begin(self, there: Callable[[int], bool]) -> bool:
        """Tell what is there already, in order; whether that is all. If so, ``done`` alone says it for the blocks."""
        self.lacking = {number for number in self.chunks if not there(number)}
        self.waiting = {block: set(needs & self.lacking) for block, needs in self.needs.items()}
        self.total = sum(self.sizes(number) for number in self.chunks)
        self.there = self.total - sum(self.sizes(number) for number in self.lacking)
        self.progress(self.there, self.total)
        for number in self.chunks:
            if number not in self.lacking:
                self.arrived(number)
        if self.lacking:
            self._tell_ready()
        return not self.lacking

    def advance(self, number: int) -> bool:
        """A chunk is there; whether that was the last one."""
        if number not in self.lacking:
            return False
        self.lacking.discard(number)
        self.there += self.sizes(number)
        self.progress(self.there, self.total)
        self.arrived(number)
        for lacks in self.waiting.values():
            lacks.discard(number)
        self._tell_ready()
        return not self.lacking

    def reorder(self, blocks: Iterable[int]) -> None:
        """From now on ``blocks`` are wanted first, in this order; the others keep theirs behind them."""
        first = dict.fromkeys(block for block in blocks if block in self.needs)
        self.needs = {block: self.needs[block] for block in (*first, *(b for b in self.needs if b not in first))}
        self.chunks = _in_order(self.needs.values())

    def _tell_ready(self) -> None:
        for block in [block for block, lacks in self.waiting.items() if not lacks]:
            del self.waiting[block]
            self.ready(block)


def plan_job(
    model: StoredModel,
    rank: int,
    ranges: Iterable[tuple[int, int]],
    priority: str,
    *,
    ready: Callable[[int], None],
    progress: Callable[[int, int], None],
    done: Callable[[], None],
    failed: Callable[[SllmError], None],
) -> LoadJob:
    """The job for ordered block ranges (none: all blocks). Raises ``InvalidCheckpoint`` for what is not there."""
    partition = model.index.partition(rank)
    chunk_bytes = model.index.chunk_bytes
    needs = model.block_chunks[rank]
    if priority not in PRIORITIES:
        raise InvalidCheckpoint(f"priority {priority!r} is none of {PRIORITIES}", field="priority")
    wanted = {block: frozenset(needs[block]) for block in expand(ranges, len(needs))}
    return LoadJob(
        needs=wanted,
        chunks=_in_order(wanted.values()),
        sizes=lambda number: min(chunk_bytes, partition.nbytes - number * chunk_bytes),
        priority=PRIORITIES.index(priority),
        ready=ready,
        progress=progress,
        done=done,
        failed=failed,
    )


def expand(ranges: Iterable[tuple[int, int]], count: int) -> tuple[int, ...]:
    """The blocks of ordered ranges [first, last] (none: all ``count``). Raises ``InvalidCheckpoint``."""
    spans = tuple(ranges) or (((0, count - 1),) if count else ())
    if any(not 0 <= first <= last < count for first, last in spans):
        raise InvalidCheckpoint(f"blocks {spans} are asked for, the partition has {count}", field="blocks")
    if sum(last - first + 1 for first, last in spans) > count:
        text = f"more blocks are asked for than the {count} there are; name each once"
        raise InvalidCheckpoint(text, field="blocks")
    return tuple(dict.fromkeys(block for first, last in spans for block in range(first, last + 1)))


def _in_order(needs: Iterable[frozenset[int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number for chunks in needs for number in sorted(chunks)))

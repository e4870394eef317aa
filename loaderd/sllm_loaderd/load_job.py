"""A wish for blocks, and how a request becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.errors import InvalidCheckpoint, SllmError
from sllm_runtime.protocol.loader import PRIORITIES


@dataclass(eq=False, slots=True)
class LoadJob:
    """Somebody's wish for blocks. The callbacks are called in the event loop, ``failed`` or ``done`` last, once."""

    blocks: tuple[int, ...]
    needs: tuple[frozenset[int], ...]
    """Chunks of each block, in the order of ``blocks``."""
    chunks: tuple[int, ...]
    """All of them, in the order in which they are wanted."""
    priority: int
    ready: Callable[[int], None]
    progress: Callable[[int, int], None]
    done: Callable[[], None]
    failed: Callable[[SllmError], None]
    waiting: dict[int, set[int]] = field(default_factory=dict)
    """Block → chunks it still lacks."""
    lacking: set[int] = field(default_factory=set)
    total: int = 0
    there: int = 0
    """Bytes of ``chunks`` in all, and in memory."""


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
    model.index.partition(rank)
    needs = model.block_chunks[rank]
    spans = tuple(ranges) or (((0, len(needs) - 1),) if needs else ())
    if any(not 0 <= first <= last < len(needs) for first, last in spans):
        raise InvalidCheckpoint(f"blocks {spans} are asked for, the partition has {len(needs)}", field="blocks")
    if sum(last - first + 1 for first, last in spans) > len(needs):
        text = f"more blocks are asked for than the {len(needs)} there are; name each once"
        raise InvalidCheckpoint(text, field="blocks")
    if priority not in PRIORITIES:
        raise InvalidCheckpoint(f"priority {priority!r} is none of {PRIORITIES}", field="priority")
    blocks = tuple(dict.fromkeys(block for first, last in spans for block in range(first, last + 1)))
    return LoadJob(
        blocks=blocks,
        needs=tuple(frozenset(needs[block]) for block in blocks),
        chunks=tuple(dict.fromkeys(number for block in blocks for number in needs[block])),
        priority=PRIORITIES.index(priority),
        ready=ready,
        progress=progress,
        done=done,
        failed=failed,
    )

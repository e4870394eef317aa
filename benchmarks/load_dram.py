"""The cases of ``load`` where the model is in the pool already: bound, and bound with every byte read once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.load_model import Checkpoint
from benchmarks.load_node import Node
from benchmarks.load_ssd import SLACK, same
from benchmarks.load_systems import Loader, ours, take
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run

DEMO_POOL: Final = 2**29
DEMO_MS: Final = 10.0
LARGE_MS: Final = 30.0
READ_AIM: Final = 1.1


def demo(run: Run, case: str, directory: Path, model: Path) -> None:
    """The demo's model, bound from the pool."""
    with _second_start(directory / case, model, DEMO_POOL, huge=True) as (_, loader):
        loader.load()
        _bound(run, case, loader, at_most_ms=DEMO_MS)


def large(run: Run, case: str, directory: Path, checkpoint: Checkpoint) -> None:
    """The big checkpoint, bound from the pool; ``read`` in the case's name: and read."""
    huge = not case.endswith("4kib")
    room = checkpoint.nbytes + SLACK
    with _second_start(directory / case, checkpoint.directory, room, huge=huge) as (node, loader):
        same("sllm", loader.load(checkpoint.names).digest, checkpoint.digest)
        given = node.status().pool.huge_pages
        if "read" not in case:
            run.case(case, "sllm", "ms").notes = _pages(given)
            _bound(run, case, loader, at_most_ms=LARGE_MS)
        elif huge and not given:
            run.case(case, "sllm", "s").not_run = "this kernel gives no pages of 2 MiB to shared memory"
        else:
            run.case(case, "sllm", "s").notes = _pages(given)
            _read_once(run, case, loader)


def _pages(huge: bool) -> str:
    return "pages of 2 MiB" if huge else "pages of 4 KiB"


@contextlib.contextmanager
def _second_start(directory: Path, source: Path, room: int, *, huge: bool) -> Iterator[tuple[Node, Loader]]:
    """A node whose pool takes the model, and a client for it."""
    with Node(directory, pool_bytes=room, huge_pages=str(huge).lower()) as node:
        model = node.register(str(source))
        with ours(node, model, directory) as loader:
            yield node, loader


def _bound(run: Run, case: str, loader: Loader, *, at_most_ms: float) -> None:
    """From opening the session until every tensor is bound and every block ready, nothing read from anywhere."""
    mine = run.case(case, "sllm", "ms")
    for _ in range(run.rounds):
        made = loader.load()
        take(mine, made)
        mine.samples[-1] = round(made.loaded_s * 1e3, 3)
        mine.extra["touched_ms"] = round(made.seconds * 1e3, 3)
    enough = len(mine.samples) >= run.least
    run.aims.append(Aim(f"{case}: bound, ms", mine.median if enough else None, at_most=at_most_ms))


def _read_once(run: Run, case: str, loader: Loader) -> None:
    """Bound and every byte read once, beside reading a mapping of the same bytes whose page tables are complete."""
    mine, populated = run.case(case, "sllm", "s"), run.case(case, "populated mapping", "s")
    for _ in range(run.rounds):
        take(mine, loader.load(read_all=True))
        take(populated, loader.load(read_all=True, populated=True))
    if case.endswith("4kib"):
        return  # reported beside the pages of 2 MiB, on which it is judged
    aim = f"{case}: sllm / populated mapping"
    run.aims.append(Aim(aim, ratio(mine, populated, least=run.least), at_most=READ_AIM))

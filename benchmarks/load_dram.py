"""The cases of ``load`` where the model is in the pool already: bound, and bound with every byte read once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import TWO_AND_A_HALF
from benchmarks.load_node import Node
from benchmarks.load_ssd import rounds, same
from benchmarks.load_systems import Loader, take
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run

DEMO_POOL: Final = 2**29
DEMO_MS: Final = 10.0
LARGE_MS: Final = 30.0
READ_AIM: Final = 1.1
_READS: Final = 5
"""Times the rounds of the reads from memory, which take a tenth of a second: noise is a tenth of that."""


def demo(bench: Bench, case: str, model: Path) -> None:
    """The demo's model, bound from the pool."""
    stored = bench.converted(model)
    node = bench.node(case, stored, pool_bytes=DEMO_POOL, prefault_bytes=0)
    with node:
        loader = bench.programs.ours(node, stored.model)
        loader.load()
        _bound(bench.run, case, loader, at_most_ms=DEMO_MS)


def large(bench: Bench, case: str) -> None:
    """The big checkpoint, bound from the pool."""
    with _second_start(bench, case, huge=True) as (node, loader):
        bench.run.case(case, "sllm", "ms").notes = _pages(node.status().pool.huge_pages)
        _bound(bench.run, case, loader, at_most_ms=LARGE_MS)


def read_once(bench: Bench, case: str, *, huge: bool) -> None:
    """The big checkpoint, bound and every byte read once, on pages of 2 MiB or of 4 KiB."""
    with _second_start(bench, case, huge=huge, read_all=True) as (node, loader):
        given = node.status().pool.huge_pages
        if huge and not given:
            bench.run.case(case, "sllm", "s").not_run = "this kernel gives no pages of 2 MiB to shared memory"
            return
        bench.run.case(case, "sllm", "s").notes = _pages(given)
        _read_once(bench.run, case, loader, judged=huge)


def _pages(huge: bool) -> str:
    return "pages of 2 MiB" if huge else "pages of 4 KiB"


@contextlib.contextmanager
def _second_start(bench: Bench, case: str, *, huge: bool, read_all: bool = False) -> Iterator[tuple[Node, Loader]]:
    """A node whose pool has the model, and a client for it, whose loads will be as the one that is compared here."""
    checkpoint = bench.checkpoint(case, TWO_AND_A_HALF)
    stored = bench.converted(checkpoint)
    with bench.node(case, stored, room=checkpoint.nbytes, huge_pages=str(huge).lower()) as node:
        loader = bench.programs.ours(node, stored.model)
        same("sllm", loader.load(checkpoint.names, read_all=read_all).digest, checkpoint.digest)
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


def _read_once(run: Run, case: str, loader: Loader, *, judged: bool) -> None:
    """Bound and every byte read once, beside reading a mapping of the same bytes whose page tables are complete."""
    mine, populated = run.case(case, "sllm", "s"), run.case(case, "populated mapping", "s")
    turns = [
        lambda: take(mine, loader.load(read_all=True)),
        lambda: take(populated, loader.load(read_all=True, populated=True)),
    ]
    rounds(run, case, turns, each=_READS)
    if judged:  # 4 KiB pages are reported beside those of 2 MiB, on which it is judged
        aim = f"{case}: sllm / populated mapping"
        run.aims.append(Aim(aim, ratio(mine, populated, least=run.least), at_most=READ_AIM))

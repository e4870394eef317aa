"""The cases of ``load`` that read a cold disk: ours, the peers and the disk's limit in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import page_cache
from benchmarks.load_bench import Bench
from benchmarks.load_model import Checkpoint, Shape
from benchmarks.load_node import Node
from benchmarks.load_reference import disk_read, disk_system, huge_read_s, huge_threads
from benchmarks.load_systems import NOT_HERE, Loader, Loading, Peer, take
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, Case, ratio
from benchmarks.runner import Run

BELOW: Final = (4, 2**22)
"""Threads and bytes of a read that is not counted."""
HUGE: Final = "direct read, 2 MiB pages"
LOADED: Final = "sllm, before the touch"
FIO_AIM: Final = 0.95
CPU_AIM: Final = 0.15
NEAR: Final = 1.5
"""Peers that took this many times the fastest one's time are not measured again where another case is like it."""


@dataclass
class Competitor:
    """A system in the rounds: its program, the file that has to be cold, its case."""

    loader: Loader
    file: Path
    case: Case

    def cold(self, *, primed: bool = True) -> None:
        """A load with nothing of its file in the page cache, into its case."""
        empty(self.file, primed=primed)
        take(self.case, self.loader.load())


@dataclass(frozen=True)
class Mine:
    """Ours in the rounds: a node, its model, a client, and the file that has to be cold."""

    node: Node
    model: str
    loader: Loader
    file: Path

    def cold(self, *, primed: bool = True) -> Loading:
        """A load with nothing in the pool and the page cache; what it held is free afterwards."""
        self.node.forget(self.model)
        empty(self.file, primed=primed)
        made = self.loader.load()
        self.node.until_free()
        return made


def cold(
    bench: Bench,
    name: str,
    shape: Shape,
    peers: Sequence[Peer],
    *,
    cores: int = 2,
    like: str = "",
    primed: bool = True,
    judge: Callable[[Run, str, int], None] | None = None,
) -> None:
    """Each round: the disk's limit, ours, each peer, all with an empty page cache; each round begins with the next.

    ``like``: a case whose slow peers are left out here. ``primed``: see ``empty``. ``judge``: adds the aims, by the
    run, the case and the checkpoint's bytes (None: ``ssd_aims``).
    """
    run, checkpoint = bench.run, bench.checkpoint(name, shape)
    chosen, stored = near(run, name, peers, like), bench.converted(checkpoint)
    bench.forms(checkpoint, chosen)
    with bench.on_cores(cores), bench.node(name, stored, room=checkpoint.nbytes) as node:
        loader = bench.programs.ours(node, stored.model)
        mine = Mine(node, stored.model, loader, stored.partition)
        same("sllm", loader.load(checkpoint.names).digest, checkpoint.digest)
        run.note(f"{name}: starting peers, comparing tensors")
        rivals = start(bench, name, checkpoint, chosen)
        node.until_free()
        turns: list[Callable[[], None]] = [
            lambda: reference(run.case(name, disk_system(), "s"), mine.file, primed=primed)
        ]
        turns.append(lambda: huge_reference(run.case(name, HUGE, "s"), mine.file, primed=primed))
        turns.append(lambda: add_ours(run, name, mine.cold(primed=primed)))
        turns += [functools.partial(rival.cold, primed=primed) for rival in rivals]
        rounds(run, name, turns)
    (judge or ssd_aims)(run, name, checkpoint.nbytes)


def rounds(run: Run, name: str, turns: Sequence[Callable[[], None]]) -> None:
    """All turns as often as there are rounds; each round begins with the next one."""
    for number in range(run.rounds):
        run.note(f"{name}: round {number + 1} of {run.rounds}")
        first = number % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            turn()


def near(run: Run, name: str, peers: Sequence[Peer], like: str) -> list[Peer]:
    """Those that were near the fastest one in the case ``like`` of this run; the others are listed with what they took,
    or with why they could not run. All, if it was not measured."""
    known = {each.system: each for each in run.cases if each.case == like}
    medians = {each.name: known[each.name].median for each in peers if each.name in known}
    best = min((median for median in medians.values() if median), default=0.0)
    chosen = []
    for each in peers:
        median = medians.get(each.name)
        if median and median > NEAR * best:
            factor = f"{median / best:.1f} times the fastest peer's time in {like}, so not measured here"
            run.case(name, each.name, "s").not_run = factor
        elif each.name in known and known[each.name].not_run:
            run.case(name, each.name, "s").not_run = known[each.name].not_run
        else:
            chosen.append(each)
    for missing, reason in NOT_HERE.items():
        run.case(name, missing, "s").not_run = reason
    return chosen


def start(bench: Bench, name: str, checkpoint: Checkpoint, peers: Sequence[Peer], **order: Any) -> list[Competitor]:
    """The peers that come up and load what was written; the others are listed with the reason. Raises ``ProgramFailed``
    for one that loads something else."""
    bench.programs.launch(peers)
    started = []
    for which in peers:
        case = bench.run.case(name, which.name, "s")
        try:
            loader = bench.programs.peer(which, checkpoint.directory, **order)
            made = loader.load(checkpoint.names)
        except ProgramFailed as error:
            case.not_run = " ".join(str(error).split())[-300:]
            continue
        same(which.name, made.digest, checkpoint.digest)
        started.append(Competitor(loader, checkpoint.directory / which.reads, case))
    return started


def empty(file: Path, *, primed: bool = True) -> None:
    """Nothing of it in the page cache. ``primed``: it is read past that once before: what lies below this machine's
    disk (a host, a controller) may keep what was read, and then has it for whoever is next, not only for who follows a
    neighbour."""
    page_cache.drop(file)
    if primed:
        page_cache.direct_read_s(file, *BELOW)
        page_cache.drop(file)


def reference(case: Case, partition: Path, *, primed: bool = True) -> None:
    empty(partition, primed=primed)
    made = disk_read(partition)
    case.samples.append(round(made.seconds, 4))
    if made.cpu_s >= 0:
        case.cpu_s = round(made.cpu_s, 4)


def huge_reference(case: Case, partition: Path, *, primed: bool = True) -> None:
    """``case.extra["threads"]``: how many read, found out at the first one."""
    if "threads" not in case.extra:
        case.extra["threads"] = huge_threads(partition)
    empty(partition, primed=primed)
    case.samples.append(round(huge_read_s(partition, case.extra["threads"]), 4))


def add_ours(run: Run, name: str, made: Loading) -> None:
    """A load of ours, twice in the record: with the touch and without."""
    case = run.case(name, "sllm", "s")
    take(case, made)
    case.extra["daemon_cpu_s"] = round(made.daemon_cpu_s, 4)
    before = run.case(name, LOADED, "s")
    take(before, made, touched=False)
    before.extra.setdefault("cpu_samples", []).append(round(made.loaded_cpu_s + made.daemon_cpu_s, 4))


def same(system: str, digest: str, expected: str) -> None:
    """Raises ``ProgramFailed`` for other tensors than the source's."""
    if digest != expected:
        raise ProgramFailed(f"{system} loaded other tensors: SHA-256 {digest[:16]}, written were {expected[:16]}")


def ssd_aims(run: Run, name: str, nbytes: int) -> None:
    """Against the disk without the touch, which no disk benchmark has; against peers with it."""
    mine, before = run.case(name, "sllm", "s"), run.case(name, LOADED, "s")
    limits = [run.case(name, system, "s") for system in (disk_system(), HUGE)]
    for limit in limits:
        run.aims.append(Aim(f"{name}: {limit.system} / sllm", ratio(limit, before, least=run.least), at_least=FIO_AIM))
    others = (mine, before, *limits)
    rivals = [each for each in run.cases if each.case == name and each.samples and each not in others]
    if rivals:
        best = min(rivals, key=lambda case: case.median or 0.0)
        value = ratio(best, mine, least=run.least)
        run.aims.append(Aim(f"{name}: best peer ({best.system}) / sllm", value, at_least=1.0))
    used = sorted(before.extra.get("cpu_samples", []))
    per_gb = used[len(used) // 2] / nbytes * 1e9 if len(used) >= run.least else None
    run.aims.append(Aim(f"{name}: CPU seconds per GB", per_gb, at_most=CPU_AIM))

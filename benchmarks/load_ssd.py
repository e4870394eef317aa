"""The cases of ``load`` that read a cold disk: ours, the peers and the disk's limit in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import Checkpoint, Shape
from benchmarks.load_node import Node
from benchmarks.load_reference import fastest, limits, reference
from benchmarks.load_systems import NOT_HERE, Loader, Loading, Peer, take
from benchmarks.page_cache import direct_read, empty
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, Case, against_limit, ratio
from benchmarks.runner import Run, in_turn

HUGE: Final = "direct read, 2 MiB pages"
LOADED: Final = "sllm, before the touch"
LIMIT_AIM: Final = 0.95
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

    def compared(self, checkpoint: Checkpoint) -> None:
        """A cold load that is not counted: of all that was written. Raises ``ProgramFailed``."""
        empty(self.file, primed=False)
        same(self.case.system, self.loader.load(checkpoint.names).digest, checkpoint.digest)


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

    def compared(self, checkpoint: Checkpoint, system: str = "sllm") -> None:
        """A load as the others will be, which is not counted: of all that was written. Raises ``ProgramFailed``."""
        self.node.forget(self.model)
        empty(self.file, primed=False)  # of a file that was just converted the page cache is read
        same(system, self.loader.load(checkpoint.names).digest, checkpoint.digest)
        self.node.until_free()


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
    """Each round: the disk's limits, ours, each peer, all with an empty page cache; each round begins with the next.

    ``like``: a case whose slow peers are left out here. ``primed``: see ``empty``. ``judge``: adds the aims, by the
    run, the case and the checkpoint's bytes (None: ``ssd_aims``).
    """
    run, checkpoint = bench.run, bench.checkpoint(name, shape)
    chosen, stored = near(run, name, peers, like), bench.converted(checkpoint)
    bench.forms(checkpoint, chosen)
    with bench.on_cores(cores), bench.node(name, stored, room=checkpoint.nbytes) as node:
        loader = bench.programs.ours(node, stored.model)
        mine = Mine(node, stored.model, loader, stored.partition)
        mine.compared(checkpoint)
        run.note(f"{name}: starting peers, comparing tensors")
        rivals = start(bench, name, checkpoint, chosen)
        turns: list[Callable[[], None]] = [
            functools.partial(reference, run.case(name, system, "s"), read, mine.file, primed=primed)
            for system, read in limits().items()
        ]
        turns.append(lambda: add_ours(run, name, mine.cold(primed=primed)))
        turns += [functools.partial(rival.cold, primed=primed) for rival in rivals]
        rounds(run, name, turns)
    (judge or ssd_aims)(run, name, checkpoint.nbytes)


def rounds(run: Run, name: str, turns: Sequence[Callable[[], None]], each: int = 1) -> None:
    """All turns ``each`` times as often as there are rounds; each round begins with the next one."""
    for number in range(each * run.rounds):
        if number % each == 0:
            run.note(f"{name}: round {number // each + 1} of {run.rounds}")
        for turn in in_turn(turns, number):
            turn()


def near(run: Run, name: str, peers: Sequence[Peer], like: str) -> list[Peer]:
    """Those that were near the fastest one in the case ``like`` of this run, and who used the least CPU there; the
    others are listed with what they took, or with why they could not run. All, if it was not measured."""
    known = {each.system: each for each in run.cases if each.case == like}
    medians = {each.name: known[each.name].median for each in peers if each.name in known}
    best = min((median for median in medians.values() if median), default=0.0)
    used = {name: known[name].cpu_s or 0.0 for name, median in medians.items() if median}
    thrifty = min(used, key=lambda name: used[name], default="")
    chosen = []
    for each in peers:
        median = medians.get(each.name)
        if median and median > NEAR * best and each.name != thrifty:
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
            rival = Competitor(loader, checkpoint.directory / which.reads, case)
            rival.compared(checkpoint)
        except WrongTensors:
            raise
        except ProgramFailed as error:
            case.not_run = " ".join(str(error).split())[-300:]
            continue
        started.append(rival)
    return started


def huge_reference(case: Case, partition: Path) -> None:
    """``case.extra``: how many read how much at a time, found out at the first one."""
    if "threads" not in case.extra:
        case.extra["threads"], case.extra["block"] = fastest(partition)
    reference(case, lambda file: direct_read(file, case.extra["threads"], case.extra["block"]), partition)


def add_ours(run: Run, name: str, made: Loading) -> None:
    """A load of ours, twice in the record: with the touch and without."""
    case = run.case(name, "sllm", "s")
    take(case, made)
    case.extra["daemon_cpu_s"] = round(made.daemon_cpu_s, 4)
    before = run.case(name, LOADED, "s")
    take(before, made, touched=False)
    before.extra.setdefault("cpu_samples", []).append(round(made.loaded_cpu_s + made.daemon_cpu_s, 4))


class WrongTensors(ProgramFailed):
    """What was loaded is not what was written."""


def same(system: str, digest: str, expected: str) -> None:
    """Raises ``WrongTensors`` for others than the source's."""
    if digest != expected:
        raise WrongTensors(f"{system} loaded other tensors: SHA-256 {digest[:16]}, written were {expected[:16]}")


def ssd_aims(run: Run, name: str, nbytes: int) -> None:
    """Against the disk without the touch, which no disk benchmark has; against peers with it."""
    mine, before = run.case(name, "sllm", "s"), run.case(name, LOADED, "s")
    known = [run.case(name, system, "s") for system in limits()]
    run.aims.append(against_limit(name, known, before, at_least=LIMIT_AIM, least=run.least))
    others = (mine, before, *known)
    rivals = [each for each in run.cases if each.case == name and each.samples and each not in others]
    if rivals:
        best = min(rivals, key=lambda case: case.median or 0.0)
        value = ratio(best, mine, least=run.least)
        run.aims.append(Aim(f"{name}: best peer ({best.system}) / sllm", value, at_least=1.0))
    used = sorted(before.extra.get("cpu_samples", []))
    per_gb = used[len(used) // 2] / nbytes * 1e9 if len(used) >= run.least else None
    run.aims.append(Aim(f"{name}: CPU seconds per GB", per_gb, at_most=CPU_AIM))

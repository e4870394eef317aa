"""The cases of ``load`` that read a cold disk: ours, the peers and the disk's limit in turn."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import page_cache
from benchmarks.load_model import Checkpoint
from benchmarks.load_node import Node, usable_cores
from benchmarks.load_reference import disk_read, disk_system, huge_read_s
from benchmarks.load_systems import NOT_HERE, Loader, Peer, ours, peer, take
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, Case, ratio
from benchmarks.runner import Run

SLACK: Final = 2**28
BELOW: Final = (4, 2**22)
"""Threads and bytes of a read that is not counted."""
HUGE: Final = "direct read, 2 MiB pages"
LOADED: Final = "sllm, before the touch"
FIO_AIM: Final = 0.95
CPU_AIM: Final = 0.15


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """What is started meanwhile uses that many cores, as with taskset."""
    before = usable_cores()
    os.sched_setaffinity(0, before[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Competitor:
    """A system in the rounds: its program, the file that has to be cold, its case."""

    loader: Loader
    file: Path
    case: Case


def cold(run: Run, name: str, directory: Path, checkpoint: Checkpoint, *, cores: int, peers: Sequence[Peer]) -> None:
    """Each round: the disk's limit, ours, each peer, all with an empty page cache; each round begins with the next."""
    room = checkpoint.nbytes + SLACK
    with on_cores(cores), contextlib.ExitStack() as stack:
        run.note(f"{name}: converting")
        node = stack.enter_context(Node(directory / f"node-{name}", pool_bytes=room, prefault_bytes=room))
        model = node.register(str(checkpoint.directory))
        partition = node.partition(model)
        mine = Competitor(stack.enter_context(ours(node, model, directory)), partition, run.case(name, "sllm", "s"))
        run.note(f"{name}: starting peers, comparing tensors")
        rivals = _start(run, name, stack, directory, checkpoint, peers)
        for system in (mine, *rivals):
            same(system.case.system, system.loader.load(checkpoint.names).digest, checkpoint.digest)
        node.until_free()
        turns: list[Callable[[], None]] = [lambda: _reference(run.case(name, disk_system(), "s"), partition)]
        turns.append(lambda: _huge_reference(run.case(name, HUGE, "s"), partition))
        turns.append(lambda: _ours(run, name, node, model, mine))
        turns += [functools.partial(_peer, rival) for rival in rivals]
        for number in range(run.rounds):
            run.note(f"{name}: round {number + 1} of {run.rounds}")
            first = number % len(turns)
            for turn in (*turns[first:], *turns[:first]):
                turn()
    _aims(run, name, partition_bytes=checkpoint.nbytes)


def _start(
    run: Run, name: str, stack: contextlib.ExitStack, directory: Path, checkpoint: Checkpoint, peers: Sequence[Peer]
) -> list[Competitor]:
    """The peers that come up and load; the others are listed with the reason."""
    started = []
    for which in peers:
        case = run.case(name, which.name, "s")
        with contextlib.ExitStack() as own:
            try:
                loader = own.enter_context(peer(which, directory, checkpoint.directory))
                run.note(f"{name}: {which.name}")
                loader.load()
            except ProgramFailed as error:
                case.not_run = " ".join(str(error).split())[-300:]
                continue
            stack.push(own.pop_all())
            started.append(Competitor(loader, checkpoint.directory / which.reads, case))
    for missing, reason in NOT_HERE.items():
        run.case(name, missing, "s").not_run = reason
    return started


def _empty(file: Path) -> None:
    """Nothing of it in the page cache. It is read past that once before: what lies below this machine's disk (a host, a
    controller) may keep what was read, and then has it for whoever is next, not only for who follows a neighbour."""
    page_cache.drop(file)
    page_cache.direct_read_s(file, *BELOW)
    page_cache.drop(file)


def _peer(rival: Competitor) -> None:
    _empty(rival.file)
    take(rival.case, rival.loader.load())


def _reference(case: Case, partition: Path) -> None:
    _empty(partition)
    made = disk_read(partition)
    case.samples.append(round(made.seconds, 4))
    if made.cpu_s >= 0:
        case.cpu_s = round(made.cpu_s, 4)


def _huge_reference(case: Case, partition: Path) -> None:
    _empty(partition)
    case.samples.append(round(huge_read_s(partition), 4))


def _ours(run: Run, name: str, node: Node, model: str, mine: Competitor) -> None:
    """A load with nothing in the pool and the page cache, twice in the record: with the touch and without."""
    node.forget(model)
    _empty(mine.file)
    made = mine.loader.load()
    take(mine.case, made)
    mine.case.extra["daemon_cpu_s"] = round(made.daemon_cpu_s, 4)
    before = run.case(name, LOADED, "s")
    before.samples.append(round(made.loaded_s, 4))
    before.extra.setdefault("cpu_samples", []).append(round(made.loaded_cpu_s + made.daemon_cpu_s, 4))
    node.until_free()


def same(system: str, digest: str, expected: str) -> None:
    """Raises ``ProgramFailed`` for other tensors than the source's."""
    if digest != expected:
        raise ProgramFailed(f"{system} loaded other tensors: SHA-256 {digest[:16]}, written were {expected[:16]}")


def _aims(run: Run, name: str, *, partition_bytes: int) -> None:
    """Against the disk without the touch, which no disk benchmark has; against peers with it."""
    mine, before, limit = run.case(name, "sllm", "s"), run.case(name, LOADED, "s"), run.case(name, disk_system(), "s")
    huge = run.case(name, HUGE, "s")
    run.aims.append(Aim(f"{name}: {HUGE} / sllm", ratio(huge, before, least=run.least), at_least=FIO_AIM))
    rivals = [
        case for case in run.cases if case.case == name and case.samples and case not in (mine, before, limit, huge)
    ]
    run.aims.append(Aim(f"{name}: {limit.system} / sllm", ratio(limit, before, least=run.least), at_least=FIO_AIM))
    if rivals:
        best = min(rivals, key=lambda case: case.median or 0.0)
        value = ratio(best, mine, least=run.least)
        run.aims.append(Aim(f"{name}: best peer ({best.system}) / sllm", value, at_least=1.0))
    used = sorted(before.extra.get("cpu_samples", []))
    per_gb = used[len(used) // 2] / partition_bytes * 1e9 if len(used) >= run.least else None
    run.aims.append(Aim(f"{name}: CPU seconds per GB", per_gb, at_most=CPU_AIM))

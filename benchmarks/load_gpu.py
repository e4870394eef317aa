"""The cases of ``load`` that end on a GPU: from the pool, from a cold disk, and to the first token of a 7 B model.

Of these ``from_dram`` has run on a GPU, where it missed its aim (docs/loaderd.md). The CUDA context of each loading
process is there before its time begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import SEVEN_B, TWO_AND_A_HALF, Checkpoint, Shape
from benchmarks.load_ssd import HUGE, LOADED, Mine, add_ours, huge_reference, rounds, start
from benchmarks.load_systems import Loader, Peer, take
from benchmarks.machine import describe
from benchmarks.page_cache import empty
from benchmarks.programs import ProgramFailed
from benchmarks.record import against_limit
from benchmarks.runner import Run

DEVICE: Final = "cuda:0"
PINNED: Final = "one pinned copy"
PEERS: Final = (
    Peer("safetensors load_file", ("load_safetensors.py", "load_file")),
    Peer("from_pretrained, device_map", ("load_transformers.py",)),
    Peer("fastsafetensors", ("load_fastsafetensors.py",)),
    Peer("runai-model-streamer", ("load_runai.py",)),
    Peer("instanttensor", ("load_instanttensor.py",)),
)
TOKEN_PEER: Final = Peer("from_pretrained, device_map", ("first_token.py", "from_pretrained"))
AIM: Final = 0.95


def from_dram(bench: Bench, case: str) -> None:
    """From the pool to the GPU, beside one copy of as many bytes from pinned memory."""
    if not _gpu(bench.run, case, ("sllm", PINNED)):
        return
    with _systems(bench, case, TWO_AND_A_HALF) as (_, mine, copy):

        def ours() -> None:
            mine.node.until_free()
            mine.node.ask(lambda control: control.prefetch(mine.model))
            take(bench.run.case(case, "sllm", "s"), mine.loader.load(), touched=False)

        rounds(bench.run, case, [ours, lambda: take(bench.run.case(case, PINNED, "s"), copy.load(), touched=False)])
    pinned, own = bench.run.case(case, PINNED, "s"), bench.run.case(case, "sllm", "s")
    bench.run.aims.append(against_limit(case, [pinned], own, at_least=AIM, least=bench.run.least))


def from_disk(bench: Bench, case: str) -> None:
    """From a cold disk to the GPU, beside the disk, the pinned copy, and the loaders that know GPUs."""
    run = bench.run
    if not _gpu(run, case, ("sllm", PINNED, HUGE, *(each.name for each in PEERS))):
        return
    with _systems(bench, case, TWO_AND_A_HALF) as (checkpoint, mine, copy):
        turns: list[Callable[[], None]] = [lambda: add_ours(run, case, mine.cold())]
        turns.append(lambda: take(run.case(case, PINNED, "s"), copy.load(), touched=False))
        turns.append(lambda: huge_reference(run.case(case, HUGE, "s"), mine.file))
        turns += [rival.cold for rival in start(bench, case, checkpoint, PEERS, device=DEVICE)]
        rounds(run, case, turns)
    slower = max((run.case(case, name, "s") for name in (PINNED, HUGE)), key=lambda each: each.median or 0.0)
    run.aims.append(against_limit(case, [slower], run.case(case, LOADED, "s"), at_least=AIM, least=run.least))


def first_token(bench: Bench, case: str) -> None:
    """From a cold disk to the first token of a 7 B model of random weights, module and prefill included."""
    run = bench.run
    if not _gpu(run, case, ("sllm", TOKEN_PEER.name)):
        return
    checkpoint = bench.checkpoint(case, SEVEN_B)
    stored, room = bench.converted(checkpoint), checkpoint.nbytes
    order = {"device": DEVICE, "directory": str(checkpoint.directory), "read_all": True}
    with bench.node(case, stored, room=room, cuda_devices="0") as node:
        grant = {"socket": str(node.socket), "model": stored.model}
        loader = Loader(bench.programs.own("first_token.py", "ours"), order | grant, node)
        mine = Mine(node, stored.model, loader, stored.partition)
        theirs = bench.programs.peer(TOKEN_PEER, checkpoint.directory, **order)
        said: dict[str, int] = {}

        def ours() -> None:
            made = mine.cold()
            take(run.case(case, "sllm", "s"), made)
            said["sllm"] = made.touched

        def other() -> None:
            empty(checkpoint.weights)
            made = theirs.load()
            take(run.case(case, TOKEN_PEER.name, "s"), made)
            said[TOKEN_PEER.name] = made.touched

        rounds(run, case, [ours, other])
        if len(set(said.values())) != 1:  # each says the same in all rounds
            raise ProgramFailed(f"the first tokens differ: {said}")


def _gpu(run: Run, case: str, systems: Sequence[str]) -> bool:
    """Whether there is a GPU; if not, all of the case's systems are listed with that."""
    if describe()["accelerators"]:
        return True
    for system in systems:
        run.case(case, system, "s").not_run = "no GPU on this machine"
    return False


@contextlib.contextmanager
def _systems(bench: Bench, case: str, shape: Shape) -> Iterator[tuple[Checkpoint, Mine, Loader]]:
    """The checkpoint, ours on the GPU, and the program that makes one pinned copy of our partition's bytes."""
    checkpoint = bench.checkpoint(case, shape)
    stored = bench.converted(checkpoint)
    with bench.node(case, stored, room=checkpoint.nbytes, cuda_devices="0") as node:
        loader = bench.programs.ours(node, stored.model, device=DEVICE)
        mine = Mine(node, stored.model, loader, stored.partition)
        mine.compared(checkpoint)
        copy = Loader(bench.programs.own("load_pinned.py"), {"device": DEVICE, "path": str(stored.partition)})
        yield checkpoint, mine, copy

"""The cases of ``load`` with LoRA adapters: ours, safetensors, and PEFT onto a base model, from a cold disk in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.load_adapter import FILE, AdapterShape
from benchmarks.load_bench import Bench
from benchmarks.load_ssd import HUGE, Mine, huge_reference, rounds, start
from benchmarks.load_systems import Peer, take
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run

PEFT: Final = "safetensors + peft"
LEAN: Final = "safetensors + peft, low_cpu_mem_usage"
INTO: Final = "sllm into peft's modules"
DRAM: Final = "sllm, from DRAM"
PEERS: Final = (
    Peer("safetensors load_file", ("load_safetensors.py", "load_file"), FILE),
    Peer(PEFT, ("load_peft.py", "default"), FILE),
    Peer(LEAN, ("load_peft.py", "lean"), FILE),
)
AIM: Final = 4.4


def measure(bench: Bench, case: str, shape: AdapterShape, base: Path) -> None:
    """Adapters beside a base model; ours is over when the tensors are bound and touched, as the engine takes them."""
    run, checkpoint, programs = bench.run, bench.checkpoint(case, shape), bench.programs
    stored, under = bench.converted(checkpoint), bench.converted(base)
    programs.launch(PEERS)
    with bench.node(case, stored, under, room=checkpoint.nbytes) as node:
        loader = programs.ours(node, under.model, adapter=stored.model)
        target = str(checkpoint.directory)
        filler = programs.ours(node, under.model, "peft", adapter=stored.model, into=target)
        mine, fill = (Mine(node, stored.model, each, stored.partition) for each in (loader, filler))
        for system, rival in (("sllm", mine), (INTO, fill)):
            rival.compared(checkpoint, system)
        rivals = start(bench, case, checkpoint, PEERS)
        turns: list[Callable[[], None]] = [lambda: _ours(run, case, mine)]
        turns.append(lambda: take(run.case(case, INTO, "s"), fill.cold()))
        turns.append(lambda: huge_reference(run.case(case, HUGE, "s"), stored.partition))
        turns += [rival.cold for rival in rivals]
        rounds(run, case, turns)
    for system in (PEFT, LEAN):
        value = ratio(run.case(case, system, "s"), run.case(case, "sllm", "s"), least=run.least)
        run.aims.append(Aim(f"{case}: {system} / sllm", value, at_least=AIM))


def _ours(run: Run, case: str, mine: Mine) -> None:
    """From a cold disk, and again, when it is in the pool."""
    take(run.case(case, "sllm", "s"), mine.cold())
    take(run.case(case, DRAM, "s"), mine.loader.load())
    mine.node.until_free()

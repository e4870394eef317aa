"""The cases of ``load`` where ours stands beside itself with one thing changed: digests, the form of the checkpoint."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import ONE, Checkpoint
from benchmarks.load_ssd import Mine, rounds
from benchmarks.load_systems import take
from benchmarks.record import Aim, Case, ratio
from benchmarks.runner import Run

ON: Final = "sllm, digests on"
OFF: Final = "sllm, digests off"
CONVERTED: Final = "sllm, converted"
AS_IT_IS: Final = "sllm, safetensors as they are"
INTEGRITY_AIM: Final = 1.05


def integrity(bench: Bench, case: str, *, cores: int) -> None:
    """Two nodes with one file under two names, one of which compares no digests, in turn from a cold disk."""
    run, checkpoint = bench.run, bench.checkpoint(case, ONE)
    stored = bench.converted(checkpoint)
    with bench.on_cores(cores), contextlib.ExitStack() as stack:
        rivals = {}
        for system, setting in ((ON, "on"), (OFF, "off")):
            name = f"{case}/{setting}"
            node = stack.enter_context(bench.node(name, stored, room=checkpoint.nbytes, integrity=setting))
            loader = bench.programs.ours(node, stored.model)
            rivals[system] = Mine(node, stored.model, loader, stored.partition)
        _in_turn(run, case, checkpoint, rivals)
    on, off = run.case(case, ON, "s"), run.case(case, OFF, "s")
    run.aims.append(Aim(f"{case}: digests on / off", ratio(on, off, least=run.least), at_most=INTEGRITY_AIM))


def unconverted(bench: Bench, case: str) -> None:
    """A node that loads safetensors as they are, beside one that has converted them; and what each takes before the
    model can be loaded for the first time."""
    run, checkpoint = bench.run, bench.checkpoint(case, ONE)
    stored = bench.converted(checkpoint)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(bench.node(f"{case}/converted", stored, room=checkpoint.nbytes))
        loader = bench.programs.ours(node, stored.model)
        rivals = {CONVERTED: Mine(node, stored.model, loader, stored.partition)}
        node = stack.enter_context(bench.node(f"{case}/as-it-is", room=checkpoint.nbytes))
        began = time.perf_counter()
        model = node.register(str(checkpoint.directory), convert="never")
        run.case(case, AS_IT_IS, "s").extra["until_registered_s"] = round(time.perf_counter() - began, 3)
        run.case(case, CONVERTED, "s").extra["until_registered_s"] = round(stored.seconds, 3)
        rivals[AS_IT_IS] = Mine(node, model, bench.programs.ours(node, model), checkpoint.weights)
        _in_turn(run, case, checkpoint, rivals)


def _in_turn(run: Run, case: str, checkpoint: Checkpoint, rivals: dict[str, Mine]) -> None:
    """Compare each one's tensors, then load cold in turn, without the touch, which is the same for all."""
    for system, mine in rivals.items():
        mine.compared(checkpoint, system)
    turns = [functools.partial(_cold, run.case(case, system, "s"), mine) for system, mine in rivals.items()]
    rounds(run, case, turns)


def _cold(case: Case, mine: Mine) -> None:
    take(case, mine.cold(), touched=False)

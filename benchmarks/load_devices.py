"""The case of ``load`` with four fake devices: copies from the pool to one, and to all at once."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.load_model import Checkpoint
from benchmarks.load_node import Node
from benchmarks.load_ssd import SLACK, same
from benchmarks.load_systems import Loader, ours
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run

DEVICES: Final = 4
DEVICE: Final = "1GiB"
LINK: Final = "0.1GB/s"
"""Of each link: four together are far below what two cores copy."""
AIM: Final = 3.8


def measure(run: Run, case: str, directory: Path, checkpoint: Checkpoint) -> None:
    """GB/s over one link and over four, the model in the pool, nothing of it on the devices."""
    room = checkpoint.nbytes + SLACK
    spec = f"{DEVICES}x{DEVICE}@{LINK}"
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(directory / case, pool_bytes=room, fake_devices=spec))
        model = node.register(str(checkpoint.directory))
        loaders = []
        for number in range(DEVICES):
            (home := directory / f"{case}-{number}").mkdir()
            loaders.append(stack.enter_context(ours(node, model, home, device=f"fake:{number}")))
        same("sllm", loaders[0].load(checkpoint.names).digest, checkpoint.digest)
        pool = stack.enter_context(ThreadPoolExecutor(DEVICES))
        for _ in range(run.rounds):
            for count in (1, DEVICES):
                took = _at_once(pool, node, model, loaders[:count])
                one = run.case(case, f"sllm, {count} link{'s' * (count > 1)}", "GB/s")
                one.samples.append(round(count * checkpoint.nbytes / 1e9 / took, 4))
    four, single = run.case(case, f"sllm, {DEVICES} links", "GB/s"), run.case(case, "sllm, 1 link", "GB/s")
    run.aims.append(Aim(f"{case}: four links / one", ratio(four, single, least=run.least), at_least=AIM))


def _at_once(pool: ThreadPoolExecutor, node: Node, model: str, loaders: list[Loader]) -> float:
    """Seconds until the last of them has all its blocks."""
    node.until_free()
    node.forget(model)
    node.ask(lambda control: control.prefetch(model))
    began = time.perf_counter()
    list(pool.map(lambda loader: loader.load(), loaders))
    return time.perf_counter() - began

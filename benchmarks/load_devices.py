"""The case of ``load`` with four fake devices: copies from the pool to one, and to all at once."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import QUICK
from benchmarks.load_node import Node
from benchmarks.load_ssd import rounds, same
from benchmarks.load_systems import Loader, Loading
from benchmarks.record import Aim, ratio

DEVICES: Final = 4
DEVICE: Final = "1GiB"
LINK: Final = "0.25GB/s"
"""Of each link: four together are far below what two cores copy."""
AIM: Final = 3.8


def measure(bench: Bench, case: str) -> None:
    """GB/s over one link and over four, the model in the pool, nothing of it on the devices."""
    run, checkpoint = bench.run, bench.checkpoint(case, QUICK)  # what a link takes decides, so the small one does
    stored, spec = bench.converted(checkpoint), f"{DEVICES}x{DEVICE}@{LINK}"
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(bench.node(case, stored, room=checkpoint.nbytes, fake_devices=spec))
        loaders = []
        for number in range(DEVICES):
            loaders.append(bench.programs.ours(node, stored.model, lane=number, device=f"fake:{number}"))
        same("sllm", loaders[0].load(checkpoint.names).digest, checkpoint.digest)
        pool = stack.enter_context(ThreadPoolExecutor(DEVICES))

        def load(count: int) -> None:
            took, used, mib = _at_once(pool, node, stored.model, loaders[:count])
            one = run.case(case, f"sllm, {count} link{'s' * (count > 1)}", "GB/s")
            one.take(round(count * checkpoint.nbytes / 1e9 / took, 4), used, mib)

        rounds(run, case, [functools.partial(load, count) for count in (1, DEVICES)])
    four, single = run.case(case, f"sllm, {DEVICES} links", "GB/s"), run.case(case, "sllm, 1 link", "GB/s")
    run.aims.append(Aim(f"{case}: four links / one", ratio(four, single, least=run.least), at_least=AIM))


def _at_once(pool: ThreadPoolExecutor, node: Node, model: str, loaders: list[Loader]) -> tuple[float, float, float]:
    """Seconds from the first one's request until the last of them has all its blocks, with the CPU seconds of all and
    the clients' memory. The clients' own starts are not in it: four processes are made one after the other."""
    node.until_free()
    node.forget(model)
    node.ask(lambda control: control.prefetch(model))
    before = node.cpu_s()
    made: list[Loading] = list(pool.map(lambda loader: loader.load(), loaders))
    used = node.cpu_s() - before + sum(each.loaded_cpu_s for each in made)
    took = max(each.began + each.loaded_s for each in made) - min(each.began for each in made)
    return took, used, sum(each.peak_rss_mib for each in made)

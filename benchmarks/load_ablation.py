"""The case of ``load`` that switches the parts of the pipeline on one by one, as ServerlessLLM's figure 7 does."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import ONE
from benchmarks.load_reference import huge_read_s, huge_threads
from benchmarks.load_ssd import HUGE, Mine, empty, same
from benchmarks.machine import describe

CASE: Final = "ablation"
LINK: Final = "2GB/s"
STEPS: Final[dict[str, dict[str, object]]] = {
    "tensor by tensor": {},
    "+ bulk": {"bulk": "true"},
    "+ direct": {"direct": "true"},
    "+ threads": {"io_threads": 4},
    "+ pinned": {"pinned": "true"},
    "+ pipeline": {"overlap": "true"},
}
"""What each adds to those above it."""
NOTHING: Final[dict[str, object]] = {
    "bulk": "false",
    "direct": "false",
    "io_threads": 1,
    "pinned": "false",
    "overlap": "false",
}
PINNED: Final = "+ pinned"


def measure(bench: Bench, case: str) -> None:
    """A loader daemon for each step, all with the same file, in turn from a cold disk to a device: the GPU, or a fake
    one behind a link of 2 GB/s, for which nothing is pinned."""
    run, checkpoint = bench.run, bench.checkpoint(case, ONE)
    stored, nbytes = bench.converted(checkpoint), checkpoint.nbytes
    gpu = bool(describe()["accelerators"])
    device = "cuda:0" if gpu else "fake:0"
    run.settings[f"{case}_device"] = device if gpu else f"{device}, {LINK}"
    flags: dict[str, Any] = {"cuda_devices": "0"} if gpu else {"fake_devices": f"1x{-(-nbytes // 2**30) + 1}GiB@{LINK}"}
    flags |= NOTHING
    with contextlib.ExitStack() as stack:
        rivals: dict[str, Mine] = {}
        for step, more in STEPS.items():
            flags |= more
            if step == PINNED and not gpu:
                run.case(case, step, "GB/s").not_run = "no GPU: a fake device's link copies from any memory"
                continue
            name = f"{case}/{len(rivals)}"
            node = stack.enter_context(bench.node(name, stored, room=nbytes, **flags))
            loader = bench.programs.ours(node, stored.model, device=device)
            rivals[step] = Mine(node, stored.model, loader, stored.partition)
            same(step, loader.load(checkpoint.names).digest, checkpoint.digest)
            node.until_free()
        limit = run.case(case, HUGE, "GB/s")
        threads = limit.extra["threads"] = huge_threads(stored.partition)
        for number in range(run.rounds):
            run.note(f"{case}: round {number + 1} of {run.rounds}")
            empty(stored.partition)
            limit.samples.append(round(nbytes / 1e9 / huge_read_s(stored.partition, threads), 4))
            turns = list(rivals.items())
            first = number % len(turns)
            for step, mine in (*turns[first:], *turns[:first]):
                one, made = run.case(case, step, "GB/s"), mine.cold()
                one.samples.append(round(nbytes / 1e9 / made.loaded_s, 4))
                one.cpu_s = round(made.loaded_cpu_s + made.daemon_cpu_s, 4)
                one.peak_rss_mib = round(made.peak_rss_mib, 1)

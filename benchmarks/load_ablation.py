"""The case of ``load`` that switches the parts of the pipeline on one by one, as ServerlessLLM's figure 7 does."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any, Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import ONE
from benchmarks.load_reference import fastest
from benchmarks.load_ssd import HUGE, Mine, rounds
from benchmarks.machine import describe
from benchmarks.page_cache import direct_read, empty
from benchmarks.record import Case

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
            rivals[step].compared(checkpoint, step)
        turns = [functools.partial(_cold, run.case(case, step, "GB/s"), mine, nbytes) for step, mine in rivals.items()]
        read = fastest(stored.partition)
        limit = run.case(case, HUGE, "GB/s")
        limit.extra["threads"], limit.extra["block"] = read
        rounds(run, case, [lambda: _limit(limit, stored.partition, read, nbytes), *turns])


def _limit(case: Case, partition: Path, read: tuple[int, int], nbytes: int) -> None:
    empty(partition)
    made = direct_read(partition, *read)
    case.take(round(nbytes / 1e9 / made.seconds, 4), made.cpu_s, made.mib)


def _cold(case: Case, mine: Mine, nbytes: int) -> None:
    made = mine.cold()
    rate = round(nbytes / 1e9 / made.loaded_s, 4)
    case.take(rate, made.loaded_cpu_s + made.daemon_cpu_s, made.peak_rss_mib)

"""The case of ``load`` from an object store through memory to the SSD tier: the whole way, and its stages alone."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import ONE
from benchmarks.load_node import Node
from benchmarks.load_ssd import rounds, same
from benchmarks.load_store import URI, published
from benchmarks.load_systems import Loader, take
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run

AIM: Final = 1.1
WHOLE: Final = "sllm, until SSD and DRAM have it"
USABLE: Final = "sllm, until it is usable"
REMOTE: Final = "remote to DRAM alone"
DISK: Final = "DRAM to SSD alone"
_BLOCK: Final = 16 * 2**20
_THREADS: Final = (1, 4)
_COPY_S: Final = 120.0


def measure(bench: Bench, case: str) -> None:
    """Two nodes, one without an SSD tier, and a bare direct write of as many bytes, in turn."""
    run, checkpoint, home = bench.run, bench.checkpoint(case, ONE), bench.home(case)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(published(home, bench.converted(checkpoint)))
        alone = stack.enter_context(bench.node(f"{case}/dram", room=checkpoint.nbytes, ssd_bytes=0, env=store.env))
        tiers = bench.node(f"{case}/tiers", room=checkpoint.nbytes, ssd_bytes=2 * store.nbytes, env=store.env)
        stack.enter_context(tiers)
        for node in (alone, tiers):
            model = node.register(URI)
        one, both = (bench.programs.ours(node, model) for node in (alone, tiers))
        same("sllm", one.load(checkpoint.names).digest, checkpoint.digest)

        def remote() -> None:
            alone.until_free()
            alone.forget(model)
            take(run.case(case, REMOTE, "s"), one.load(), touched=False)

        def disk() -> None:
            run.case(case, DISK, "s").take(*write_s(home / "written", store.nbytes))

        rounds(run, case, [remote, disk, lambda: _both(run, case, tiers, model, both)])
        same("sllm", both.load(checkpoint.names).digest, checkpoint.digest)
    whole, stages = run.case(case, WHOLE, "s"), [run.case(case, name, "s") for name in (REMOTE, DISK)]
    slowest = max(stages, key=lambda stage: stage.median or 0.0)
    run.aims.append(Aim(f"{case}: sllm / {slowest.system}", ratio(whole, slowest, least=run.least), at_most=AIM))


def _both(run: Run, case: str, node: Node, model: str, loader: Loader) -> None:
    """One load with neither a chunk nor a copy there; over when the copy has its name, as it has when it is durable."""
    node.until_free()
    node.forget(model)
    node.ask(lambda control: control.delete(model))
    node.register(URI)
    copy = node.data / "ssd" / f"{model.rpartition(':')[2]}.0.bin"
    if copy.exists():
        raise ProgramFailed(f"{copy} is there before the load")
    began, before = time.perf_counter(), node.cpu_s()
    made = loader.load()
    until = began + _COPY_S
    while not copy.exists():
        if time.perf_counter() > until:
            raise ProgramFailed(f"no copy on the SSD after {_COPY_S:.0f} s")
        time.sleep(0.001)
    took = time.perf_counter() - began
    take(run.case(case, USABLE, "s"), made, touched=False)
    used = node.cpu_s() - before + made.loaded_cpu_s
    run.case(case, WHOLE, "s").take(round(took, 4), used, made.peak_rss_mib)


def write_s(path: Path, nbytes: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, to write a new file of that size past the page cache and make it durable: the faster of
    one thread and of four. Its space is allocated first. Raises ``OSError`` where the filesystem has no direct I/O."""
    took, used = min(_write_s(path, nbytes, threads) for threads in _THREADS)
    return round(took, 4), used


def _write_s(path: Path, nbytes: int, threads: int) -> tuple[float, float]:
    with mmap.mmap(-1, _BLOCK) as memory, ThreadPoolExecutor(threads) as pool:
        memory.write(os.urandom(_BLOCK))
        view = memoryview(memory)
        began, used = time.perf_counter(), time.process_time()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            list(pool.map(lambda at: os.pwrite(fd, view[: min(_BLOCK, nbytes - at)], at), range(0, nbytes, _BLOCK)))
            os.fsync(fd)
        finally:
            os.close(fd)
            path.unlink()
            view.release()
        return time.perf_counter() - began, time.process_time() - used

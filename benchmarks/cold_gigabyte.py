"""The case of ``cold_start`` with much to read: a model of 1 GiB from a cold disk."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Final

from benchmarks import cold_peers, page_cache, synthetic
from benchmarks.cold_cases import Stages, mean_with, measured
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, ProgramFailed
from benchmarks.record import Aim
from benchmarks.runner import Run
from sllm_loaderd.client import LoaderControl

FUNCTION: Final = ROOT / "benchmarks" / "functions" / "gigabyte" / "function.py"
NBYTES: Final = 2**30
STEP: Final = 32768
READS: Final = ((1, 2**20), (4, 2**22))
"""Threads and bytes of a read; the floor is the fastest of these."""


def measure(run: Run, directory: Path) -> None:
    """Ours, the direct read and the plain script in turn."""
    home = directory / "gigabyte"
    model = synthetic.write(home / "model", NBYTES, STEP)
    shutil.copy(FUNCTION, home / "large.py")  # one interpreter imports one module of a name
    run.settings["gigabyte_bytes"] = model.nbytes
    case, floor = run.case("gigabyte", "sllm"), run.case("gigabyte", "direct read")
    script, stages = run.case("gigabyte", "plain script"), Stages()
    source = model.directory / "model.safetensors"
    with Platform(directory / "large") as platform:
        platform.deploy(home / "large.py")
        partition = _partition(platform, model.nbytes)
        for _ in range(run.rounds):
            _forget(platform, partition, source)
            floor.samples.append(round(_floor_s(partition) * 1e3, 1))
            page_cache.drop(partition)
            answer = measured(platform, case, lambda: platform.stream("gigabyte", {}))
            stages.add(answer.spans)
            _same("sllm", answer.text, model.sampled)
            page_cache.drop(source)
            made = cold_peers.script(directory, "gigabyte.py", [str(model.directory), str(STEP)])
            _same("plain script", made.text, model.sampled)
            script.cpu_s = round(mean_with(script.cpu_s, len(script.samples), made.cpu_s), 3)
            script.samples.append(round(made.first_ms, 1))
        _same("sllm, every byte", platform.stream("gigabyte", {"every": True}).text, model.whole)
    stages.into(case)
    floor.extra["gb_s"] = round(model.nbytes / 1e6 / (floor.median or 1.0), 2)
    enough = len(case.samples) >= run.least and case.median and floor.median
    value = round(case.median - floor.median, 1) if enough and case.median and floor.median else None
    run.aims.append(Aim("gigabyte: sllm - direct read, ms (medians)", value, at_most=100.0))


def _floor_s(partition: Path) -> float:
    """Seconds of the fastest direct read. One before it is not counted: what lies below this machine's disk (a host,
    a controller) may keep what was read, for whoever reads next."""
    page_cache.direct_read_s(partition, *READS[-1])
    return min(page_cache.direct_read_s(partition, threads, block) for threads, block in READS)


def _partition(platform: Platform, nbytes: int) -> Path:
    """The converted model's file in the node's store."""
    found = [path for path in platform.data.rglob("partition_0.bin") if path.stat().st_size >= nbytes]
    if len(found) != 1:
        raise ProgramFailed(f"{len(found)} partitions of the synthetic model lie below {platform.data}")
    return found[0]


def _forget(platform: Platform, partition: Path, source: Path) -> None:
    """Nothing of the model in memory: no instance, not in the loader's pool, no page in the cache."""
    platform.until_cold("gigabyte")
    asyncio.run(_evict(platform))
    page_cache.drop(partition)
    page_cache.drop(source)


async def _evict(platform: Platform) -> None:
    async with LoaderControl(platform.loader_socket()) as loader:
        for digest in await loader.models():
            await loader.evict(digest)
        left = [each for each in (await loader.status()).resident if each.nbytes]
    if left:
        raise ProgramFailed(f"the loader still holds {left}")


def _same(system: str, text: str, digest: int) -> None:
    if text != str(digest):
        raise ProgramFailed(f"{system} read other bytes: digest {text}, written were {digest}")

"""The case of ``cold_start`` with much to read: a model of 1 GiB from a cold disk."""

from __future__ import annotations

import asyncio
import functools
import shutil
from pathlib import Path
from typing import Final

from benchmarks import cold_peers, page_cache, synthetic
from benchmarks.cold_cases import NOISE_MS, Stages, measured, take
from benchmarks.load_reference import limits, reference
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, ProgramFailed
from benchmarks.record import Aim
from benchmarks.runner import Run, in_turn
from sllm_loaderd.client import LoaderControl

FUNCTION: Final = ROOT / "benchmarks" / "functions" / "gigabyte" / "function.py"
NBYTES: Final = 2**30
STEP: Final = 32768


def measure(run: Run, directory: Path) -> None:
    """Ours, the plain script and the direct reads in turn, each with nothing of its file in the page cache."""
    home = directory / "gigabyte"
    model = synthetic.write(home / "model", NBYTES, STEP)
    shutil.copy(FUNCTION, home / "large.py")  # one interpreter imports one module of a name
    run.settings["gigabyte_bytes"] = model.nbytes
    case, stages = run.case("gigabyte", "sllm"), Stages()
    script, floors = run.case("gigabyte", "plain script"), limits()
    source = model.directory / "model.safetensors"
    with Platform(directory / "large") as platform:
        platform.deploy(home / "large.py")
        partition = _partition(platform, model.nbytes)

        def ours() -> None:
            platform.until_cold("gigabyte")
            if left := asyncio.run(evict(platform)):
                raise ProgramFailed(f"the loader still holds {left}")
            page_cache.empty(partition)
            answer = measured(platform, case, lambda: platform.stream("gigabyte", {}))
            stages.add(answer.spans)
            _same("sllm", answer.text, model.sampled)

        def plain() -> None:
            page_cache.empty(source)
            made = cold_peers.script(directory, "gigabyte.py", [str(model.directory), str(STEP)])
            _same("plain script", made.text, model.sampled)
            take(script, made)

        turns = [ours, plain]
        turns += [
            functools.partial(reference, run.case("gigabyte", name), read, partition) for name, read in floors.items()
        ]
        for number in range(run.rounds):
            for turn in in_turn(turns, number):
                turn()
        _same("sllm, every byte", platform.stream("gigabyte", {"every": True}).text, model.whole)
    stages.into(case)
    known = [run.case("gigabyte", name) for name in floors]
    floor = min((each for each in known if each.samples), key=lambda each: each.median or 0.0)
    floor.extra["gb_s"] = round(model.nbytes / 1e6 / (floor.median or 1.0), 2)
    value = None
    if len(case.samples) >= run.least and case.median and floor.median:
        value = round(case.median - floor.median, 1)
    aim = f"gigabyte: sllm - {floor.system}, ms (medians)"
    run.aims.append(Aim(aim, value, at_least=NOISE_MS, at_most=100.0))


def _partition(platform: Platform, nbytes: int) -> Path:
    """The converted model's file in the node's store."""
    found = [path for path in platform.data.rglob("partition_0.bin") if path.stat().st_size >= nbytes]
    if len(found) != 1:
        raise ProgramFailed(f"{len(found)} partitions of the synthetic model lie below {platform.data}")
    return found[0]


async def evict(platform: Platform) -> list[str]:
    """Have the loader of the one node drop all models; those of which it still holds something."""
    async with LoaderControl(platform.loader_socket()) as loader:
        for digest in await loader.models():
            await loader.evict(digest)
        return [each.model for each in (await loader.status()).resident if each.nbytes]


def _same(system: str, text: str, digest: int) -> None:
    if text != str(digest):
        raise ProgramFailed(f"{system} read other bytes: digest {text}, written were {digest}")

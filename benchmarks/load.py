"""``python -m benchmarks.load``: checkpoints into memory, beside other loaders and the hardware's limit.

A time runs from the request to the end of a read of one byte of each page of each tensor: every byte is resident and
usable. Each load has a process of its own, forked from one that has made all imports. Ours is loaderd's client: the
sandbox's connection was granted before, as a platform does; chunks of the pool have their pages (the daemon makes them
in the background), digests are on. CPU seconds are those of client and daemon together. Every system's tensors are
compared with what was written, once, from a cold disk where the loads are; each load after it has to touch the same
bytes. Systems take turns, and each round begins with another one.

- ``ssd_cold_*``: a Llama-shaped random checkpoint, the pool empty, the file out of the page cache (dropped, and mincore
  says so). It is read past the cache just before, for every system alike, since what lies below the disk may keep what
  was read. The limits are fio, 4 MiB direct sequential reads at depth 32 of our partition, with small pages (of which a
  disk request takes few) and with pages of 2 MiB, and bare direct reads into pages of 2 MiB, as our chunks have. The
  fastest of them is held against the load before that last touch, whose page faults are in the record; peers against
  the whole. A limit that ours beats by more than a tenth is none, and the aim missed. Peers that were slow in
  ``ssd_cold_1gb`` (on one core: in ``ssd_cold_1gb_1core``) are named with that in the cases after it, but who used the
  least CPU there is measured.
- ``copies``: as the paper does it, copies of a model read once each in random order, nothing read before; 20, of a size
  of which they fill half of the free disk at most; peers are those that read safetensors. ``sata``: the kernel lets all
  read 500 MB/s from the disk, and ours is judged by the fastest bare read: whatever is fast enough takes as long.
- ``integrity*``: digests on and off. ``unconverted``: safetensors as they are, and converted. ``ablation``: the parts
  of the pipeline on one by one, as the paper's figure 7. All before the touch, ours beside itself.
- ``lora_*``: an adapter of a Llama 2 7B and of a 70B. Beside safetensors' load, PEFT's own, onto the base model.
- ``dram_demo``, ``dram_2_5gb``: the model is in the pool, its instance is not. From opening the session until all
  tensors are bound and all blocks ready. ``dram_read_*``: the same and every byte read once, beside reading a mapping
  of the same bytes whose pages were all touched; judged on pages of 2 MiB.
- ``object_store``: a converted checkpoint at ``rclone serve s3`` on loopback, which checks signatures and has it in its
  page cache, into an empty pool, no SSD copy. Beside it boto3's own transfer into memory, and curl with several ranges
  at once to nowhere. All share the cores with the server. ``tiers``: with an SSD copy, until that is durable, beside
  its slowest stage alone.
- ``fake_devices``: from the pool to one fake device and to four, each behind a link of 0.25 GB/s: links add up.
- ``gpu_*``: to a GPU; listed with the reason where there is none.

A quick run has 0.3 GB in place of 1 and 2.5 GB, 3 copies in place of 20, and not what stands in ``ONLY_FULL``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import (
    load_ablation,
    load_copies,
    load_devices,
    load_dram,
    load_gpu,
    load_lora,
    load_ssd,
    load_store,
    load_throttled,
    load_tiers,
    load_variants,
)
from benchmarks.cold_cases import MODEL
from benchmarks.load_adapter import LARGE, SMALL
from benchmarks.load_bench import Bench
from benchmarks.load_model import ONE, TWO_AND_A_HALF
from benchmarks.load_systems import MODEL_PEERS, Programs
from benchmarks.runner import Run, main

Measure = Callable[[Bench, str], None]
FIRST: Final = "ssd_cold_1gb"
ONE_CORE: Final = "ssd_cold_1gb_1core"
_cold = partial(load_ssd.cold, peers=MODEL_PEERS)
CASES: Final[dict[str, Measure]] = {
    FIRST: partial(_cold, shape=ONE),
    ONE_CORE: partial(_cold, shape=ONE, cores=1),
    "ssd_cold_2_5gb": partial(_cold, shape=TWO_AND_A_HALF, like=FIRST),
    "ssd_cold_2_5gb_1core": partial(_cold, shape=TWO_AND_A_HALF, cores=1, like=ONE_CORE),
    "sata": partial(load_throttled.measure, peers=MODEL_PEERS, like=FIRST),
    "copies": partial(load_copies.measure, peers=MODEL_PEERS, like=FIRST),
    "integrity": partial(load_variants.integrity, cores=2),
    "integrity_1core": partial(load_variants.integrity, cores=1),
    "unconverted": load_variants.unconverted,
    load_ablation.CASE: load_ablation.measure,
    "lora_100mb": partial(load_lora.measure, shape=SMALL, base=MODEL),
    "lora_1gb": partial(load_lora.measure, shape=LARGE, base=MODEL),
    "dram_demo": partial(load_dram.demo, model=MODEL),
    "dram_2_5gb": load_dram.large,
    "dram_read_2mib": partial(load_dram.read_once, huge=True),
    "dram_read_4kib": partial(load_dram.read_once, huge=False),
    "object_store": load_store.measure,
    "tiers": load_tiers.measure,
    "fake_devices": load_devices.measure,
    "gpu_dram": load_gpu.from_dram,
    "gpu_ssd": load_gpu.from_disk,
    "gpu_first_token": load_gpu.first_token,
}
ONLY_FULL: Final = {ONE_CORE, "ssd_cold_2_5gb", "ssd_cold_2_5gb_1core", "integrity_1core", "lora_1gb"}


def measure(run: Run, cases: Sequence[str]) -> None:
    """Each case with a loaderd of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="bl-", ignore_cleanup_errors=True) as name,
        Programs(Path(name)) as programs,
    ):
        bench = Bench(run, Path(name), programs)
        for case in cases:
            if run.quick and case in ONLY_FULL:
                run.case(case, "sllm", "s").not_run = "only in the full run"
                continue
            with run.attempt(case, "s"):
                CASES[case](bench, case)


if __name__ == "__main__":
    sys.exit(main("load", tuple(CASES), measure))

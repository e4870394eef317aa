"""``python -m benchmarks.load``: checkpoints into memory, beside other loaders and the hardware's limit.

A time runs from the request to the end of a read of one byte of each page of each tensor: every byte is resident and
usable. Each load has a process of its own, forked from one that has made all imports. Ours is loaderd's client: the
sandbox's connection was granted before, as a platform does; chunks of the pool have their pages (the daemon makes them
in the background), digests are on. CPU seconds are those of client and daemon together.

- ``ssd_cold_1gb``, ``ssd_cold_2_5gb``, ``ssd_cold_2_5gb_1core``: a Llama-shaped random checkpoint, the pool empty, the
  file out of the page cache (dropped, and mincore says so). It is read past the cache just before, for every system
  alike, since what lies below the disk may keep what was read; the order changes from round to round. The limits
  are fio, 4 MiB direct sequential reads at depth 32 of our partition, and a bare direct read into pages of 2 MiB, as
  our chunks have (fio's buffers have small ones, of which a disk request takes few). Against both stands the
  load before that last touch, whose page faults are in the record; against peers the whole. A quick run has 0.3 GB in
  place of 1 GB, and not the others.
- ``dram_demo``, ``dram_2_5gb``: the model is in the pool, its instance is not. From opening the session until all
  tensors are bound and all blocks ready. ``dram_read_2mib``, ``dram_read_4kib``: the same and every byte read once,
  beside reading a mapping of the same bytes whose pages were all touched; judged on pages of 2 MiB. Quick: 0.3 GB.
- ``object_store``: a converted checkpoint at ``rclone serve s3`` on loopback, which checks signatures and has it in its
  page cache, into an empty pool, no SSD copy. Beside it boto3's own transfer into memory, and curl with several ranges
  at once to nowhere. All share the cores with the server.
- ``fake_devices``: from the pool to one fake device and to four, each behind a link of 0.1 GB/s: links add up.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import load_devices, load_dram, load_ssd, load_store
from benchmarks.cold_cases import MODEL
from benchmarks.load_model import ONE, QUICK, TWO_AND_A_HALF, Checkpoint, Shape, write
from benchmarks.load_node import usable_cores
from benchmarks.load_systems import MODEL_PEERS, make_forms
from benchmarks.runner import Run, main

SSD: Final[dict[str, tuple[Shape, int]]] = {
    "ssd_cold_1gb": (ONE, 2),
    "ssd_cold_2_5gb": (TWO_AND_A_HALF, 2),
    "ssd_cold_2_5gb_1core": (TWO_AND_A_HALF, 1),
}
DRAM: Final = ("dram_demo", "dram_2_5gb", "dram_read_2mib", "dram_read_4kib")
CASES: Final = (*SSD, *DRAM, "object_store", "fake_devices")
ONLY_FULL: Final = {"ssd_cold_2_5gb", "ssd_cold_2_5gb_1core"}


class Bench:
    """One run: its directory, and checkpoints that are written when a case first wants them."""

    def __init__(self, run: Run, directory: Path) -> None:
        self.run = run
        self.directory = directory
        self._made: dict[Shape, Checkpoint] = {}

    def checkpoint(self, case: str, shape: Shape) -> Checkpoint:
        """The checkpoint of that shape (of the quick one in a quick run), in all forms that peers read."""
        wanted = QUICK if self.run.quick else shape
        if wanted not in self._made:
            self.run.note(f"{case}: writing the checkpoint")
            made = self._made[wanted] = write(self.directory / f"model-{len(self._made)}", wanted)
            make_forms(made, self.directory)
        self.run.settings[f"{case}_bytes"] = self._made[wanted].nbytes
        return self._made[wanted]

    def measure(self, case: str) -> None:
        """Any case."""
        own = {"object_store": self.object_store, "fake_devices": self.fake_devices}
        (self.ssd if case in SSD else self.dram if case in DRAM else own[case])(case)

    def ssd(self, case: str) -> None:
        """A case of ``SSD``."""
        shape, cores = SSD[case]
        made = self.checkpoint(case, shape)
        cores = min(cores, len(usable_cores()))
        load_ssd.cold(self.run, case, self.directory, made, cores=cores, peers=MODEL_PEERS)

    def dram(self, case: str) -> None:
        """A case of ``DRAM``."""
        if case == "dram_demo":
            load_dram.demo(self.run, case, self.directory, MODEL)
            return
        made = self.checkpoint(case, TWO_AND_A_HALF)
        load_dram.large(self.run, case, self.directory, made)

    def object_store(self, case: str) -> None:
        """The object store."""
        load_store.measure(self.run, case, self.directory, self.checkpoint(case, ONE))

    def fake_devices(self, case: str) -> None:
        """Fake devices; what a link takes decides, so the small checkpoint does."""
        load_devices.measure(self.run, case, self.directory, self.checkpoint(case, QUICK))


def measure(run: Run, cases: Sequence[str]) -> None:
    """Each case with a loaderd of its own."""
    with tempfile.TemporaryDirectory(prefix="bl-", ignore_cleanup_errors=True) as name:
        bench = Bench(run, Path(name))
        for case in cases:
            if run.quick and case in ONLY_FULL:
                run.case(case, "sllm", "s").not_run = "only in the full run"
                continue
            with run.attempt(case, "s"):
                bench.measure(case)


if __name__ == "__main__":
    sys.exit(main("load", CASES, measure))

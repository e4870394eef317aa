"""What the cases of one run of ``load`` share: its directory, and checkpoints, each written and converted once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.load_abilities import abilities
from benchmarks.load_adapter import AdapterShape, write_adapter
from benchmarks.load_model import QUICK, Checkpoint, Shape, write
from benchmarks.load_node import Node, usable_cores
from benchmarks.load_systems import Peer, Programs, make_forms
from benchmarks.machine import disk_of
from benchmarks.programs import ProgramFailed
from benchmarks.runner import Run

SLACK: Final = 2**28
"""Of a pool, beyond the model's bytes: chunks that are not full."""
_MOST_OF_DISK: Final = 0.9


@dataclass(frozen=True)
class Converted:
    """A checkpoint of ours on the disk. ``seconds``: what its conversion took, its process's start included."""

    directory: Path
    model: str
    seconds: float

    @property
    def partition(self) -> Path:
        return self.directory / "partition_0.bin"

    def place(self, data: Path) -> None:
        """Have it in the store of a loaderd on ``data``, which does not run yet: the same files under a second name."""
        target = data / "models" / self.model.rpartition(":")[2]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.directory, target, copy_function=os.link)


class Bench:
    """One run. What it writes lies below ``directory`` until the run ends."""

    def __init__(self, run: Run, directory: Path, programs: Programs) -> None:
        self.run = run
        self.programs = programs
        self.directory = directory
        self._made: dict[Shape | AdapterShape, Checkpoint] = {}
        self._converted: dict[Path, Converted] = {}
        self._forms: set[Path] = set()
        run.settings["disk"] = disk_of(directory)
        run.settings["abilities"] = abilities(directory)

    def home(self, case: str) -> Path:
        """A directory for that case's programs."""
        made = self.directory / case
        made.mkdir(exist_ok=True)
        return made

    def checkpoint(self, case: str, shape: Shape | AdapterShape) -> Checkpoint:
        """The checkpoint of that shape (of a model: of the quick one in a quick run). Raises ``ProgramFailed``."""
        wanted = QUICK if self.run.quick and isinstance(shape, Shape) else shape
        if wanted not in self._made:
            self.need(4 * wanted.nbytes)
            self.run.note(f"{case}: writing {wanted.nbytes / 1e9:.2f} GB")
            target = self.directory / f"model-{len(self._made)}"
            made = write(target, wanted) if isinstance(wanted, Shape) else write_adapter(target, wanted)
            self._made[wanted] = made
        self.run.settings[f"{case}_bytes"] = self._made[wanted].nbytes
        return self._made[wanted]

    def forms(self, checkpoint: Checkpoint, peers: Sequence[Peer]) -> None:
        """Have the other forms of it that these peers read."""
        wanted = {checkpoint.directory / peer.reads for peer in peers} - {checkpoint.weights} - self._forms
        if wanted:
            self._forms |= wanted
            names = sorted(path.name for path in wanted)
            self.run.note(f"writing {', '.join(names)}")
            make_forms(checkpoint, self.directory, names)

    def converted(self, source: Checkpoint | Path) -> Converted:
        """The checkpoint, or the model in a directory, in our format, by a loaderd of its own."""
        directory = source if isinstance(source, Path) else source.directory
        if directory not in self._converted:
            self.run.note("converting")
            home = self.directory / f"converter-{len(self._converted)}"
            with Node(home, pool_bytes=SLACK) as node:
                began = time.perf_counter()
                model = node.register(str(directory))
                took = time.perf_counter() - began
                found = node.partition(model).parent
            self._converted[directory] = Converted(found, model, took)
        return self._converted[directory]

    def node(
        self, name: str, *models: Converted, room: int = 0, env: Mapping[str, str] | None = None, **flags: object
    ) -> Node:
        """A loaderd whose store has these models, and a pool for ``room`` bytes that all have their pages. Not started
        before it is entered."""
        home = self.directory / name
        for model in models:
            model.place(home / "data")
        pool: dict[str, object] = {"pool_bytes": room + SLACK, "prefault_bytes": room + SLACK}
        return Node(home, env=env, **(pool | flags))

    def need(self, nbytes: int) -> None:
        """Raises ``ProgramFailed`` if the disk has not that much room."""
        if nbytes > (free := free_bytes(self.directory)) * _MOST_OF_DISK:
            text = f"{nbytes / 1e9:.1f} GB are needed in {self.directory}, {free / 1e9:.1f} GB are free; set TMPDIR"
            raise ProgramFailed(text)

    @contextlib.contextmanager
    def on_cores(self, count: int) -> Iterator[None]:
        """Programs that run and what is started meanwhile use that many cores, as with taskset, or as many as there
        are."""
        before = usable_cores()
        try:
            self._use(before[:count])
            yield
        finally:
            self._use(before)

    def _use(self, cores: list[int]) -> None:
        os.sched_setaffinity(0, cores)
        for pid in self.programs.pids:
            with contextlib.suppress(ProcessLookupError):  # it ends meanwhile
                os.sched_setaffinity(pid, cores)


def free_bytes(directory: Path) -> int:
    """What its disk has left."""
    return shutil.disk_usage(directory).free


def names_in(checkpoint: Checkpoint) -> list[str]:
    """Its tensors, in the order of its file."""
    found: list[str] = json.loads(checkpoint.names.read_text())
    return found

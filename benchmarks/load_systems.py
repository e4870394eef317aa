"""Ours and the peers as ``load`` drives them: a program each, a process of its own for each load."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.load_model import Checkpoint
from benchmarks.load_node import Node
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, ROOT, Program, ProgramFailed, peers_missing
from benchmarks.record import Case, mean_with

READY_S: Final = 120.0
LOAD_S: Final = 180.0
SCRIPTS: Final = ROOT / "benchmarks" / "peers"


@dataclass(frozen=True)
class Peer:
    """A program in ``peers/`` and the file of a checkpoint's directory that it reads."""

    name: str
    words: tuple[str, ...]
    reads: str = "model.safetensors"

    @property
    def argv(self) -> tuple[str, ...]:
        return (str(PEERS / "python"), str(SCRIPTS / self.words[0]), *self.words[1:])


MODEL_PEERS: Final = (
    Peer("torch.load", ("load_torch.py", "read"), "pytorch_model.bin"),
    Peer("torch.load mmap", ("load_torch.py", "mmap"), "pytorch_model.bin"),
    Peer("safetensors load_file", ("load_safetensors.py", "load_file")),
    Peer("safetensors safe_open", ("load_safetensors.py", "safe_open")),
    Peer("from_pretrained", ("load_transformers.py",)),
    Peer("fastsafetensors", ("load_fastsafetensors.py",)),
    Peer("runai-model-streamer", ("load_runai.py",)),
    Peer("tensorizer", ("load_tensorizer.py",), "model.tensors"),
    Peer("instanttensor", ("load_instanttensor.py",)),
)
NOT_HERE: Final = {
    "serverless-llm-store": "source only: its build wants the CUDA toolkit and git clones of its dependencies",
}
"""Peers that no environment of ours can have, with the reason."""


@dataclass(frozen=True)
class Loading:
    """One load as its process tells it (see ``peers/loading.py``). ``daemon_cpu_s``: loaderd's share; peers: none.
    ``began``: by the machine's monotonic clock, which all processes share."""

    seconds: float
    loaded_s: float
    cpu_s: float
    loaded_cpu_s: float
    minor_faults: int
    major_faults: int
    touch_faults: int
    peak_rss_mib: float
    touched: int
    digest: str
    daemon_cpu_s: float = 0.0
    began: float = 0.0


class Loader:
    """A running program that loads on request. Its interpreter has all imports; each load is a fork of it."""

    def __init__(self, program: Program, order: Mapping[str, Any], node: Node | None = None) -> None:
        self._program = program
        self._order = dict(order)
        self._node = node
        self._touched: dict[str, int] = {}
        """By order, what the first such load touched."""

    def load(self, names: Path | None = None, **more: Any) -> Loading:
        """One load; with ``names``, its digest too. Raises ``ProgramFailed`` with what went wrong there, and for one
        that touched other bytes than the first like it; a program that did not answer in time is ended, so that nobody
        takes a late answer for his."""
        digest = {} if names is None else {"names": str(names)}
        before = self._node.cpu_s() if self._node else 0.0
        self._program.say(self._order | digest | more)
        try:
            said = self._program.hear(LOAD_S)
        except ProgramFailed:
            self._program.stop()
            raise
        if "error" in said:
            raise ProgramFailed(said["error"])
        used = self._node.cpu_s() - before if self._node else 0.0
        order = {"read_all": False} | self._order | more | {"populated": False}
        first = self._touched.setdefault(json.dumps(order, sort_keys=True), said["touched"])
        if said["touched"] != first:
            text = f"it touched other bytes than the first such load: their sum is {said['touched']}, not {first}"
            raise ProgramFailed(text)
        return Loading(**said, daemon_cpu_s=used)


class Programs:
    """The programs of one run, each started once, when a case first wants it; every load is a fork of one. Use as a
    context manager. ``lane``: another program of the same kind, for loads at the same time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[tuple[str, ...], Program] = {}
        self._waiting: set[tuple[str, ...]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            for program in self._running.values():
                stack.callback(program.stop)

    @property
    def pids(self) -> list[int]:
        """Of those that run."""
        return [program.pid for program in self._running.values() if not program.ended]

    def ours(self, node: Node, model: str, *words: str, lane: int = 0, **order: Any) -> Loader:
        """Our client for ``model``. ``words``: of ``load_ours.py``. Raises ``ProgramFailed`` if it does not come up."""
        program = self.own("load_ours.py", *words, lane=lane)
        return Loader(program, {"socket": str(node.socket), "model": model} | order, node)

    def own(self, script: str, *words: str, lane: int = 0) -> Program:
        """A script of ``peers/`` in the project's own environment. Raises ``ProgramFailed`` if it does not come up."""
        key = (sys.executable, str(SCRIPTS / script), *words)
        self._launch(key, lane, {})
        return self._ready(key, lane)

    def peer(self, which: Peer, checkpoint: Path, **order: Any) -> Loader:
        """A peer on the checkpoint's directory. Raises ``ProgramFailed`` if it does not come up."""
        if missing := peers_missing():
            raise ProgramFailed(missing)
        if not (checkpoint / which.reads).exists():
            raise ProgramFailed(f"no {which.reads}: the library that makes it is missing")
        self._launch(which.argv, 0, PEER_ENVIRONMENT)
        return Loader(self._ready(which.argv, 0), {"directory": str(checkpoint), "file": which.reads} | order)

    def launch(self, peers: Sequence[Peer]) -> None:
        """Have them come up at the same time; ``peer`` waits for each."""
        for which in () if peers_missing() else peers:
            self._launch(which.argv, 0, PEER_ENVIRONMENT)

    def _launch(self, argv: tuple[str, ...], lane: int, env: Mapping[str, str]) -> None:
        key = (*argv, str(lane))
        if key in self._running and not self._running[key].ended:
            return
        log = self._directory / f"{'-'.join((Path(argv[1]).stem, *argv[2:], str(lane)))}.log"
        self._running[key] = Program(argv, log, env=env, cwd=ROOT)
        self._waiting.add(key)

    def _ready(self, argv: tuple[str, ...], lane: int) -> Program:
        key = (*argv, str(lane))
        if key in self._waiting:
            self._running[key].hear(READY_S)
            self._waiting.discard(key)
        return self._running[key]


def make_forms(checkpoint: Checkpoint, directory: Path, files: Sequence[str]) -> None:
    """Other forms of the checkpoint that peers read, by the peers' own environment. None where there is none."""
    if peers_missing():
        return
    argv = [str(PEERS / "python"), str(SCRIPTS / "load_forms.py"), str(checkpoint.directory), *files]
    with Program(argv, directory / "forms.log", env=PEER_ENVIRONMENT, cwd=ROOT) as program:
        program.hear(LOAD_S)


def take(case: Case, made: Loading, *, touched: bool = True) -> None:
    """Add a load to its case: seconds to the last byte touched (or to the end of the loading alone); beside them means
    of what it cost."""
    for key in ("loaded_s", "minor_faults", "major_faults", "touch_faults") if touched else ():
        case.extra[key] = round(mean_with(case.extra.get(key), len(case.samples), getattr(made, key)), 4)
    used = (made.cpu_s if touched else made.loaded_cpu_s) + made.daemon_cpu_s
    case.take(round(made.seconds if touched else made.loaded_s, 4), used, made.peak_rss_mib)

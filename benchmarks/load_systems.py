"""Ours and the peers as ``load`` drives them: a program each, a process of its own for each load."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.load_model import Checkpoint
from benchmarks.load_node import Node
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, ROOT, Program, ProgramFailed, peers_missing
from benchmarks.record import Case

READY_S: Final = 120.0
LOAD_S: Final = 180.0
SCRIPTS: Final = ROOT / "benchmarks" / "peers"


@dataclass(frozen=True)
class Peer:
    """A program in ``peers/`` and the file of a checkpoint's directory that it reads."""

    name: str
    words: tuple[str, ...]
    reads: str = "model.safetensors"


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
    """One load as its process tells it (see ``peers/loading.py``). ``daemon_cpu_s``: loaderd's share; peers: none."""

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


class Loader:
    """A running program that loads on request. Its interpreter has all imports; each load is a fork of it."""

    def __init__(self, program: Program, order: Mapping[str, Any], node: Node | None = None) -> None:
        self._program = program
        self._order = dict(order)
        self._node = node

    def load(self, names: Path | None = None, **more: Any) -> Loading:
        """One load; with ``names``, its digest too. Raises ``ProgramFailed`` with what went wrong there."""
        digest = {} if names is None else {"names": str(names)}
        before = self._node.cpu_s() if self._node else 0.0
        self._program.say(self._order | digest | more)
        said = self._program.hear(LOAD_S)
        if "error" in said:
            raise ProgramFailed(said["error"])
        used = self._node.cpu_s() - before if self._node else 0.0
        return Loading(**said, daemon_cpu_s=used)


@contextlib.contextmanager
def ours(node: Node, model: str, directory: Path, **order: Any) -> Iterator[Loader]:
    """Our client for ``model``."""
    argv = [sys.executable, str(SCRIPTS / "load_ours.py")]
    with Program(argv, directory / "ours.log", cwd=ROOT) as program:
        program.hear(READY_S)
        yield Loader(program, {"socket": str(node.socket), "model": model} | order, node)


@contextlib.contextmanager
def peer(which: Peer, directory: Path, checkpoint: Path, **order: Any) -> Iterator[Loader]:
    """A peer on the checkpoint's directory. Raises ``ProgramFailed`` if it does not come up."""
    if missing := peers_missing():
        raise ProgramFailed(missing)
    if not (checkpoint / which.reads).exists():
        raise ProgramFailed(f"no {which.reads}: the library that makes it is missing")
    argv = [str(PEERS / "python"), str(SCRIPTS / which.words[0]), *which.words[1:]]
    log = directory / f"{which.name.replace(' ', '-')}.log"
    with Program(argv, log, env=PEER_ENVIRONMENT, cwd=ROOT) as program:
        program.hear(READY_S)
        yield Loader(program, {"directory": str(checkpoint)} | order)


def make_forms(checkpoint: Checkpoint, directory: Path) -> None:
    """The other forms of the checkpoint that peers read, by the peers' own environment. None where there is none."""
    if peers_missing():
        return
    argv = [str(PEERS / "python"), str(SCRIPTS / "load_forms.py"), str(checkpoint.directory)]
    with Program(argv, directory / "forms.log", env=PEER_ENVIRONMENT, cwd=ROOT) as program:
        program.hear(LOAD_S)


def take(case: Case, made: Loading) -> None:
    """Add a load to its case: seconds to the last byte touched; beside them means of what it cost."""
    number = len(case.samples)
    case.samples.append(round(made.seconds, 4))
    case.cpu_s = round(_mean(case.cpu_s, number, made.cpu_s + made.daemon_cpu_s), 4)
    case.peak_rss_mib = round(max(case.peak_rss_mib or 0.0, made.peak_rss_mib), 1)
    for key in ("loaded_s", "minor_faults", "major_faults", "touch_faults"):
        case.extra[key] = round(_mean(case.extra.get(key), number, getattr(made, key)), 4)


def _mean(known: float | None, count: int, value: float) -> float:
    return value if known is None else (known * count + value) / (count + 1)

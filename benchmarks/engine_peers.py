"""Peers of ``engine`` in environments of their own: a child that is handed prompts as ids and hands ids back."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import gguf_model
from benchmarks.cold_cases import MODEL
from benchmarks.engine_models import Outputs
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, ROOT, Program, ProgramFailed, peers_missing
from benchmarks.runner import Run

LLAMA: Final = "llama.cpp"
VLLM: Final = "vllm"
_VLLM_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
_VLLM_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread, its engine in this process, 1 GiB of KV cache."""
_LLAMA_NOTES: Final = "its wheel's kernels are AVX2's; KV in float16, as it has it by itself"
_VLLM_NOTES: Final = "nothing is compiled (enforce_eager), which takes minutes; no prefix cache"
_READY_S: Final = 180.0
_ANSWER_S: Final = 300.0
_SPARE: Final = 128
"""Tokens of context beyond those that are asked for."""


@dataclass(frozen=True)
class Answer:
    """Of all prompts together. ``seconds`` and ``cpu_s`` are the peer's own count, without the way to it; ``mib`` is
    its memory then."""

    seconds: float
    cpu_s: float
    mib: float
    outputs: Outputs


@dataclass(frozen=True)
class Absent:
    """One that cannot run."""

    name: str
    reason: str


class Peer:
    """One that runs. It has ended for good when ``ask`` raises ``ProgramFailed``. ``notes``: how it was set up."""

    def __init__(self, name: str, program: Program, notes: str) -> None:
        self.name, self.notes = name, notes
        self._program = program

    def ask(self, prompts: list[tuple[int, ...]], tokens: int) -> Answer:
        """Exactly ``tokens`` greedy ids for each prompt."""
        self._program.say({"prompts": prompts, "tokens": tokens})
        told = self._program.hear(_ANSWER_S)
        mib = self._program.usage().pss_mib
        return Answer(told["seconds"], told["cpu_s"], mib, dict(enumerate(map(tuple, told["outputs"]))))


@contextlib.contextmanager
def _started(name: str, argv: Sequence[str], log: Path, env: Mapping[str, str], notes: str) -> Iterator[Peer | Absent]:
    """It, once it is ready."""
    with contextlib.ExitStack() as stack:
        try:
            program = stack.enter_context(Program(argv, log, env=env))
            program.hear(_READY_S)
        except ProgramFailed as error:
            yield Absent(name, str(error)[:300])
            return
        yield Peer(name, program, notes)


@contextlib.contextmanager
def llama(dtype: str, batch: int, length: int) -> Iterator[Peer | Absent]:
    """llama.cpp with the demo model in ``dtype``, ``batch`` sequences of ``length`` tokens at once."""
    if why := peers_missing():
        yield Absent(LLAMA, why)
        return
    with tempfile.TemporaryDirectory(prefix="bl-") as name:
        file = Path(name) / "model.gguf"
        gguf_model.write(MODEL, file, dtype)
        order = {"file": str(file), "slots": batch, "context": length + _SPARE}
        argv = (str(PEERS / "python"), str(Path(__file__).parent / "peers" / "llama_cpp.py"), json.dumps(order))
        with _started(LLAMA, argv, Path(name) / "log", PEER_ENVIRONMENT, _LLAMA_NOTES) as peer:
            yield peer


@contextlib.contextmanager
def vllm(run: Run, dtype: str, batch: int, length: int) -> Iterator[Peer | Absent]:
    """vLLM's CPU build with the demo model in ``dtype``, up to ``batch`` sequences of ``length`` tokens at once, for
    several cases."""
    if run.quick or not _VLLM_PYTHON.exists():
        yield Absent(VLLM, "left out with --quick" if run.quick else "no .venv-vllm; `make bench-vllm` makes it")
        return
    with tempfile.TemporaryDirectory(prefix="bv-") as name:
        order = {"model": str(MODEL), "dtype": dtype, "slots": batch, "context": length + _SPARE}
        argv = (str(_VLLM_PYTHON), str(Path(__file__).parent / "peers" / "vllm_greedy.py"), json.dumps(order))
        env = {**PEER_ENVIRONMENT, **_VLLM_ENVIRONMENT}
        with _started(VLLM, argv, Path(name) / "log", env, _VLLM_NOTES) as peer:
            yield peer

"""Peers of ``engine`` in environments of their own: a child that is handed prompts as ids and hands ids back."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import gguf_model
from benchmarks.cold_cases import MODEL
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, ROOT, Program, ProgramFailed, peers_missing
from benchmarks.record import Case
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
_READY_S: Final = 180.0
_ANSWER_S: Final = 300.0
_SPARE: Final = 128
"""Tokens of context beyond those that are asked for."""


@dataclass(frozen=True)
class Answer:
    """Of all prompts together. ``seconds`` and ``cpu_s`` are the peer's own count, without the way to it."""

    seconds: float
    cpu_s: float
    outputs: dict[int, tuple[int, ...]]


class Peer:
    """One that runs. It has ended for good when ``ask`` raises ``ProgramFailed``."""

    def __init__(self, name: str, program: Program) -> None:
        self.name = name
        self._program = program

    def ask(self, prompts: list[tuple[int, ...]], tokens: int) -> Answer:
        """Exactly ``tokens`` greedy ids for each prompt."""
        self._program.say({"prompts": prompts, "tokens": tokens})
        told = self._program.hear(_ANSWER_S)
        return Answer(told["seconds"], told["cpu_s"], dict(enumerate(map(tuple, told["outputs"]))))


def _ready(made: Case, peer: Program) -> bool:
    """Whether it says that it is; else its case says why it was not run."""
    try:
        peer.hear(_READY_S)
    except ProgramFailed as error:
        made.not_run = str(error)[:300]
        return False
    return True


@contextlib.contextmanager
def llama(run: Run, case: str, dtype: str, batch: int, length: int) -> Iterator[list[Peer]]:
    """llama.cpp with the demo model in ``dtype``, ``batch`` sequences of ``length`` tokens at once; nobody, and the
    reason in the record, where it cannot run."""
    made = run.case(case, LLAMA, "tokens/s")
    if why := peers_missing():
        made.not_run = why
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="bl-") as name, contextlib.ExitStack() as stack:
        file = Path(name) / "model.gguf"
        gguf_model.write(MODEL, file, dtype)
        order = {"file": str(file), "slots": batch, "context": length + _SPARE}
        argv = (str(PEERS / "python"), str(Path(__file__).parent / "peers" / "llama_cpp.py"), json.dumps(order))
        peer = stack.enter_context(Program(argv, Path(name) / "log", env=PEER_ENVIRONMENT))
        if not _ready(made, peer):
            yield []
            return
        made.notes = "its wheel's kernels are AVX2's; KV in float16, as it has it by itself"
        yield [Peer(LLAMA, peer)]


@contextlib.contextmanager
def vllm(run: Run, case: str, dtype: str, batch: int, length: int) -> Iterator[list[Peer]]:
    """vLLM's CPU build with the demo model in ``dtype``, up to ``batch`` sequences of ``length`` tokens at once, for
    several cases; nobody, and the reason in the record, where it cannot run."""
    made = run.case(case, VLLM, "tokens/s")
    if run.quick or not _VLLM_PYTHON.exists():
        made.not_run = "left out with --quick" if run.quick else "no .venv-vllm; `make bench-vllm` makes it"
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="bv-") as name, contextlib.ExitStack() as stack:
        order = {"model": str(MODEL), "dtype": dtype, "slots": batch, "context": length + _SPARE}
        argv = (str(_VLLM_PYTHON), str(Path(__file__).parent / "peers" / "vllm_greedy.py"), json.dumps(order))
        peer = stack.enter_context(Program(argv, Path(name) / "log", env={**PEER_ENVIRONMENT, **_VLLM_ENVIRONMENT}))
        if not _ready(made, peer):
            yield []
            return
        yield [Peer(VLLM, peer)]

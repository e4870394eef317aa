"""The case of ``engine`` with a large model: what exact mode costs where reading the weights takes the time.

A synthetic model of 0.5 G parameters (0.16 G in quick runs) in bfloat16. The first request's tokens must be the same in
every batch of the exact mode.
"""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Final

import torch

from benchmarks.engine_models import KV_BYTES, asked, outputs, prompts, write_synthetic
from benchmarks.load_model import ONE, QUICK
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run
from sllm_loaderd.convert.directory import convert_directory
from sllm_runtime.protocol.checkpoint import INDEX_NAME, decode_index, partition_name
from sllm_runtime.worker.engine.choice import Known, recognise
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.numerics import FAST
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors

BATCHES: Final = (1, 8)
LEAST: Final = 0.9
"""Of the fast mode's tokens a second."""
_PROMPT: Final = 16


def measure(run: Run, case: str, directory: Path) -> None:
    """``<case>_b<batch>``: tokens a second, exact and fast in turn."""
    known = _model(directory, run)
    proof = selftest.prove(known.decoder, "")
    if not proof.exact:
        raise ProgramFailed("no level of exactness holds for the large model")
    run.settings[f"{case}_level"] = proof.level
    tokens, first = (8 if run.quick else 32), None
    for number in range(-1, run.rounds):
        for batch in BATCHES:
            for system, level in (("sllm", proof.numerics), ("sllm fast", FAST)):
                core = OurEngine(known.decoder, frozenset(), level, KV_BYTES)
                for at, prompt in enumerate(prompts(batch, _PROMPT, core.vocabulary)):
                    core.add(asked(at, prompt, tokens))
                began = time.perf_counter()
                found = outputs(core)
                took = time.perf_counter() - began
                if level is not FAST and found[0] != (first := first or found[0]):
                    raise ProgramFailed("the first request has other tokens beside others than by itself")
                if number >= 0:
                    made = run.case(f"{case}_b{batch}", system, "tokens/s")
                    made.samples.append(round(batch * tokens / took, 2))
    for batch in BATCHES:
        pair = (run.case(f"{case}_b{batch}", system, "tokens/s") for system in ("sllm", "sllm fast"))
        run.aims.append(Aim(f"{case}_b{batch}: sllm / sllm fast", ratio(*pair, least=run.least), at_least=LEAST))


def _model(directory: Path, run: Run) -> Known:
    shape = QUICK if run.quick else ONE
    write_synthetic(directory / "model", shape)
    convert_directory(directory / "model", directory / "checkpoint")
    index = decode_index((directory / "checkpoint" / INDEX_NAME).read_bytes())
    partition = directory / "checkpoint" / partition_name(0)
    memory = (ctypes.c_ubyte * partition.stat().st_size)()
    with partition.open("rb") as source:
        source.readinto(memory)
    typed = TypedTensors(CheckpointTensors(index, memory), torch.bfloat16)
    raw = json.loads((directory / "model" / "config.json").read_bytes())
    known = recognise(raw, "auto", typed, typed.shapes, torch.bfloat16)
    if known is None:
        raise ProgramFailed("the synthetic model is none of ours")
    return known

"""The case of ``engine`` with a large model: what exact mode costs where reading the weights takes the time.

A synthetic model of 0.5 G parameters (0.16 G in quick runs) in bfloat16. The first request's tokens must be the same in
every batch of the exact mode, and all tokens of either mode transformers' own, but for rounding.
"""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_models import KV_BYTES, Agreement, asked, outputs, prompts, write_synthetic
from benchmarks.load_model import ONE, QUICK
from benchmarks.programs import ProgramFailed, own_usage
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run, in_turn
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
    module: Any = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.bfloat16)
    agreements = {
        batch: Agreement(module.eval(), prompts(batch, _PROMPT, known.decoder.vocabulary)) for batch in BATCHES
    }
    tokens, first = (8 if run.quick else 32), None
    for number in range(-1, run.rounds):
        for batch, agreement in agreements.items():
            for system, level in in_turn((("sllm", proof.numerics), ("sllm fast", FAST)), max(number, 0)):
                core = OurEngine(known.decoder, frozenset(), level, KV_BYTES)
                for at, prompt in enumerate(agreement.prompts):
                    core.add(asked(at, prompt, tokens))
                began, cpu = time.perf_counter(), time.process_time()
                found = outputs(core)
                took, used = time.perf_counter() - began, time.process_time() - cpu
                if level is not FAST and found[0] != (first := first or found[0]):
                    raise ProgramFailed("the first request has other tokens beside others than by itself")
                agreement.hold(system, found, rounds=level is FAST)
                if number >= 0:
                    made = run.case(f"{case}_b{batch}", system, "tokens/s")
                    made.take(round(batch * tokens / took, 2), used, own_usage().pss_mib)
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

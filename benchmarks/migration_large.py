"""The cases of ``migration`` with a large model: of random weights in bfloat16, 0.5 G parameters (0.1 G in quick runs
without a GPU). Where they are on a GPU it is one that both nodes have.

A step of it takes so long that messages and timers between the nodes are nothing beside it: what a pause is made of
there is computing. Random weights also say bytes that are half a character, of which there is no event until the rest
has come: calls with such an answer pause for as long where nothing moves, and are not made.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from benchmarks.cold_cases import MODEL
from benchmarks.engine_models import write_synthetic
from benchmarks.load_model import ONE, QUICK
from benchmarks.migration_load import CALLERS, Called
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, ProgramFailed
from benchmarks.runner import Run

FUNCTION: Final = ROOT / "benchmarks" / "functions" / "unending" / "function.py"
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY: Final = 4096
"""Of the demo model's tokenizer."""
LAYERS: Final = 10
"""With so small a vocabulary more of them than ``ONE`` has make 0.5 G parameters."""
KEEP_S: Final = 600.0
PROMPTS: Final = ("class Parser", "def ", "import os\n", "    return ")
MANY: Final = tuple(f"{prompt}{number}" for prompt in PROMPTS for number in range(8))
GPU: Final = {"SLLM_GPUS": "GPU:40GiB", "SLLM_CUDA_DEVICES": "0"}
"""Settings of a platform whose nodes have this machine's first."""


def deployed(run: Run, case: str, platform: Platform, directory: Path, *, gpu: bool = False) -> Called:
    """The function with its model, on ``platform``; with ``gpu`` on nodes of that."""
    small = run.quick and not gpu
    shape = replace(QUICK if small else replace(ONE, layers=LAYERS), vocabulary=VOCABULARY)
    write_synthetic(directory / "model", shape)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, directory / "model")
    run.settings[f"{case}_parameters"] = sum(prod(each) for _, each in shape.tensors())
    # One module of a name for an interpreter.
    file = Path(shutil.copy(FUNCTION, directory / "unending.py"))
    wanted: dict[str, Any] = {"gpu": ("any",), "gpu_memory": 16 * 2**30} if gpu else {}
    name = platform.deploy(file, keep_alive=KEEP_S, concurrency=2 * CALLERS, max_instances=2, **wanted)
    tokens = 800 if gpu else 64 if run.quick else 48
    # Of many tokens drawn by chance some are half a character.
    temperatures = (0.0,) if gpu else (0.0, 0.8)
    asks = [
        {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 7}
        for prompt in (MANY if gpu else PROMPTS)
        for temperature in temperatures
    ]
    return telling(Called(platform, name, asks))


def telling(called: Called) -> Called:
    """Of what its callers ask that of which each token is an event. Raises ``ProgramFailed`` if that is too little."""
    answers = zip(called.asks, called.right(), strict=True)
    asks = [ask for ask, answer in answers if len(answer) == ask["max_tokens"]]
    if len(asks) < CALLERS:
        raise ProgramFailed(f"of {len(called.asks)} answers {len(asks)} have an event for each token")
    return replace(called, asks=asks)

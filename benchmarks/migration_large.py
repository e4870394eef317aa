"""The case of ``migration`` with a large model: of random weights in bfloat16, 0.5 G parameters (0.1 G in quick runs).

A step of it takes so long that messages and timers between the nodes are nothing beside it: what a pause is made of
there is computing. Random weights also say bytes that are half a character, of which there is no event until the rest
has come: calls with such an answer pause for as long where nothing moves, and are not made.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

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


def deployed(run: Run, case: str, platform: Platform, directory: Path) -> Called:
    """The function with its model, on ``platform``."""
    shape = replace(QUICK if run.quick else replace(ONE, layers=LAYERS), vocabulary=VOCABULARY)
    write_synthetic(directory / "model", shape)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, directory / "model")
    run.settings[f"{case}_parameters"] = sum(prod(each) for _, each in shape.tensors())
    # One module of a name for an interpreter.
    file = Path(shutil.copy(FUNCTION, directory / "unending.py"))
    name = platform.deploy(file, keep_alive=KEEP_S, concurrency=2 * CALLERS, max_instances=2)
    tokens = 64 if run.quick else 48
    prompts = ("class Parser", "def ", "import os\n", "    return ")
    asks = [
        {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 7}
        for prompt in prompts
        for temperature in (0.0, 0.8)
    ]
    return telling(Called(platform, name, asks))


def telling(called: Called) -> Called:
    """Of what its callers ask that of which each token is an event. Raises ``ProgramFailed`` if that is too little."""
    answers = zip(called.asks, called.right(), strict=True)
    asks = [ask for ask, answer in answers if len(answer) == ask["max_tokens"]]
    if len(asks) < CALLERS:
        raise ProgramFailed(f"of {len(called.asks)} answers {len(asks)} have an event for each token")
    return replace(called, asks=asks)

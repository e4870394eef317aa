"""``python -m benchmarks.engine``: our engine beside transformers on the same weights.

``decode_*``: a batch of equal prompts of 64 tokens to its last token, tokens a second of output; exact mode beside the
fast one, transformers' generate and its continuous batching, llama.cpp, vLLM, and what memory bandwidth would allow.
``prefill_*``: one prompt of 1,024 tokens to its first token. ``large``: exact mode against the fast one with 0.5 G
parameters.
``poisson``: requests of mixed lengths at random times, beside transformers' continuous batching and static batches.
``openai_load``: such requests by guidellm over the platform's OpenAI routes (``engine_guidellm``). ``while_loading``:
the first token of a model that arrives over a link of 0.5 GB/s. ``start``: an engine over weights in DRAM.
``stages_*``: layers in several processes (``engine_stages``). ``gpu_decode``: decode on a GPU (``engine_gpu``). One
thread, as an instance with ``cpu=1`` has.

Greedy. The tokens of all systems are compared, in every round (``engine_models.Agreement``), but for ``openai_load``,
whose tokens are counted. CPU seconds are the mean of a sample; memory is the whole process's, which has the model as
ours and as transformers'.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks import (
    engine_decode,
    engine_gpu,
    engine_guidellm,
    engine_large,
    engine_loading,
    engine_poisson,
    engine_stages,
)
from benchmarks.engine_models import DTYPES, Demo
from benchmarks.engine_peers import vllm
from benchmarks.runner import Run, main

CASES: Final = (
    *(f"decode_{name}" for name in DTYPES),
    "large",
    "gpu_decode",
    "poisson",
    "openai_load",
    "while_loading",
    "start",
    *engine_stages.CASES,
)
_ALONE: Final = {
    "large": engine_large.measure,
    "gpu_decode": engine_gpu.measure,
    "openai_load": engine_guidellm.measure,
    "while_loading": engine_loading.while_loading,
    "start": engine_loading.start,
}


def measure(run: Run, cases: Sequence[str]) -> None:
    """One case after the other."""
    torch.set_num_threads(1)
    run.settings["threads"] = 1
    with tempfile.TemporaryDirectory(prefix="be-", ignore_cleanup_errors=True) as name:
        for case in cases:
            if case.startswith("decode_"):
                dtype = case.removeprefix("decode_")
                most = max(engine_decode.BATCHES)
                with run.attempt(case, "tokens/s"), vllm(run, dtype, most, engine_decode.LONG) as beside:
                    demo = Demo.load(dtype)
                    engine_decode.measure(run, dtype, demo, beside)
                    engine_decode.prefill(run, dtype, demo, beside)
            elif case == "poisson":
                with run.attempt(case):
                    engine_poisson.measure(run, case, Demo.load("bf16"))
            elif case in engine_stages.CASES:
                with run.attempt(case):
                    engine_stages.measure(run, [case])
            else:
                with run.attempt(case):
                    _ALONE[case](run, case, Path(name) / case)


if __name__ == "__main__":
    sys.exit(main("engine", CASES, measure))

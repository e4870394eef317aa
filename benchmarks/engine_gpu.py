"""The case of ``engine`` on a GPU: tokens a second of decode, exact and fast, with CUDA graphs and without, beside
transformers' generate on the same weights in the same memory.

The demo model, whose steps are launches of small kernels, and a synthetic one of 0.5 G parameters (0.1 G in
quick runs), bfloat16. Every round's tokens are compared: of exact mode they are the same with graphs and without, bit
for bit; those of the others may differ where rounding explains it, by transformers' logits on the same GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.cold_cases import MODEL
from benchmarks.engine_models import KV_BYTES, Agreement, Outputs, asked, outputs, prompts, write_synthetic
from benchmarks.load_model import ONE, QUICK
from benchmarks.machine import describe
from benchmarks.programs import ProgramFailed, own_usage
from benchmarks.runner import Run, in_turn
from sllm_runtime.worker.engine.choice import backend_of
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.runner import DeviceRunner
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_EXACT, GPU_FAST, Numerics

DEVICE: Final = "cuda:0"
BATCHES: Final = (1, 8, 32)
EXACTLY: Final = ("sllm", "sllm without graphs")
SYSTEMS: Final = (*EXACTLY, "sllm fast", "transformers generate")
_PROMPT: Final = 64
Way = Callable[[], Outputs]


def measure(run: Run, case: str, directory: Path) -> None:
    """``<case>_<model>_b<batch>``: the systems in turn."""
    if (why := _absent()) is not None:
        for system in SYSTEMS:
            run.case(case, system, "tokens/s").not_run = why
        return
    write_synthetic(directory, QUICK if run.quick else ONE)
    for name, path in (("demo", MODEL), ("large", directory)):
        _model(run, f"{case}_{name}", path)


def _absent() -> str | None:
    if not describe()["accelerators"]:
        return "no GPU on this machine"
    return None if torch.cuda.is_available() else "this torch is built without CUDA"


def _model(run: Run, case: str, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    module.to(DEVICE).eval()
    tensors, backend = dict(module.named_parameters()), backend_of(torch.device(DEVICE))
    made = build(type(module).__name__, module.config, tensors, torch.bfloat16, EXACT.rows, backend)
    began = time.perf_counter()
    proof = selftest.prove(made, "")
    run.settings[f"{case}_self_test_s"] = round(time.perf_counter() - began, 2)
    if not proof.exact:
        raise ProgramFailed(f"no level of exactness holds for {path.name} on {torch.cuda.get_device_name()}")
    tokens = 32 if run.quick else 256
    for batch in BATCHES:
        given = prompts(batch, _PROMPT, made.vocabulary)
        cores = {
            "sllm": _engine(made, GPU_EXACT),
            "sllm without graphs": _engine(made, GPU_EXACT, _eagerly),
            "sllm fast": _engine(made, GPU_FAST),
        }
        ways: dict[str, Way] = {name: partial(_ours, core, given, tokens) for name, core in cores.items()}
        ways["transformers generate"] = partial(_theirs, module, given, tokens)
        alternate(run, f"{case}_b{batch}", ways, Agreement(module, given), batch * tokens, torch.cuda.synchronize)


def alternate(
    run: Run,
    case: str,
    ways: Mapping[str, Way],
    agreement: Agreement,
    counted: int,
    finished: Callable[[], object],
) -> None:
    """Each way in turn, until it is ``finished``; ``counted`` tokens each time."""
    for number in range(-1, run.rounds):  # kernels are compiled and graphs captured in the first
        for system, way in in_turn(tuple(ways.items()), max(number, 0)):
            began, cpu = time.perf_counter(), time.process_time()
            found = way()
            finished()
            took, used = time.perf_counter() - began, time.process_time() - cpu
            agreement.hold(system, found, rounds=system not in EXACTLY)
            if number >= 0:
                run.case(case, system, "tokens/s").take(round(counted / took, 1), used, own_usage().pss_mib)


def _engine(made: Decoder, numerics: Numerics, record: Any = None) -> OurEngine:
    assert isinstance(made.backend, Device)
    runner = DeviceRunner(made, made.backend, numerics, record=record)
    return OurEngine(made, frozenset(), numerics, KV_BYTES, runner=runner)


def _eagerly(compute: object) -> Any:
    raise RuntimeError("this one is measured without graphs")


def _ours(core: OurEngine, given: list[tuple[int, ...]], tokens: int) -> Outputs:
    core.scheduler.pages.drop_cached()
    for number, prompt in enumerate(given):
        core.add(asked(number, prompt, tokens))
    return outputs(core)


def _theirs(module: Any, given: list[tuple[int, ...]], tokens: int) -> Outputs:
    ids = torch.tensor(given, device=DEVICE)
    with torch.inference_mode():
        found = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return {number: tuple(row[ids.shape[1] :].tolist()) for number, row in enumerate(found)}

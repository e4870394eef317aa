"""What ``benchmarks.engine`` measures with: the same load for all, a model that can run, outputs that are compared."""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import engine_decode, engine_guidellm, engine_models, gguf_model
from benchmarks.cold_cases import MODEL
from benchmarks.engine_decode import CONTINUOUS, GENERATE, beside_best
from benchmarks.engine_gpu import alternate
from benchmarks.engine_models import Agreement, Demo, Outputs, converted, prompts, same, write_synthetic
from benchmarks.engine_peers import LLAMA, Absent, Answer, Peer
from benchmarks.engine_poisson import workload
from benchmarks.load_model import Shape
from benchmarks.programs import ProgramFailed, Usage
from benchmarks.runner import Run
from sllm_loaderd.convert.directory import convert_directory
from sllm_runtime.protocol.checkpoint import INDEX_NAME, decode_index, partition_name
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors
from tests.fixtures.families import family


def test_a_load_is_the_same_for_both_systems_and_whatever_its_rate() -> None:
    slow, fast = workload(40, 2.0, 4096), workload(40, 200.0, 4096)
    assert slow == workload(40, 2.0, 4096)
    assert [(each.prompt, each.tokens) for each in slow] == [(each.prompt, each.tokens) for each in fast]
    assert all(a.at < b.at for a, b in pairwise(slow))
    assert slow[-1].at == pytest.approx(100 * fast[-1].at)
    assert slow[-1].at == pytest.approx(20.0, rel=0.5)


def test_the_synthetic_model_is_one_that_converts(tmp_path: Path) -> None:
    shape = Shape(2, 64, 96)
    write_synthetic(tmp_path / "model", shape)
    convert_directory(tmp_path / "model", tmp_path / "ck")
    assert (tmp_path / "ck" / "partition_0.bin").stat().st_size >= shape.nbytes


def test_the_demo_models_tensors_are_those_of_the_file() -> None:
    tensors = TypedTensors(converted(), torch.bfloat16)
    assert tensors["model.embed_tokens.weight"].shape == (4096, 256)
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    assert bool(tensors["model.norm.weight"].isfinite().all())


def test_llama_cpp_gets_the_demo_models_weights(tmp_path: Path) -> None:
    """Read back by our own converter of such files, which turns Q and K back as well."""
    (tmp_path / "gguf").mkdir()
    gguf_model.write(MODEL, tmp_path / "gguf" / "model.gguf", "bf16")
    convert_directory(tmp_path / "gguf", tmp_path / "ck")
    index = decode_index((tmp_path / "ck" / INDEX_NAME).read_bytes())
    data = (tmp_path / "ck" / partition_name(0)).read_bytes()
    made = TypedTensors(CheckpointTensors(index, (ctypes.c_ubyte * len(data)).from_buffer_copy(data)), torch.bfloat16)
    model = TypedTensors(converted(), torch.bfloat16)
    for name in made.shapes:
        assert torch.equal(made[name], model[name]), name
    assert made.shapes.keys() == model.shapes.keys()


PROMPT = prompts(1, 8, 101)[0]


def _greedy(count: int, *ids: int) -> tuple[int, ...]:
    """What the small model says after the prompt and ``ids``, these included."""
    made = list(ids)
    with torch.inference_mode():
        while len(made) < count:
            row = family("llama")(input_ids=torch.tensor([(*PROMPT, *made)])).logits[0, -1]
            made.append(int(row.argmax()))
    return tuple(made)


def test_outputs_that_rounding_does_not_explain_are_an_error() -> None:
    right = _greedy(4)
    with torch.inference_mode():
        worst = int(family("llama")(input_ids=torch.tensor([PROMPT])).logits[0, -1].argmin())
    other = _greedy(4, worst)
    same(family("llama"), PROMPT, right, right, rounds=False)
    for found, rounds in ((other, True), (other, False), (right[:3], True), ((), False)):
        with pytest.raises(ProgramFailed):
            same(family("llama"), PROMPT, right, found, rounds=rounds)


def test_what_comes_after_a_difference_that_rounding_explains_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own beginning on: a system that goes astray behind it is wrong."""
    with torch.inference_mode():
        row = family("llama")(input_ids=torch.tensor([PROMPT])).logits[0, -1].float()
    second = int(row.topk(2).indices[1])
    gap = float((row.max() - row[second]) / row.std())
    monkeypatch.setattr(engine_models, "_OF_SPREAD", gap * 1.01)
    astray = (*_greedy(3, second), int(row.argmin()))
    same(family("llama"), PROMPT, _greedy(4), _greedy(4, second), rounds=True)
    with pytest.raises(ProgramFailed, match="token 3"):
        same(family("llama"), PROMPT, _greedy(4), astray, rounds=True)


def test_the_first_systems_tokens_are_held_against_transformers_and_the_others_against_its() -> None:
    right: Outputs = {0: _greedy(4)}
    agreement = Agreement(family("llama"), [PROMPT])
    with pytest.raises(ProgramFailed, match="transformers says"):
        agreement.hold("sllm", {0: (0, 0, 0, 0)})
    agreement.hold("sllm", right)
    agreement.hold("sllm fast", right, rounds=True)
    with pytest.raises(ProgramFailed):
        agreement.hold("sllm", {0: (*right[0][:3], 0)})
    with pytest.raises(ProgramFailed):
        agreement.hold("sllm fast", {}, rounds=True)


def test_a_round_that_says_something_else_ends_the_case_of_a_gpu() -> None:
    """Exact mode without graphs says, bit for bit, what it says with them: in every round, not in the first alone."""
    run, said = Run(quick=True), {"sllm": 0, "sllm without graphs": 0}

    def way(system: str, wrong_in: int) -> Outputs:
        said[system] += 1
        return {0: (*_greedy(3), 0) if said[system] == wrong_in else _greedy(4)}

    ways = {"sllm": partial(way, "sllm", 0), "sllm without graphs": partial(way, "sllm without graphs", 3)}
    with pytest.raises(ProgramFailed, match="differ at 3"):
        alternate(run, "demo_b1", ways, Agreement(family("llama"), [PROMPT]), 4, lambda: None)
    assert said["sllm without graphs"] == 3


def test_ours_is_held_against_the_fastest_of_the_others() -> None:
    run = Run(quick=False)
    rates = {
        "sllm": (100.0, 7),
        GENERATE: (80.0, 7),
        LLAMA: (200.0, 7),
        CONTINUOUS: (900.0, 3),
        "sllm fast": (999.0, 7),
    }
    for system, (rate, count) in rates.items():
        run.case("decode_b1", system, "tokens/s").samples += [rate] * count
    aim = beside_best(run, "decode_b1")
    assert (aim.aim, aim.value, aim.met) == ("decode_b1: sllm / best peer (llama.cpp)", 0.5, False)
    assert beside_best(Run(quick=False), "decode_b1").met is None


def test_of_few_requests_the_worst_is_told_and_what_the_platform_used_stands_beside() -> None:
    run, times = Run(quick=False), [float(number) for number in range(1, 25)]
    told = {"totals": {"successful": 24, "total": 24}, "tokens": [3], "asked": [3], "ttft_ms": times, "itl_ms": times}
    engine_guidellm._take(run, "chat", told, Usage(2.0, 50.0))
    assert {case.case: case.samples for case in run.cases} == {
        "chat_ttft_p50": [12.0], "chat_ttft_max": [24.0], "chat_itl_p50": [12.0], "chat_itl_max": [24.0],
    }  # fmt: skip
    assert {(case.cpu_s, case.peak_rss_mib) for case in run.cases} == {(2.0, 50.0)}
    with pytest.raises(ProgramFailed, match="asked for"):
        engine_guidellm._take(run, "chat", {**told, "tokens": [2]}, Usage(2.0, 50.0))


def test_a_peer_that_cannot_run_is_listed_with_its_reason_and_one_that_says_other_things_has_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right: Outputs = {0: _greedy(2)}
    said = {"good": right, "bad": {0: (*right[0][:1], 0)}}

    class Scripted(Peer):
        def __init__(self, name: str) -> None:
            self.name, self.notes = name, "as it is by itself"

        def ask(self, prompts: list[tuple[int, ...]], tokens: int) -> Answer:
            return Answer(0.5, 0.25, 30.0, said[self.name])

    demo = Demo(torch.bfloat16, family("llama"), cast(Any, None), cast(Any, None))
    for name in ("_ours", "_generate"):
        monkeypatch.setattr(engine_decode, name, lambda *_, **__: right)
    monkeypatch.setattr(engine_decode, "SETTLE_S", 0.0)
    run = Run(quick=True)
    peers: list[Peer | Absent] = [Scripted("good"), Scripted("bad"), Absent("absent", "no .venv-vllm")]
    engine_decode._alternate(run, "b4", demo, [PROMPT], 2, 2, peers)
    found = {case.system: case for case in run.cases}
    assert {name: case.not_run[:16] for name, case in found.items() if case.not_run} == {
        "absent": "no .venv-vllm", "bad": "token 1 is 0, tr",
    }  # fmt: skip
    assert (found["good"].samples, found["good"].notes) == ([4.0] * 3, "as it is by itself")
    assert (found["good"].cpu_s, found["good"].peak_rss_mib) == (0.25, 30.0)
    assert len(found["sllm"].samples) == 3

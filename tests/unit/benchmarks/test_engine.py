"""What ``benchmarks.engine`` measures with: the same load for all, a model that can run, outputs that are compared."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import gguf_model
from benchmarks.cold_cases import MODEL
from benchmarks.engine_models import Demo, converted, prompts, write_synthetic
from benchmarks.engine_poisson import workload
from benchmarks.load_model import Shape
from benchmarks.programs import ProgramFailed
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


def test_outputs_that_rounding_does_not_explain_are_an_error() -> None:
    exact, rounded = (
        Demo(dtype, family("llama"), cast(Any, SimpleNamespace()), cast(Any, None))
        for dtype in (torch.float32, torch.bfloat16)
    )
    prompt = prompts(1, 8, 101)[0]
    with torch.inference_mode():
        row = family("llama")(input_ids=torch.tensor([prompt])).logits[0, -1]
    best, worst = int(row.argmax()), int(row.argmin())
    exact.same(prompt, (best, 5), (best, 5))
    exact.same(prompt, (best,), (best,), rounded=True)
    with pytest.raises(ProgramFailed):
        exact.same(prompt, (best,), (worst,), rounded=True)
    for demo, theirs in ((exact, (worst,)), (rounded, (worst,)), (rounded, ()), (exact, ())):
        with pytest.raises(ProgramFailed):
            demo.same(prompt, (best,), theirs)

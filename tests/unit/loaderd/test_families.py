"""The families' own tables of execution order against what transformers' modules do; and what is left to these."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.convert.families import known_plan
from sllm_loaderd.convert.module import module_plan
from sllm_loaderd.convert.module_plan import ModulePlan
from sllm_loaderd.convert.partitions import full_order
from sllm_loaderd.convert.plan import StoragePlan, plan_storage
from sllm_loaderd.convert.source import SourceTensor
from tests.fixtures.families import FAMILIES
from tests.fixtures.models import SMALL, gpt2, llama, opt, qwen3

MODELS = Path(__file__).parents[3] / "functions"


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SMALL))


KNOWN: dict[str, Callable[[], Any]] = {
    **{name: build for name, build in FAMILIES.items() if name != "mixtral"},
    "falcon alibi": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=101, alibi=True
        )
    ),
    "opt without biases": lambda: opt(enable_bias=False, layer_norm_elementwise_affine=False),
    "opt untied": lambda: opt(tie_word_embeddings=False),
    "gpt 2 untied": lambda: gpt2(tie_word_embeddings=False),
    "qwen 3 biased, tied": lambda: qwen3(attention_bias=True, tie_word_embeddings=True),
    "bert": bert,
}


def saved(model: Any, directory: Path) -> dict[str, SourceTensor]:
    """What a directory would hold of the model: its configuration, and tensors in the order of their names."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.tie_weights()
    own = dict(model.named_parameters())  # tied ones once
    return {
        name: SourceTensor(name, "float32", tuple(own[name].shape), own[name].nbytes, (0, number))
        for number, name in enumerate(sorted(own))
    }


def stored(tensors: dict[str, SourceTensor], module: ModulePlan | None) -> tuple[StoragePlan, list[str]]:
    plan = plan_storage(tensors, {}, module, lambda one, two: False)
    return StoragePlan(plan.stored, (), plan.kind, plan.ties, plan.renamed), full_order(plan)


def as_traced(directory: Path, tensors: dict[str, SourceTensor]) -> bool:
    plan = known_plan((directory / "config.json").read_bytes(), tensors)
    traced = module_plan(directory, {tensor.name: tensor.shape for tensor in tensors.values()})
    return plan is not None and stored(tensors, plan) == stored(tensors, traced)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_stored_and_where_is_what_the_trace_says(name: str, tmp_path: Path) -> None:
    """Also where the configuration leaves out whether embedding and head are one, as most published ones do."""
    tensors, config = saved(KNOWN[name](), tmp_path), tmp_path / "config.json"
    assert as_traced(tmp_path, tensors)
    said = json.loads(config.read_bytes())
    del said["tie_word_embeddings"]
    config.write_text(json.dumps(said))
    assert as_traced(tmp_path, tensors)


def plan_of(tmp_path: Path, names: list[str] | None = None, **changes: Any) -> ModulePlan | None:
    tensors = saved(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    return known_plan(json.dumps({**config, **changes}).encode(), [*tensors, *(names or [])])


def test_a_model_as_it_was_saved_needs_no_trace(tmp_path: Path) -> None:
    assert plan_of(tmp_path) is not None


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.self_attn.rotary_emb.inv_freq"],
        ["model.layers.3.mlp.up_proj.weight"],
        ["model.layers.0.mlp.up_proj.weight_scale"],
        ["layers.0.mlp.up_proj.weight"],
    ],
    ids=["a buffer", "a layer too many", "quantised", "another prefix"],
)
def test_a_tensor_that_the_family_has_not_is_left_to_the_module(names: list[str], tmp_path: Path) -> None:
    assert plan_of(tmp_path, names) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": []},
        {"architectures": None},
        {"model_type": "brand_new"},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": None},
        {"tie_word_embeddings": None},
    ],
    ids=str,
)
def test_a_configuration_that_says_something_else_is_left_to_the_module(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    assert plan_of(tmp_path, **changes) is None


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(lambda it: json.dumps(it).encode()))
def test_no_configuration_is_too_odd_to_be_left_to_the_module(config: bytes) -> None:
    assert known_plan(config, ["a"]) is None


@pytest.mark.parametrize("function", ["coder", "embed"])
def test_converting_what_we_ship_imports_nothing_heavy(function: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sllm_loaderd.convert import convert_directory\n"
        f"convert_directory(Path({str(MODELS / function / 'model')!r}), Path({str(tmp_path / 'made')!r}))\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

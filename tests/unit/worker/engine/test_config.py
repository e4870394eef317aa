"""What we read of a config.json is what transformers reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from sllm_runtime.worker.engine.ours.model import FAMILIES
from sllm_runtime.worker.engine.ours.model.config import KINDS, OTHERS, Config, read
from tests.fixtures.families import FAMILIES as MODELS
from tests.fixtures.families import family

READ = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        "rope_parameters", "sliding_window", "layer_types", "num_experts_per_tok", "num_local_experts",
        "model_type")  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RAW = st.fixed_dictionaries(
    {},
    optional={
        "hidden_size": st.sampled_from([64, 4096]),
        "num_hidden_layers": st.integers(1, 6),
        "num_attention_heads": st.sampled_from([4, 32]),
        "head_dim": st.sampled_from([16, 64]),
        "tie_word_embeddings": st.booleans(),
        "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
        "rope_theta": st.sampled_from([1e4, 5e5]),
        "rope_scaling": st.sampled_from([None, {"type": "linear", "factor": 2.0}, _LLAMA3]),
        "rope_parameters": st.sampled_from([None, {"rope_type": "default", "rope_theta": 7.0}]),
        "sliding_window": st.sampled_from([None, 24]),
        "use_sliding_window": st.booleans(),
        "max_window_layers": st.integers(0, 4),
    },
)


def alike(ours: Any, theirs: Any) -> None:
    for name in READ:
        if hasattr(theirs, name):
            assert getattr(ours, name) == getattr(theirs, name), name
    width = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == width


@pytest.mark.parametrize("kind", KINDS)
@given(raw=RAW)
def test_every_field_is_what_transformers_makes_of_it(kind: str, raw: dict[str, Any]) -> None:
    def copied() -> dict[str, Any]:  # transformers fills in the dictionaries that it is given
        return {key: dict(each) if isinstance(each, dict) else each for key, each in raw.items()}

    found = read({**copied(), "model_type": kind, "architectures": [KINDS[kind][0]]}, "auto")
    assert found is not None
    assert found[0] in FAMILIES
    assert isinstance(found[1], Config)
    alike(found[1], CONFIG_MAPPING[kind].from_dict(copied()))


@pytest.mark.parametrize("name", MODELS)
def test_each_family_is_found_by_its_own_config_json(name: str) -> None:
    model = family(name)
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    found = read(raw, "auto")
    assert found is not None
    assert found[0] == type(model).__name__
    if isinstance(found[1], Config):
        alike(found[1], model.config)
    assert read({**raw, "architectures": None}, "causal_lm") is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "bert"},
        {"model_type": 7},
        {"architectures": ["LlamaModel"]},
        {"architectures": None},
        {"auto_map": {}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"num_attention_heads": "many"},
        {"num_attention_heads": 0, "head_dim": None},
    ],
)
def test_what_is_none_of_ours_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert read({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **changes}, "auto") is None


def test_the_tables_name_what_is_there() -> None:
    assert {name for name, _ in KINDS.values()} | set(OTHERS.values()) == set(FAMILIES)

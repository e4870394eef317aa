"""Our logits are those of transformers, for each family and each oddity of its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.config import read
from sllm_runtime.worker.engine.ours.model.weights import side_by_side
from tests.fixtures.families import FAMILIES, family
from tests.unit.worker.engine.driver import Rows, decoder

torch.manual_seed(5)
TOKENS = torch.randint(3, 101, (150,)).tolist()
"""More than a page."""


def theirs(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = family(name, dtype)(input_ids=torch.tensor([TOKENS])).logits[0]
    return logits.float()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str) -> None:
    rows = Rows(decoder(name), TOKENS)
    ours = torch.cat([rows.chunk(0, 100), rows.chunk(100, 49), rows.chunk(149, 1)])
    assert (ours - theirs(name)).abs().max() <= 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_no_further_off_than_that_of_transformers(name: str) -> None:
    exact = theirs(name)
    ours = Rows(decoder(name, torch.bfloat16), TOKENS).chunk(0, len(TOKENS))
    error, allowed = (ours - exact).norm(), (theirs(name, torch.bfloat16) - exact).norm()
    assert error <= 1.5 * allowed
    best = exact.topk(2)
    sure = (best.values[:, 0] - best.values[:, 1]) > 4 * (ours - exact).abs().max()
    assert (ours.argmax(1) == best.indices[:, 0])[sure].all()


def test_what_is_unknown_or_incomplete_is_refused_by_name() -> None:
    model = family("llama")
    with pytest.raises(UnsupportedModel, match="BertForMaskedLM"):
        build("BertForMaskedLM", None, {}, torch.float32, 4)
    lacking = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(InvalidCheckpoint, match=r"layers\.1\.mlp\.up_proj"):
        Rows(build("LlamaForCausalLM", model.config, lacking, torch.float32, 4), TOKENS).chunk(0, 4)
    shaped = {**model.state_dict(), "model.norm.weight": torch.ones(3)}
    with pytest.raises(InvalidCheckpoint, match=r"'model.norm.weight' has shape \(3,\), the model wants \(64,\)"):
        Rows(build("LlamaForCausalLM", model.config, shaped, torch.float32, 4), TOKENS).chunk(0, 4)
    untied = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(InvalidCheckpoint, match="lm_head"):
        Rows(build("LlamaForCausalLM", model.config, untied, torch.float32, 4), TOKENS).chunk(0, 4)
    for name, changes, says in (
        ("FalconForCausalLM", {"alibi": True}, "ALiBi"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "both directions"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, "norms have no weights"),
    ):
        with pytest.raises(UnsupportedModel, match=says):
            build(name, type("Config", (), changes), {}, torch.float32, 4)


def test_matrices_that_lie_side_by_side_become_one_without_a_copy() -> None:
    memory = torch.arange(96.0)
    first, second, third = memory[:32].view(8, 4), memory[32:64].view(8, 4), memory[64:].view(8, 4)
    joined = side_by_side([first, second])
    assert joined is not None
    assert joined.data_ptr() == memory.data_ptr()
    assert torch.equal(joined, torch.cat((first, second)))
    assert side_by_side([first, third]) is None
    assert side_by_side([second, first]) is None
    assert side_by_side([first, second.t()]) is None
    assert side_by_side([first, torch.ones(8, 4)]) is None


@pytest.mark.parametrize("left", ["sliding_window", "layer_types"])
def test_what_a_configuration_says_and_its_class_does_not_read_changes_nothing(left: str) -> None:
    """A Llama has no windows, whatever its config.json took over from the model that it was made of."""
    model: Any = family("llama")
    said: Any = {"sliding_window": 16}
    if left == "layer_types":
        said["layer_types"] = ["sliding_attention"] * model.config.num_hidden_layers
    raw = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], **said}
    found = read(raw, "auto")
    assert found is not None
    ours = Rows(build(*found, model.state_dict(), torch.float32, 4), TOKENS).chunk(0, len(TOKENS))
    make: Any = transformers.LlamaForCausalLM
    same = make(transformers.LlamaConfig.from_dict(raw)).eval()
    same.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert (ours - same(input_ids=torch.tensor([TOKENS])).logits[0]).abs().max() <= 1e-4

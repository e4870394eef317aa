"""Which layers a stage has of a model with a partition for each stage."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan, PlanRule, RankPlan
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.checkpoint import CheckpointIndex
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel
from sllm_runtime.worker import weights
from sllm_runtime.worker.engine.choice import recognise
from sllm_runtime.worker.engine.ours.model.survey import Needs
from sllm_runtime.worker.shares import layers_in
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors
from tests.fixtures.loaderd import ignore
from tests.fixtures.models import save_model

FIRST = (PlanRule("*embed*", rank=0), PlanRule("model.norm*", rank=0), PlanRule("lm_head*", rank=0))


def known(place: Path, plan: RankPlan | AutoPlan, name: str = "llama", **sizes: Any) -> tuple[CheckpointIndex, Needs]:
    """The index of the model over its partitions, and what each layer reads."""
    save_model(name, place / "source", **sizes)
    convert_directory(place / "source", place / "made", options=ConvertOptions(plan=plan), verify=ignore)
    checkpoint = open_checkpoint(place / "made")
    others = {each.rank: b"" for each in checkpoint.index.partitions[1:]}
    typed = TypedTensors(CheckpointTensors(checkpoint.index, b"", beside=others), torch.float32)
    config = weights.read_config({"config.json": (place / "made" / "config.json").read_bytes()})
    found = recognise(config, "auto", typed, typed.shapes, torch.float32)
    assert found is not None
    return checkpoint.index, found.needs


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["llama", "tied_llama", "gpt2", "mixtral"])
def test_stages_have_all_layers_in_their_order(name: str, stages: int, tmp_path: Path) -> None:
    sizes = {"n_layer": 5} if name == "gpt2" else {"num_hidden_layers": 5}
    index, needs = known(tmp_path, AutoPlan("auto-stages", stages), name, **sizes)
    found = [layers_in(index, needs, number) for number in range(stages)]
    assert (found[0].low, found[-1].high) == (0, 5)
    assert all(one.low < one.high == other.low for one, other in pairwise(found))


@pytest.mark.parametrize(
    "rules",
    [
        (*FIRST, PlanRule("*layers.0.*", rank=1), PlanRule("*", rank=0)),
        (*FIRST, PlanRule("*layers.0.mlp*", rank=1), PlanRule("*", rank=0)),
        (*FIRST, PlanRule("*layers.1.*", rank=1), PlanRule("*", rank=0)),
        (PlanRule("lm_head*", rank=1), *FIRST, PlanRule("*layers.2.*", rank=1), PlanRule("*", rank=0)),
        (PlanRule("*", rank=1),),
    ],
    ids=["the other way round", "half a layer", "no run", "the head elsewhere", "one has nothing"],
)
def test_partitions_that_are_no_stages_are_refused(rules: tuple[PlanRule, ...], tmp_path: Path) -> None:
    index, needs = known(tmp_path, RankPlan(2, rules))
    for number in range(2):
        with pytest.raises(InvalidCheckpoint, match=r"layout hf-plan.*--plan auto-stages:2"):
            layers_in(index, needs, number)


def test_a_plan_of_ones_own_is_as_good(tmp_path: Path) -> None:
    index, needs = known(tmp_path, RankPlan(2, (*FIRST, PlanRule("*layers.2.*", rank=1), PlanRule("*", rank=0))))
    assert [msgspec.structs.astuple(layers_in(index, needs, number)) for number in range(2)] == [(0, 2), (2, 3)]


def test_tensors_in_parts_are_for_ranks(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"parallelism=\{'tensor': 2\}"):
        known(tmp_path, AutoPlan("auto", 2))

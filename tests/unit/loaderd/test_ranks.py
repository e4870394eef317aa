"""Parallelism plans: what is split is joined again bit for bit, and every byte is in exactly one place."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sllm_loaderd.assemble import WholeTensors
from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.partitions import lay_out
from sllm_loaderd.convert.plan import StoragePlan, StoredTensor
from sllm_loaderd.convert.ranks import AutoPlan, PlanRule, RankPlan, Share, read_plan
from sllm_loaderd.layout import PlannedTensor
from sllm_loaderd.verify import Checkpoint, validate_checkpoint
from sllm_runtime.protocol.errors import CorruptCheckpoint, InvalidCheckpoint, UnsupportedModel
from tests.fixtures.examples import examples
from tests.fixtures.gguf_files import model_of
from tests.fixtures.loaderd import SMALL_CHUNK, bound_tensors, ignore, numbers_model
from tests.fixtures.models import save_model


def converted(source: Path, target: Path, plan: RankPlan | AutoPlan, **options: Any) -> Checkpoint:
    shutil.rmtree(target, ignore_errors=True)
    chosen = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0, plan=plan, **options)
    convert_directory(source, target, options=chosen, verify=ignore)
    return validate_checkpoint(target)


def whole(checkpoint: Checkpoint, name: str) -> list[bytes]:
    with contextlib.closing(WholeTensors(checkpoint.directory, checkpoint.index)) as tensors:
        return [b"".join(bytes(window) for window in windows) for windows in tensors.copies(name)]


def rules(ranks: int) -> st.SearchStrategy[PlanRule]:
    match = st.sampled_from(["*", "a*", "*.weight", "?", "b"])
    return st.one_of(
        st.builds(PlanRule, match, rank=st.integers(0, ranks - 1)),
        st.builds(PlanRule, match, split=st.integers(0, 2)),
        st.builds(PlanRule, match, copy=st.just(True)),
    )


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_joining_what_was_split_gives_the_tensor(tmp_path: Path, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    shapes = st.lists(st.integers(0, 6), min_size=3, max_size=4)
    sizes = data.draw(st.dictionaries(st.sampled_from(["a", "b", "h.0.weight", "h.1.x"]), shapes, min_size=1))
    arrays = {
        name: np.random.default_rng(len(name)).integers(0, 2**16, shape).astype(np.uint16)
        for name, shape in sizes.items()
    }
    plan = RankPlan(ranks, (*data.draw(st.lists(rules(ranks), max_size=3)), PlanRule("*", split=1)))
    (tmp_path / "source").mkdir(exist_ok=True)
    save_file(arrays, tmp_path / "source" / "model.safetensors")
    checkpoint = converted(tmp_path / "source", tmp_path / "checkpoint", plan)
    splits = {split.name: split for split in checkpoint.index.splits}
    for name, array in arrays.items():
        records = [record for record in checkpoint.index.tensors if record.name == name]
        copies = len(records) if name in splits and splits[name].dim is None else 1
        assert whole(checkpoint, name) == [array.tobytes()] * copies
        assert sum(record.nbytes for record in records) == copies * array.nbytes  # each byte in one place, or in each
        if name in splits and splits[name].dim is not None:
            parts = [bound_tensors(checkpoint, rank)[name].numpy() for rank in splits[name].ranks]
            np.testing.assert_array_equal(np.concatenate(parts, axis=splits[name].dim), array)


@given(granule=st.integers(1, 40), count=st.integers(0, 9), ranks=st.integers(2, 5))
def test_what_belongs_together_is_never_cut(granule: int, count: int, ranks: int) -> None:
    tensor = PlannedTensor("a", "uint8", (3, granule * count), 3 * granule * count, granule)
    plan = StoragePlan({"a": StoredTensor(tensor, ("a",))}, ("a",), "offset", {}, {})
    layouts = lay_out(plan, {"a": Share(tuple(range(ranks)), 1)}, ranks, 0)
    pieces = [layout.pieces["a"] for layout in layouts]
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == granule * count
    assert all(piece.stop % granule == 0 for piece in pieces)


def test_rows_that_are_longer_than_a_window_are_split_too(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).integers(0, 255, (3, 5 * 2**20 + 3), dtype=np.uint8)
    tall = np.random.default_rng(1).integers(0, 255, (40_001, 130), dtype=np.uint8)
    (tmp_path / "source").mkdir()
    save_file({"wide": wide, "tall": tall}, tmp_path / "source" / "model.safetensors")
    checkpoint = converted(tmp_path / "source", tmp_path / "checkpoint", RankPlan(3, (PlanRule("*", split=1),)))
    assert whole(checkpoint, "wide") == [wide.tobytes()]
    assert whole(checkpoint, "tall") == [tall.tobytes()]


def test_auto_gives_each_rank_whole_heads_and_a_run_of_the_vocabulary(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "source", dtype=torch.bfloat16)
    checkpoint = converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto", 2))
    index = checkpoint.index
    assert index.layout == "hf-tp2"
    first, second = (bound_tensors(checkpoint, rank) for rank in range(2))
    state = model.state_dict()
    for name, dim in {"self_attn.q_proj": 0, "self_attn.o_proj": 1, "mlp.down_proj": 1, "mlp.up_proj": 0}.items():
        key = f"model.layers.1.{name}.weight"
        assert torch.equal(torch.cat([first[key], second[key]], dim), state[key])
    assert first["lm_head.weight"].shape[0] + second["lm_head.weight"].shape[0] == 101
    assert torch.equal(first["model.norm.weight"], second["model.norm.weight"])
    assert [block.layers for block in index.blocks if block.rank == 1] == [None, (0, 0), (1, 1), (2, 2), None]


def test_auto_gives_each_rank_whole_experts_under_their_own_names(tmp_path: Path) -> None:
    model = save_model("mixtral", tmp_path / "source")
    checkpoint = converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto", 2))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for rank in range(2):
        tensors = bound_tensors(checkpoint, rank)
        assert torch.equal(tensors[name], model.state_dict()[name][2 * rank : 2 * rank + 2])
        one = tensors[f"model.layers.0.block_sparse_moe.experts.{2 * rank + 1}.w1.weight"]
        assert torch.equal(tensors[name][1, : one.shape[0]], one)
        assert f"model.layers.0.block_sparse_moe.experts.{2 - 2 * rank}.w1.weight" not in tensors


def test_auto_layers_gives_each_rank_a_run_and_keeps_their_numbers(tmp_path: Path) -> None:
    model = save_model("tied_llama", tmp_path / "source", num_hidden_layers=5)
    checkpoint = converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto-layers", 2))
    index = checkpoint.index
    layers = [[block.layers for block in index.blocks if block.rank == rank] for rank in range(2)]
    assert [n for n in layers[0] if n] + [n for n in layers[1] if n] == [(number, number) for number in range(5)]
    assert layers[0][0] is None
    assert layers[1][-1] is None
    assert not index.blocks[-1].shared, "the tied head has its bytes with it"
    (copies,) = index.splits
    assert (copies.name, copies.ranks, copies.dim) == ("model.embed_tokens.weight", (0, 1), None)
    head = max((t for t in index.tensors if t.rank == 1), key=lambda tensor: tensor.offset)
    assert head.name == copies.name, "and has them last, where it needs them"
    alone = bound_tensors(checkpoint, 1)
    assert torch.equal(alone["lm_head.weight"], model.lm_head.weight)
    found = {**bound_tensors(checkpoint, 0), **bound_tensors(checkpoint, 1)}
    for name, value in model.named_parameters(remove_duplicate=False):
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("kind", ["tied_llama", "llama", "gpt2"])
def test_auto_stages_has_what_is_not_a_layer_in_the_first(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_layer": 6} if kind == "gpt2" else {"num_hidden_layers": 6}
    model = save_model(kind, tmp_path / "source", **sizes)
    checkpoint = converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto-stages", 3))
    index = checkpoint.index
    assert index.layout == "hf-stages3"
    assert not index.splits
    layers = [[block.layers for block in index.blocks if block.rank == rank and block.layers] for rank in range(3)]
    assert [each for own in layers for each in own] == [(number, number) for number in range(6)]
    assert 1 <= len(layers[0]) <= len(layers[2]), "embedding and head count, too"
    assert all(block.layers for block in index.blocks if block.rank)
    found = {name: tensor for rank in range(3) for name, tensor in bound_tensors(checkpoint, rank).items()}
    for name, value in model.named_parameters(remove_duplicate=False):
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("kind", ["gpt2", "phi", "bert"])
def test_auto_layers_serves_what_auto_does_not(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path / "source")
    with pytest.raises((UnsupportedModel, InvalidCheckpoint), match="auto-layers:2"):
        converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto", 2))
    assert not (tmp_path / "checkpoint").exists()
    assert (
        len(converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto-layers", 2)).index.partitions) == 2
    )


def test_projections_in_one_are_refused_by_name(tmp_path: Path) -> None:
    model_of("phi3").save_pretrained(tmp_path / "source")
    with pytest.raises(UnsupportedModel, match=r"no rule for tensor .*(qkv|gate_up)_proj.weight.*auto-layers:2"):
        converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto", 2))


def test_more_ranks_than_heads_or_layers_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    for plan, text in (
        (AutoPlan("auto", 4), "num_key_value_heads = 2"),
        (AutoPlan("auto-layers", 9), "3 layers"),
        (AutoPlan("auto-stages", 9), "3 layers"),
    ):
        with pytest.raises(InvalidCheckpoint, match=text):
            converted(tmp_path / "source", tmp_path / "checkpoint", plan)


def test_layouts_of_a_model_stand_side_by_side(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    plans = {name: read_plan(name) for name in ("auto:1", "auto:2", "auto-layers:3", "auto-stages:3")}
    found = {plan: converted(tmp_path / "source", tmp_path / plan.replace(":", "-"), it) for plan, it in plans.items()}
    assert [checkpoint.index.layout for checkpoint in found.values()] == ["hf-tp1", "hf-tp2", "hf-pp3", "hf-stages3"]
    assert len({checkpoint.digest for checkpoint in found.values()}) == 4
    joined = {tuple(whole(checkpoint, "model.embed_tokens.weight")) for checkpoint in found.values()}
    assert len(joined) == 1


GOOD = {"ranks": 2, "rules": [{"match": "*", "split": 0}]}


@pytest.mark.parametrize(
    "change",
    [{"ranks": 0}, {"ranks": 10**6}, {"ranks": "x"}, {"layout": "../x"}, {"layout": "hf"}, {"more": 1},
     {"rules": [{"match": "*"}]}, {"rules": [{"match": "*", "rank": 2}]},
     {"rules": [{"match": "*", "rank": 0, "copy": True}]}],
)  # fmt: skip
def test_a_plan_file_that_makes_no_sense_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    assert read_plan(str(path)) == RankPlan(2, (PlanRule("*", split=0),))
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(InvalidCheckpoint):
        read_plan(str(path))


@pytest.mark.parametrize("text", ["auto:0", "auto:9999", "auto-layers:", "automatic", "/nowhere/plan.json"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidCheckpoint):
        read_plan(text)


def test_a_plan_that_leaves_a_tensor_out_names_it(tmp_path: Path) -> None:
    numbers_model(tmp_path / "source")
    for rule, text in ((PlanRule("layers.*", rank=1), "embed.weight"), (PlanRule("*", split=2), "dimension 2")):
        with pytest.raises(InvalidCheckpoint, match=text):
            converted(tmp_path / "source", tmp_path / "checkpoint", RankPlan(2, (rule,)))


def test_validation_names_partition_chunk_and_tensor(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    checkpoint = converted(tmp_path / "source", tmp_path / "checkpoint", AutoPlan("auto", 2))
    record = next(
        r for r in checkpoint.index.tensors if r.rank == 1 and r.name == "model.layers.2.mlp.down_proj.weight"
    )
    path = checkpoint.directory / "partition_1.bin"
    data = bytearray(path.read_bytes())
    data[record.offset + 9] ^= 4
    path.write_bytes(data)
    number = (record.offset + 9) // SMALL_CHUNK
    with pytest.raises(CorruptCheckpoint, match=rf"partition_1\.bin: chunk {number} .*down_proj"):
        validate_checkpoint(checkpoint.directory)


def test_a_comparison_finds_the_byte_that_differs(tmp_path: Path) -> None:
    arrays = numbers_model(tmp_path / "source")
    plan = RankPlan(2, (PlanRule("*", split=1),))

    def progress(done: int, total: int) -> None:
        if done == total:  # all is written: now a bit of it falls over
            path = next(tmp_path.glob(".checkpoint.*.tmp/partition_1.bin"))
            with path.open("r+b") as file:
                file.write(bytes([arrays["embed.weight"].tobytes()[128] ^ 1]))

    with pytest.raises(CorruptCheckpoint, match=r"'embed\.weight' differs from its source at byte 128"):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint", options=ConvertOptions(plan=plan),
                          progress=progress, verify=ignore)  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

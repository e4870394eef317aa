"""Placing tensors: every plan is a sound index, in execution order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.layout import PlannedTensor, layer_key, place
from sllm_runtime.protocol.checkpoint import (
    AliasRecord,
    CheckpointIndex,
    PartitionRecord,
    check_index,
    chunk_count,
)


def tensor(name: str, nbytes: int = 100) -> PlannedTensor:
    return PlannedTensor(name, "uint8", (nbytes,), nbytes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3."),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3."),
        ("transformer.h.0.attn.bias", "transformer.h.0."),
        ("0.weight", "0."),
        ("lm_head.weight", None),
        ("layer1.weight", None),
        ("weight.0", None),
        ("", None),
    ],
)
def test_a_layer_is_told_by_the_first_number_in_a_name(name: str, key: str | None) -> None:
    assert layer_key(name) == key


def test_layers_are_blocks_in_execution_order_and_a_tied_head_shares_the_embedding() -> None:
    names = ["embed", "h.0.a", "h.0.b", "h.1.a", "norm"]
    placed = place([*names, "head"], [tensor(name) for name in reversed(names)], {"head": "embed"}, min_block=0)
    assert [record.name for record in placed.tensors] == names
    assert [(block.layers, block.shared) for block in placed.blocks] == [
        (None, ()),
        ((0, 0), ()),
        ((1, 1), ()),
        (None, ("embed",)),
    ]


def test_small_layers_go_together() -> None:
    names = [f"h.{number}.w" for number in range(5)]
    placed = place(names, [tensor(name, 400) for name in names], {}, min_block=1000)
    assert [block.layers for block in placed.blocks] == [(0, 2), (3, 4)]


def test_what_the_order_does_not_name_is_kept_with_its_layer() -> None:
    names = ["embed", "h.0.a", "h.1.a", "norm"]
    tensors = [tensor(name) for name in (*names, "h.0.mask", "extra")]
    placed = place(names, tensors, {}, min_block=0)
    assert [record.name for record in placed.tensors] == ["embed", "h.0.a", "h.0.mask", "h.1.a", "norm", "extra"]


NAMES = st.builds(
    lambda layer, leaf: f"h.{layer}.{leaf}" if layer is not None else leaf,
    st.none() | st.integers(0, 5),
    st.text(min_size=1, max_size=6),
)


@given(
    st.dictionaries(NAMES, st.integers(0, 20_000), max_size=12),
    st.sampled_from([0, 5000, 2**20]),
    st.data(),
)
def test_every_plan_is_a_sound_index(sizes: dict[str, int], min_block: int, data: st.DataObject) -> None:
    tensors = [tensor(name, nbytes) for name, nbytes in sizes.items()]
    ties = {}
    if sizes:
        others = data.draw(st.lists(NAMES.filter(lambda name: name not in sizes), unique=True, max_size=3))
        ties = {name: data.draw(st.sampled_from(sorted(sizes))) for name in others}
    order = data.draw(st.permutations([*sizes, *ties]))
    placed = place(order[: len(order) // 2], tensors, ties, min_block=min_block)
    index = CheckpointIndex(
        partitions=(PartitionRecord(0, placed.nbytes, ("0" * 32,) * chunk_count(placed.nbytes, 8192)),),
        blocks=placed.blocks,
        tensors=placed.tensors,
        aliases=tuple(AliasRecord(name, of) for name, of in ties.items()),
        chunk_bytes=8192,
    )
    check_index(index)
    assert {record.name: record.nbytes for record in placed.tensors} == sizes

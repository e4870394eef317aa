"""The index: what it says is checked before it is used, whatever it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_loaderd.devices.tensors import BoundTensors
from sllm_runtime.protocol.checkpoint import (
    BLOCK_ALIGN,
    ITEM_BYTES,
    AdapterRecord,
    AliasRecord,
    BlockRecord,
    CheckpointIndex,
    FileRecord,
    PartitionRecord,
    QuantRecord,
    SplitRecord,
    TensorRecord,
    block_chunks,
    check_index,
    chunks_of,
    contiguous_stride,
    decode_index,
    digest_hex,
    encode_index,
    index_digest,
)
from sllm_runtime.protocol.errors import InvalidCheckpoint
from tests.fixtures.examples import examples

CHUNK = 8192


def good_index(**changes: Any) -> CheckpointIndex:
    tensors = (
        TensorRecord("embed", 0, 0, 400, "float32", (10, 10), (10, 1)),
        TensorRecord("empty", 0, 512, 0, "float32", (0, 3), (3, 1)),
        TensorRecord("layers.0.w", 0, 4096, 8000, "bfloat16", (4000,), (1,)),
        TensorRecord("norm", 0, 12288, 4, "float32", (), ()),
        TensorRecord("wide", 0, 12544, 24, "float32", (3, 2), (2, 1)),
        TensorRecord("wide", 1, 0, 36, "float32", (3, 3), (3, 1)),
        TensorRecord("both", 0, 12800, 2, "bfloat16", (1,), (1,)),
        TensorRecord("both", 1, 256, 2, "bfloat16", (1,), (1,)),
        TensorRecord("packed", 1, 512, 68, "uint8", (2, 34), (34, 1)),
    )
    index = CheckpointIndex(
        partitions=(PartitionRecord(0, 16384, ("0" * 32, "a" * 32)), PartitionRecord(1, 4096, ("b" * 32,))),
        blocks=(
            BlockRecord(0, 0, 4096),
            BlockRecord(0, 4096, 8192, (0, 0)),
            BlockRecord(0, 12288, 4096, None, ("embed",)),
            BlockRecord(1, 0, 4096, None, ("embed",)),
        ),
        tensors=tensors,
        aliases=(AliasRecord("head", "embed"),),
        views=(TensorRecord("row", 0, 40, 40, "float32", (10,), (1,)),),
        splits=(SplitRecord("wide", (3, 5), (1, 0), 1), SplitRecord("both", (1,), (0, 1))),
        quants=(QuantRecord("packed", "q8_0", (2, 32)),),
        adapter=AdapterRecord("org/base", "lora", 8, 16.0, ("q_proj",)),
        files=(FileRecord("config.json", 2, "f" * 64),),
        chunk_bytes=CHUNK,
    )
    return msgspec.structs.replace(index, **changes)


def test_an_index_survives_its_encoding() -> None:
    index = good_index()
    assert decode_index(encode_index(index)) == index
    assert index_digest(encode_index(index)) == index_digest(encode_index(decode_index(encode_index(index))))


def test_fields_of_a_later_release_are_ignored_and_change_the_identity() -> None:
    plain = json.loads(encode_index(good_index()))
    later = json.dumps({**plain, "later": [1]}).encode()
    assert decode_index(later) == good_index()
    assert index_digest(later) != index_digest(encode_index(good_index()))


def test_a_block_waits_for_the_tensors_it_shares() -> None:
    assert block_chunks(good_index(), 0) == [(0,), (0, 1), (0, 1)]
    assert block_chunks(good_index(), 1) == [(0,)]  # what another rank holds is not in this partition


def replaced(index: CheckpointIndex, field: str, place: int, /, **changes: Any) -> CheckpointIndex:
    records = list(getattr(index, field))
    records[place] = msgspec.structs.replace(records[place], **changes)
    return msgspec.structs.replace(index, **{field: tuple(records)})


BAD: dict[str, Callable[[CheckpointIndex], CheckpointIndex]] = {
    "version": lambda i: msgspec.structs.replace(i, version=2),
    "digest": lambda i: msgspec.structs.replace(i, digest="crc32"),
    "chunk size": lambda i: msgspec.structs.replace(i, chunk_bytes=1000),
    "no partition": lambda i: msgspec.structs.replace(i, partitions=()),
    "digest count": lambda i: replaced(i, "partitions", 0, digests=("0" * 32,)),
    "digest text": lambda i: replaced(i, "partitions", 0, digests=("0" * 32, "Z" * 32)),
    "partition size": lambda i: replaced(i, "partitions", 0, nbytes=16383),
    "partition rank": lambda i: replaced(i, "partitions", 0, rank=5),
    "behind the end": lambda i: replaced(i, "tensors", 2, offset=12032),
    "size overflow": lambda i: replaced(i, "tensors", 2, offset=2**63),
    "negative": lambda i: replaced(i, "tensors", 2, offset=-256),
    "overlap": lambda i: replaced(i, "tensors", 3, offset=4096),
    "not aligned": lambda i: replaced(i, "tensors", 3, offset=12290),
    "wrong bytes": lambda i: replaced(i, "tensors", 2, nbytes=7998),
    "dtype": lambda i: replaced(i, "tensors", 2, dtype="float31"),
    "stride": lambda i: replaced(i, "tensors", 0, stride=(11, 1)),
    "dimensions": lambda i: replaced(i, "tensors", 0, stride=(1,)),
    "tensor's rank": lambda i: replaced(i, "tensors", 0, rank=2),
    "same name": lambda i: replaced(i, "tensors", 3, name="embed"),
    "alias of nothing": lambda i: replaced(i, "aliases", 0, of="gone"),
    "alias is a tensor": lambda i: replaced(i, "aliases", 0, name="norm"),
    "hole between blocks": lambda i: replaced(i, "blocks", 1, offset=8192),
    "blocks too short": lambda i: msgspec.structs.replace(i, blocks=i.blocks[:2] + i.blocks[3:]),
    "block in no partition": lambda i: msgspec.structs.replace(i, blocks=(*i.blocks, BlockRecord(3, 0, 0))),
    "crosses a block": lambda i: replaced(replaced(i, "blocks", 1, nbytes=4096), "blocks", 2, offset=8192, nbytes=8192),
    "shares nothing": lambda i: replaced(i, "blocks", 2, shared=("gone",)),
    "layer range": lambda i: replaced(i, "blocks", 1, layers=(3, 1)),
    "shares more than can be looked up": lambda i: replaced(i, "blocks", 2, shared=("layers.0.w",) * 2**19),
    "elements overflow": lambda i: replaced(i, "tensors", 1, shape=(0, 2**40, 2**40), stride=(1, 1, 1)),
    "two tensors of one name": lambda i: msgspec.structs.replace(i, splits=i.splits[1:]),
    "a part is missing": lambda i: replaced(i, "splits", 0, ranks=(0, 1, 2)),
    "one part": lambda i: replaced(i, "splits", 0, ranks=(0,)),
    "parts do not add up": lambda i: replaced(i, "splits", 0, shape=(3, 6)),
    "parts differ elsewhere": lambda i: replaced(i, "splits", 0, dim=0, shape=(6, 5)),
    "no such dimension": lambda i: replaced(i, "splits", 0, dim=2),
    "a copy differs": lambda i: replaced(i, "splits", 1, shape=(2,)),
    "split twice": lambda i: msgspec.structs.replace(i, splits=(*i.splits, i.splits[0])),
    "view is a tensor": lambda i: replaced(i, "views", 0, name="norm"),
    "quant kind": lambda i: replaced(i, "quants", 0, kind="q9_9"),
    "quant's bytes": lambda i: replaced(i, "quants", 0, shape=(2, 64)),
    "quant of nothing": lambda i: replaced(i, "quants", 0, name="norm"),
    "adapter's rank": lambda i: good_index(adapter=AdapterRecord("b", "lora", 0, 1.0, ())),
    "adapter's kind": lambda i: good_index(adapter=AdapterRecord("b", "x", 8, 1.0, ())),
    "layout": lambda i: msgspec.structs.replace(i, layout="../x"),
    "file outside": lambda i: replaced(i, "files", 0, name="../config.json"),
    "file is the index": lambda i: replaced(i, "files", 0, name="index.json"),
    "file is a partition": lambda i: replaced(i, "files", 0, name="partition_0.bin"),
    "file's digest": lambda i: replaced(i, "files", 0, sha256="f"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_number_is_refused_with_the_field_that_has_it(case: str) -> None:
    check_index(good_index())
    with pytest.raises(InvalidCheckpoint) as caught:
        decode_index(encode_index(BAD[case](good_index())))
    assert caught.value.field
    assert "convert the model again" in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_index_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint):
        decode_index(data)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += _paths(child, (*path, key))
    return found


PLAIN = json.loads(encode_index(good_index()))
HOSTILE = (
    st.sampled_from([0, -1, 1, 255, 256, 4096, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 1e308, True, None]) | JSON
)


@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.sampled_from(_paths(PLAIN)), HOSTILE), min_size=1, max_size=3))
def test_a_hostile_index_gives_a_typed_error_or_is_sound(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    value = json.loads(json.dumps(PLAIN))
    for path, new in changes:
        place = value
        for key in path[:-1]:
            try:
                place = place[key]
            except (KeyError, IndexError, TypeError):
                break
        else:
            key = path[-1]
            if isinstance(place, dict) or (isinstance(place, list) and isinstance(key, int) and key < len(place)):
                place[key] = new
    try:
        index = decode_index(json.dumps(value).encode())
    except InvalidCheckpoint:
        return
    for tensor in (*index.tensors, *index.views):  # what was accepted can be used without leaving its partition
        size = index.partitions[tensor.rank].nbytes
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= size
        assert tensor.offset % ITEM_BYTES[tensor.dtype] == 0
    for rank, partition in enumerate(index.partitions):
        base = torch.zeros(partition.nbytes, dtype=torch.uint8)
        for name, bound in BoundTensors(index, rank, base).items():
            assert bound.untyped_storage().nbytes() <= partition.nbytes, name
        chunks = {number for needed in block_chunks(index, rank) for number in needed}
        assert chunks == set(range(len(partition.digests)))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 2**20))
def test_chunks_of_a_range_are_those_that_have_a_byte_of_it(offset: int, nbytes: int, chunk: int) -> None:
    found = chunks_of(offset, nbytes, chunk)
    if nbytes == 0:
        assert not found
    else:
        assert found == range(offset // chunk, (offset + nbytes - 1) // chunk + 1)


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:" + "G" * 64, "f" * 64, "sha256:../../etc", "md5:" + "f" * 64])
def test_what_is_no_digest_never_becomes_a_path(text: str) -> None:
    with pytest.raises(InvalidCheckpoint):
        digest_hex(text)


def test_strides_of_shapes_with_zeros_are_those_of_torch() -> None:
    for shape in [(), (3,), (2, 0, 4), (0, 3), (5, 1, 2), (0,)]:
        assert contiguous_stride(shape) == tuple(torch.empty(shape).stride())
    assert BLOCK_ALIGN == 4096

"""An instance that is ready while its weights still come; which blocks a layer needs; what is found before any byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sllm_loaderd.convert.directory import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_runtime.protocol.checkpoint import INDEX_NAME, CheckpointIndex, decode_index, partition_name, rank_blocks
from sllm_runtime.protocol.errors import CorruptCheckpoint, InvalidCheckpoint
from sllm_runtime.protocol.timeline import IMPORT, PROVE, SETUP, WEIGHTS
from sllm_runtime.worker import weights
from sllm_runtime.worker.arriving import Layers, Weights, blocks_of
from sllm_runtime.worker.engine.choice import Known, recognise
from sllm_runtime.worker.engine.ours.model.weights import side_by_side
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors
from tests.fixtures.models import save_model
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.harness import Zygote, bundle_of, manifest
from tests.unit.worker.scripted_loaderd import ScriptedLoaderd

MODEL = "sha256:" + "0" * 64
MADE = manifest(kind="generator", streams=True, model="m", engine=True)
SOURCE = bundle_of({"user.py": "def fn(model, prompt: str):\n    yield from model.generate(prompt, max_tokens=8)\n"})


DEVICES = ("cpu", "fake:0", "fake:1")


@pytest.fixture(scope="module")
def checkpoint(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint") / "converted"
    convert_directory(models("llama"), made)
    return made


@pytest.fixture(scope="module")
def parted(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in two partitions, each with some of its layers."""
    made = tmp_path_factory.mktemp("parted") / "converted"
    convert_directory(models("llama"), made, options=ConvertOptions(plan=AutoPlan("auto-layers", 2)))
    return made


@pytest.fixture
def loaderd(checkpoint: Path) -> Iterator[ScriptedLoaderd]:
    one = ScriptedLoaderd(checkpoint, MODEL)
    yield one
    one.close()


@pytest.fixture(scope="module")
def proof(
    zygote: Zygote, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[Any]]]:
    """What a first start finds, and what its instance says."""
    tmp_path = tmp_path_factory.mktemp("proof")
    first, worker = ScriptedLoaderd(checkpoint, MODEL), zygote.spawn()
    try:
        worker.assign(MADE, SOURCE, workdir=tmp_path / "first", session=first.session)
        first.land(*range(first.blocks))
        first.finish()
        worker.until(lambda: worker.ready is not None or worker.failed is not None)
        assert worker.ready is not None, worker.failed
        spans = {span.name: span for span in worker.ready.spans}
        assert list(spans) == [IMPORT, WEIGHTS, SETUP, PROVE], "without a proof it waits for every byte"
        assert 0 < spans[PROVE].ms <= spans[SETUP].ms
        assert spans[PROVE].at >= spans[SETUP].at
        answer = worker.run({"prompt": "def f"})
        assert WEIGHTS not in _spans(answer)
        yield worker.ready.proof, answer.outputs
    finally:
        worker.close()
        zygote.exited(zygote.count)
        first.close()


def _spans(answer: Any) -> list[str]:
    assert answer.end is not None
    return [span.name for span in answer.end.spans]


def test_it_is_ready_before_its_weights_and_says_the_same(
    proof: tuple[str, list[Any]], zygote: Zygote, loaderd: ScriptedLoaderd, tmp_path: Path
) -> None:
    worker = zygote.spawn()
    try:
        ready = worker.start(MADE, SOURCE, workdir=tmp_path / "w", session=loaderd.session, proof=proof[0])
        assert [span.name for span in ready.spans] == [IMPORT, SETUP], "not one block is there"
        assert ready.proof == proof[0]
        call = worker.call({"prompt": "def f"})
        loaderd.land(*range(loaderd.blocks))
        loaderd.finish()
        answer = worker.finish(call)
        assert answer.outputs == proof[1]
        assert _spans(answer)[0] == WEIGHTS
        assert _spans(worker.run({"prompt": "def f"})) == _spans(answer), "the gateway knows whom it concerns"
    finally:
        worker.close()
        zygote.exited(zygote.count)


def test_it_is_ready_before_any_of_its_partitions(
    proof: tuple[str, list[Any]], zygote: Zygote, parted: Path, tmp_path: Path
) -> None:
    loaderd, worker = ScriptedLoaderd(parted, MODEL), zygote.spawn()
    try:
        worker.start(MADE, SOURCE, workdir=tmp_path, session=loaderd.session, proof=proof[0], devices=DEVICES)
        assert loaderd.devices == {0: "fake:0", 1: "fake:1"}
        call = worker.call({"prompt": "def f"})
        loaderd.land(rank=1)  # by a link of its own, which may be the faster one
        loaderd.land(rank=0)
        loaderd.finish()
        answer = worker.finish(call)
        assert answer.outputs == proof[1]
        assert _spans(answer)[0] == WEIGHTS
    finally:
        worker.close()
        zygote.exited(zygote.count)
        loaderd.close()


def test_a_loaderd_that_goes_away_takes_the_instance_along_and_no_call(
    proof: tuple[str, list[Any]], zygote: Zygote, loaderd: ScriptedLoaderd, tmp_path: Path
) -> None:
    """Not a token of it was told: it goes on where there is a loaderd, so nothing is said to its caller."""
    worker = zygote.spawn()
    try:
        worker.start(MADE, SOURCE, workdir=tmp_path / "w", session=loaderd.session, proof=proof[0])
        call = worker.call({"prompt": "def f"})
        loaderd.land(0)
        loaderd.hang_up()
        worker.until(lambda: worker.failed is not None)
        assert worker.failed is not None
        assert (worker.failed.error.code, worker.failed.error.stage) == ("instance_lost", WEIGHTS)
        assert worker.answers[call].end is None
    finally:
        worker.close()
        zygote.exited(zygote.count)


BEGUN = {
    "user.py": """
import os, time

def fn(model, until: str = ""):
    yield "begun"
    while until and not os.path.exists(until):
        time.sleep(0.01)
    if not until:
        yield from model.generate("def f")
"""
}


def test_weights_that_break_off_fail_the_call_and_end_the_instance(
    proof: tuple[str, list[Any]], zygote: Zygote, loaderd: ScriptedLoaderd, tmp_path: Path
) -> None:
    worker = zygote.spawn()
    try:
        worker.start(MADE, bundle_of(BEGUN), workdir=tmp_path / "w", session=loaderd.session, proof=proof[0])
        call, holds = worker.call(), worker.call({"until": str(tmp_path / "over")})
        worker.outputs(call, 1)
        worker.outputs(holds, 1)
        loaderd.land(0)
        loaderd.fail(CorruptCheckpoint("chunk 3 has another digest"))
        assert worker.finish(call).error.code == "corrupt_checkpoint"
        late = worker.finish(worker.call()).end  # while the instance waits for what still runs
        assert late is not None
        assert (late.error and late.error.code, late.unseen) == ("draining", True), "it goes to another instance"
        (tmp_path / "over").touch()
        assert worker.finish(holds).outputs == ["begun"]
        worker.until(lambda: worker.failed is not None)
        assert worker.failed is not None
        assert (worker.failed.error.code, worker.failed.error.stage) == ("corrupt_checkpoint", WEIGHTS)
        worker.wait_dead()
    finally:
        worker.close()
    assert zygote.exited(zygote.count).code == 1


def test_a_module_waits_for_the_weights_too(
    proof: tuple[str, list[Any]], zygote: Zygote, loaderd: ScriptedLoaderd, tmp_path: Path
) -> None:
    source = "def fn(model):\n    return [str(model.device), model.module.lm_head.weight.sum()]\n"
    worker = zygote.spawn()
    try:
        made = manifest(model="m", engine=True)
        worker.start(
            made, bundle_of({"user.py": source}), workdir=tmp_path / "w", session=loaderd.session, proof=proof[0]
        )
        call = worker.call()
        loaderd.land(*range(loaderd.blocks))
        loaderd.finish()
        device, total = worker.finish(call).outputs[0]
        assert device == "cpu"
        assert total != 0
    finally:
        worker.close()
        zygote.exited(zygote.count)


# --- before any byte ----------------------------------------------------------------------------------
def known(directory: Path, index: CheckpointIndex, **changes: Any) -> Known | None:
    files = {path.name: path.read_bytes() for path in directory.glob("*.json")}
    first, *others = [(ctypes.c_ubyte * part.nbytes)() for part in index.partitions]
    tensors = CheckpointTensors(index, first, beside=dict(enumerate(others, 1)))
    typed = TypedTensors(tensors, torch.float32)
    return recognise({**weights.read_config(files), **changes}, "auto", typed, typed.shapes, torch.float32)


def test_each_layer_waits_for_the_blocks_of_its_own_tensors(tmp_path: Path) -> None:
    save_model("tied_llama", tmp_path / "hf")
    convert_directory(tmp_path / "hf", tmp_path / "ck")
    index = decode_index((tmp_path / "ck" / INDEX_NAME).read_bytes())
    found = known(tmp_path / "ck", index)
    assert found is not None
    names = [tensor.name for tensor in index.tensors]
    assert set().union(*found.needs.values()) >= set(names)
    split = msgspec.structs.replace(  # each tensor a block of its own
        index,
        blocks=tuple(
            msgspec.structs.replace(index.blocks[0], offset=each.offset, nbytes=each.nbytes) for each in index.tensors
        ),
    )
    placed = blocks_of(split, (0,), found.needs)
    assert {rank for places in placed.values() for rank, _ in places} == {0}
    blocks = {layer: tuple(block for _, block in places) for layer, places in placed.items()}
    embedding = names.index("model.embed_tokens.weight")
    assert blocks[-1] == (embedding,)
    for layer in range(found.decoder.count):
        own = [at for at, name in enumerate(names) if name.startswith(f"model.layers.{layer}.")]
        assert blocks[layer] == tuple(sorted(own))
    assert blocks[found.decoder.count] == tuple(sorted((embedding, names.index("model.norm.weight"))))


def followed(directory: Path, loaderd: ScriptedLoaderd) -> tuple[Layers, CheckpointTensors]:
    """What a worker's decoder waits for, and its tensors."""
    coming = Weights.begin(loaderd.session, "w", GIVE_UP_S, DEVICES)
    index = coming.load.index()
    first, *others = coming.attach().values()
    tensors = CheckpointTensors(index, first.exporter(), beside={1: others[0].exporter()})
    found = known(directory, index)
    assert found is not None
    return Layers(coming, blocks_of(index, (0, 1), found.needs), found.decoder.count), tensors


def test_layers_of_one_partition_do_not_wait_for_the_other_one(parted: Path) -> None:
    """On devices of their own. Which layers are where the index says."""
    loaderd = ScriptedLoaderd(parted, MODEL)
    layers, tensors = followed(parted, loaderd)
    try:
        parts = {layer: {rank for rank, _ in places} for layer, places in layers.blocks.items()}
        own = [layer for layer, ranks in parts.items() if ranks == {0}]
        assert -1 in own, "the embedding is in the first one"
        assert len(own) > 1, "so is a layer"
        assert any(ranks == {1} for ranks in parts.values())
        loaderd.land(rank=0)
        for layer in own:
            layers.wait(layer)
        record = tensors.find("model.layers.0.mlp.up_proj.weight")
        assert record is not None
        data = (parted / partition_name(0)).read_bytes()[record.offset : record.offset + record.nbytes]
        assert tensors.tensor(record).view(torch.uint8).numpy().tobytes() == data
        loaderd.fail(CorruptCheckpoint("chunk 3 has another digest"), rank=1)
        with pytest.raises(CorruptCheckpoint, match="chunk 3"):
            layers.wait(layers.last)
    finally:
        layers.weights.session.close()
        loaderd.close()


def test_what_two_partitions_have_is_waited_for_where_it_is_read(tmp_path: Path) -> None:
    save_model("tied_llama", tmp_path / "hf")
    plan = ConvertOptions(plan=AutoPlan("auto-layers", 2))
    convert_directory(tmp_path / "hf", tmp_path / "ck", options=plan)
    index = decode_index((tmp_path / "ck" / INDEX_NAME).read_bytes())
    found = known(tmp_path / "ck", index)
    assert found is not None
    holders = [tensor.rank for tensor in index.tensors if tensor.name == "model.embed_tokens.weight"]
    assert holders == [0, 1], "the tied head's partition has it once more"
    blocks = blocks_of(index, (1, 0), found.needs)
    assert {rank for rank, _ in blocks[-1]} == {0}
    assert {rank for rank, _ in blocks[found.decoder.count]} == {0, 1}, "its norm is in the other one"


def test_blocks_of_a_checkpoint_that_was_not_converted(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    convert_directory(tmp_path / "hf", tmp_path / "ck")
    index = decode_index((tmp_path / "ck" / INDEX_NAME).read_bytes())
    needs = {0: frozenset({index.tensors[1].name, index.tensors[3].name}), 1: frozenset[str]()}
    blocks = tuple(
        msgspec.structs.replace(index.blocks[0], shared=tuple(t.name for t in index.tensors[start::2]))
        for start in range(2)
    )
    raw = msgspec.structs.replace(index, blocks=blocks, segments=("a file",))
    assert blocks_of(raw, (0,), needs) == {0: ((0, 1),), 1: ()}
    assert len(rank_blocks(raw, 0)) == 2


def test_what_is_missing_or_misshapen_is_named_before_any_byte_is_there(checkpoint: Path) -> None:
    index = decode_index((checkpoint / INDEX_NAME).read_bytes())
    with pytest.raises(InvalidCheckpoint, match=r"lacks the tensor 'model\.layers\.3\."):
        known(checkpoint, index, num_hidden_layers=4)
    with pytest.raises(InvalidCheckpoint, match=r"has shape \(96, 64\), the model wants \(128, 64\)"):
        known(checkpoint, index, intermediate_size=128)
    with pytest.raises(InvalidCheckpoint, match=r"q_proj\.bias"):
        known(checkpoint, index, attention_bias=True)
    assert known(checkpoint, index, quantization_config={}) is None


def test_tensors_are_views_unless_their_dtype_is_another(checkpoint: Path) -> None:
    index = decode_index((checkpoint / INDEX_NAME).read_bytes())
    data = (checkpoint / "partition_0.bin").read_bytes()
    memory = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
    tensors = CheckpointTensors(index, memory)
    start, end = ctypes.addressof(memory), ctypes.addressof(memory) + len(data)
    same, cast = TypedTensors(tensors, torch.float32), TypedTensors(tensors, torch.bfloat16)
    assert set(same) == tensors.names
    assert len(same) == len(tensors.names)
    for name in same:
        assert start <= same[name].data_ptr() < end
        assert torch.equal(cast[name], same[name].to(torch.bfloat16))
        assert cast[name] is cast[name]
    assert "nothing" not in same
    for tensors_ in (same, cast):  # neighbours stay neighbours: so they make one product
        parts = [tensors_[f"model.layers.0.mlp.{which}_proj.weight"] for which in ("gate", "up")]
        joined = side_by_side(parts)
        assert joined is not None
        assert torch.equal(joined, torch.cat(parts))

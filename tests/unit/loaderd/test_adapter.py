"""LoRA adapters that peft itself saved: bit for bit, in layer order, with their base model named."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.formats import is_converted
from sllm_loaderd.verify import validate_checkpoint
from sllm_runtime.protocol.checkpoint import AdapterRecord
from sllm_runtime.protocol.errors import InvalidCheckpoint, SllmError, UnsupportedModel
from tests.fixtures.loaderd import SMALL_CHUNK, bound_tensors, ignore
from tests.fixtures.models import save_model

OPTIONS = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directories `safetensors` and `bin`: one adapter of a llama of 12 layers."""
    directory = tmp_path_factory.mktemp("adapter")
    base = save_model("llama", directory / "base", num_hidden_layers=12)
    base.config._name_or_path = "org/base"
    base.name_or_path = "org/base"
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=["v_proj", "q_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft uses what this transformers is about to drop
        warnings.simplefilter("ignore", FutureWarning)
        model: Any = peft.get_peft_model(base, config)
        model.save_pretrained(directory / "safetensors", save_embedding_layers=False)
    shutil.copytree(directory / "safetensors", directory / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(
        load_file(directory / "safetensors" / "adapter_model.safetensors"), directory / "bin" / "adapter_model.bin"
    )
    yield directory
    shutil.rmtree(directory)


def test_an_adapter_names_its_base_and_comes_in_the_order_of_layers(saved: Path, tmp_path: Path) -> None:
    convert_directory(saved / "safetensors", tmp_path / "checkpoint", options=OPTIONS, verify=ignore)
    checkpoint = validate_checkpoint(tmp_path / "checkpoint")
    index = checkpoint.index
    assert index.adapter == AdapterRecord("org/base", "lora", 4, 10.0, ("q_proj", "v_proj"))
    assert [block.layers for block in index.blocks] == [(number, number) for number in range(12)]
    layers = [int(name.split(".layers.")[1].split(".")[0]) for name in (tensor.name for tensor in index.tensors)]
    assert layers == sorted(layers), "by their own numbers: blocks are numbered as they come"
    assert index.order == "names"
    assert [file.name for file in index.files] == ["adapter_config.json"]
    expected = load_file(saved / "safetensors" / "adapter_model.safetensors")
    found = bound_tensors(checkpoint)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_a_pickled_adapter_gives_the_same_checkpoint(saved: Path, tmp_path: Path) -> None:
    digests = {
        convert_directory(saved / kind, tmp_path / kind, options=OPTIONS, verify=ignore)
        for kind in ("safetensors", "bin")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "IA3"),
        ({"base_model_name_or_path": None}, InvalidCheckpoint, "names no base model"),
        ({"r": 0}, InvalidCheckpoint, "rank 0"),
        ({"r": "4"}, InvalidCheckpoint, "not an adapter's configuration"),
        ({"lora_alpha": None}, InvalidCheckpoint, "not an adapter's configuration"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    change: dict[str, Any], error: type[SllmError], text: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "safetensors", tmp_path / "source")
    path = tmp_path / "source" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=text):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(("half", "shape"), [("lora_B", None), ("lora_A", None), ("lora_B", (3, 5))])
def test_halves_that_do_not_fit_are_refused(
    half: str, shape: tuple[int, ...] | None, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "safetensors", tmp_path / "source")
    path = tmp_path / "source" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if half in name)
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.ones(shape)
    save_file(tensors, path)
    with pytest.raises(InvalidCheckpoint, match=r"incomplete|rank in common"):
        convert_directory(tmp_path / "source", tmp_path / "checkpoint")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_adapter_without_tensors_is_refused(kind: str, saved: Path, tmp_path: Path) -> None:
    """As training scripts that replace ``state_dict`` save it (443 bytes): it would be served as its base."""
    source = tmp_path / "source"
    shutil.copytree(saved / kind, source)
    if kind == "bin":
        torch.save({}, source / "adapter_model.bin")
    else:
        save_file({}, source / "adapter_model.safetensors")
    with pytest.raises(InvalidCheckpoint, match="no tensors"):
        convert_directory(source, tmp_path / "checkpoint")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_of_somebody_else_makes_no_checkpoint_of_it(kind: str, saved: Path) -> None:
    names = {path.name for path in (saved / kind).iterdir()} | {"index.json"}
    assert not is_converted(names)

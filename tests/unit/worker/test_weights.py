"""Modules bound from a checkpoint give the logits that transformers' own ``from_pretrained`` gives."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from sllm_loaderd.convert.directory import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_runtime.protocol.checkpoint import CheckpointIndex, decode_index, partition_name
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel
from sllm_runtime.worker import weights
from sllm_runtime.worker.engine.choice import recognise
from sllm_runtime.worker.engine.ours.model.config import read
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors
from tests.fixtures.models import BUILDERS, save_model
from tests.unit.worker.harness import Worker, bundle_of, manifest


class Checkpoint:
    """A converted directory, read into plain memory."""

    def __init__(self, source: Path, target: Path, plan: AutoPlan | None = None) -> None:
        convert_directory(source, target, options=ConvertOptions(plan=plan))
        self.index: CheckpointIndex = decode_index((target / "index.json").read_bytes())
        data = [(target / partition_name(rank)).read_bytes() for rank in range(len(self.index.partitions))]
        self.memory, *others = [(ctypes.c_ubyte * len(part)).from_buffer_copy(part) for part in data]
        self.others = dict(enumerate(others, 1))
        self.files = {file.name: (target / file.name).read_bytes() for file in self.index.files}
        self.config = weights.read_config(self.files)

    def tensors(self) -> CheckpointTensors:
        return CheckpointTensors(self.index, self.memory, beside=self.others)

    def module(self, dtype: str = "auto", loader: str = "auto") -> Any:
        tensors = self.tensors()
        wanted = weights.compute_dtype(dtype, self.config, tensors)
        module = weights.build_known(self.config, loader, wanted)
        weights.bind(module, tensors, wanted)
        return module


def logits(module: Any) -> torch.Tensor:
    ids = torch.arange(3, 27).reshape(2, 12)
    with torch.inference_mode():
        output: torch.Tensor = module(input_ids=ids).logits
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_logits_equal_from_pretrained(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(name, tmp_path / "hf", dtype=dtype)
    module = Checkpoint(tmp_path / "hf", tmp_path / "ck").module()
    expected = getattr(transformers, type(module).__name__).from_pretrained(tmp_path / "hf").eval()
    assert {t.dtype for t in module.parameters()} == {t.dtype for t in expected.parameters()}
    assert torch.equal(logits(module), logits(expected))
    mine, theirs = dict(module.named_buffers()), dict(expected.named_buffers())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_nothing_is_copied_and_ties_stay_ties(tmp_path: Path) -> None:
    save_model("tied_llama", tmp_path / "hf")
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck")
    module = checkpoint.module()
    start = ctypes.addressof(checkpoint.memory)
    assert all(start <= tensor.data_ptr() < start + len(checkpoint.memory) for tensor in module.parameters())
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert not any(tensor.requires_grad for tensor in module.parameters())


@pytest.mark.parametrize("name", ["llama", "tied_llama"])
def test_partitions_that_lie_apart_are_one_model(name: str, tmp_path: Path) -> None:
    """As on devices of their own; a tied head's partition has the embedding once more."""
    save_model(name, tmp_path / "hf")
    expected: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    expected.eval()
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck", AutoPlan("auto-layers", 3))
    assert len(checkpoint.others) == 2
    module = checkpoint.module()
    assert torch.equal(logits(module), logits(expected))
    typed = TypedTensors(checkpoint.tensors(), torch.bfloat16)
    assert all(torch.equal(typed[key], value.bfloat16()) for key, value in expected.state_dict().items())


def test_tensors_that_are_shared_out_are_refused_by_name(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck", AutoPlan("auto", 2))
    with pytest.raises(UnsupportedModel, match=r"weight' is shared out over 2 partitions .layout hf-tp2.*'tensor': 2}"):
        checkpoint.tensors()


def test_another_dtype_is_cast(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    module = Checkpoint(tmp_path / "hf", tmp_path / "ck").module(dtype="bfloat16")
    expected: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    expected.eval()
    assert torch.equal(logits(module), logits(expected))


def test_a_causal_lm_is_made_where_it_is_asked_for(tmp_path: Path) -> None:
    save_model("bert", tmp_path / "hf", is_decoder=True)
    module = Checkpoint(tmp_path / "hf", tmp_path / "ck").module(loader="causal_lm")
    assert type(module).__name__ == "BertLMHeadModel"


def _config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["NewForCausalLM"], "model_type": "brand_new"}, "NewForCausalLM.*unknown here"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "x.Y"}}, "LlamaForCausalLM.*never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised .gptq"),
        ({"architectures": ["NewForCausalLM"]}, "NewForCausalLM.*not one of transformers"),
        ({"num_attention_heads": "many"}, "LlamaForCausalLM|config"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    save_model("llama", tmp_path / "hf")
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck")
    checkpoint.config.update(changes)
    with pytest.raises(UnsupportedModel, match=words):
        checkpoint.module()


def test_a_config_that_says_null_of_its_quantisation_is_of_none(tmp_path: Path) -> None:
    """As transformers reads it, and configurations that were written by hand or by other tools have it."""
    save_model("llama", tmp_path / "hf")
    _config(tmp_path / "hf", quantization_config=None)
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck")
    expected: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits(checkpoint.module()), logits(expected.eval()))
    assert read(checkpoint.config, "auto") is not None, "our engine runs it as well"


@pytest.mark.parametrize(
    ("matrix", "scale"), [(("qweight", torch.int32), "scales"), (("weight", torch.float8_e4m3fn), "weight_scale")]
)
def test_quantised_weights_are_told_as_that_where_the_config_is_silent(
    tmp_path: Path, matrix: tuple[str, torch.dtype], scale: str
) -> None:
    """As AutoGPTQ has written them: its own file says so, and none of a model's."""
    save_model("llama", tmp_path / "hf")
    named = load_file(tmp_path / "hf" / "model.safetensors")
    for name in [name for name in named if name.endswith("proj.weight")]:
        stem, found = name.removesuffix("weight"), named.pop(name)
        named |= {stem + matrix[0]: found.to(matrix[1]), stem + scale: torch.ones(1)}
    save_file(named, tmp_path / "hf" / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck")
    typed = TypedTensors(checkpoint.tensors(), torch.float32)
    with pytest.raises(InvalidCheckpoint, match=rf"{scale}', so it is quantised.*deploy the weights it was made from"):
        recognise(checkpoint.config, "auto", typed, typed.shapes, torch.float32)


def test_a_module_of_ones_own_is_told_what_to_say(tmp_path: Path) -> None:
    words = r"no config.json that names an architecture.*model_loader='build'.*build\(\)"
    with pytest.raises(UnsupportedModel, match=words) as raised:
        weights.build_known({}, "auto", torch.float32)
    assert "None" not in raised.value.message


def test_what_is_no_causal_lm_is_not_made_one(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck")
    checkpoint.config.update(architectures=["T5ForConditionalGeneration"], model_type="t5")
    with pytest.raises(UnsupportedModel, match="t5 is no causal language model"):
        checkpoint.module(loader="causal_lm")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    checkpoint = Checkpoint(tmp_path / "hf", tmp_path / "ck")
    checkpoint.config["num_hidden_layers"] = 4
    with pytest.raises(InvalidCheckpoint, match=r"lacks 9 tensors of LlamaForCausalLM: model\.layers\.3\."):
        checkpoint.module()
    checkpoint.config.update(num_hidden_layers=3, intermediate_size=128)
    with pytest.raises(InvalidCheckpoint, match="has shape"):
        checkpoint.module()


BUILD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.first = nn.Linear(8, size)
        self.norm = nn.BatchNorm1d(size)
        self.last = nn.Linear(size, 3)
        self.register_buffer("scale", torch.arange(size, dtype=torch.float32) / 10, persistent=False)
        self.shift = torch.ones(3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x)) * self.scale)) + self.shift

def build(config):
    return Net(config["size"])

def fn(model, rows: list[list[float]]):
    with torch.inference_mode():
        return model.module(torch.tensor(rows))
"""


def custom(directory: Path) -> nn.Module:
    """A module of no library as safetensors + config.json; gives the original."""
    from safetensors.torch import save_file

    namespace: dict[str, Any] = {"__name__": "custom"}
    exec(BUILD, namespace)
    torch.manual_seed(1)
    net: nn.Module = namespace["build"]({"size": 16}).eval()
    net.get_buffer("norm.running_mean").normal_()
    directory.mkdir()
    save_file(net.state_dict(), directory / "model.safetensors")
    (directory / "config.json").write_text('{"size": 16}')
    return net


def test_a_custom_build_in_a_worker(worker: Worker, loader: Any, tmp_path: Path) -> None:
    net = custom(tmp_path / "hf")
    made = manifest(model="m", model_loader="build")
    bundle = bundle_of({"user.py": BUILD})
    worker.start(made, bundle, workdir=tmp_path / "w", session=loader.grant(tmp_path / "hf"))
    rows = torch.randn(4, 8)
    with torch.inference_mode():
        expected = net(rows)
    answer = worker.run({"rows": rows.tolist()})
    assert torch.equal(torch.tensor(answer.outputs[0]), expected)


ENCODER = """
import torch
def fn(model, ids: list[int]):
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([ids])).logits[0, -1]
"""


@pytest.mark.slow  # its logits are compared above; integration/test_models.py has one on a platform
def test_an_encoder_in_a_worker(worker: Worker, loader: Any, models: Callable[[str], Path], tmp_path: Path) -> None:
    worker.start(
        manifest(model="m"), bundle_of({"user.py": ENCODER}), workdir=tmp_path, session=loader.grant(models("bert"))
    )
    expected: Any = transformers.BertForMaskedLM.from_pretrained(models("bert"))
    expected.eval()
    with torch.inference_mode():
        row = expected(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    answer = worker.run({"ids": [5, 6, 7]})
    assert torch.equal(torch.tensor(answer.outputs[0]), row)


def test_a_model_that_cannot_run_fails_the_start(
    worker: Worker, loader: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    save_model("llama", tmp_path / "hf")
    _config(tmp_path / "hf", architectures=["NewForCausalLM"], model_type="brand_new")
    made = manifest(kind="generator", model="m", engine=True)
    source = bundle_of({"user.py": "def fn(model):\n    yield from model.generate('x')\n"})
    error = worker.fail(made, source, workdir=tmp_path / "w", session=loader.grant(tmp_path / "hf"))
    assert (error.code, error.stage, error.status) == ("unsupported_model", "weights", 422)
    assert "NewForCausalLM" in error.message


def own_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*module.named_parameters(), *module.named_buffers())}


def _esm() -> Any:
    sizes: Any = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    own: Any = {"intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 1, "mask_token_id": 2}
    return transformers.EsmForMaskedLM(transformers.EsmConfig(**sizes, **own, position_embedding_type="rotary"))


def _olmo_hybrid() -> Any:
    sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    own: Any = {"num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    more: Any = {"linear_num_value_heads": 2, "linear_value_head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
    kinds = ["linear_attention", "full_attention"]
    return transformers.OlmoHybridForCausalLM(
        transformers.OlmoHybridConfig(**sizes, **own, **more, pad_token_id=0, layer_types=kinds)
    )


@pytest.mark.parametrize("make", [_esm, _olmo_hybrid])
def test_what_a_class_makes_in_a_dtype_of_its_own_stays_in_it(make: Callable[[], Any], tmp_path: Path) -> None:
    """Rotary frequencies, decays of a state: rounded to bfloat16 they are other ones."""
    torch.manual_seed(0)
    made = make()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    made.save_pretrained(tmp_path / "hf")
    module = Checkpoint(tmp_path / "hf", tmp_path / "ck").module(dtype="bfloat16")
    expected = type(made).from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).eval()
    assert own_dtypes(module) == own_dtypes(expected)
    assert torch.equal(logits(module), logits(expected))


class Mixed(nn.Module):
    """Weights in one dtype, a router and its scale in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(64, dtype=torch.float32), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_module_of_several_dtypes_has_them_and_every_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    state = {"weight": torch.randn(64, 64).to(dtype), "scale": torch.randn(64) / 1000}
    save_file(state, tmp_path / "hf" / "model.safetensors")
    tensors = Checkpoint(tmp_path / "hf", tmp_path / "ck").tensors()
    wanted = weights.compute_dtype("auto", {}, tensors)
    module = weights.build_custom(lambda: Mixed(dtype), {}, wanted)
    weights.bind(module, tensors, wanted)
    assert {name: t.dtype for name, t in module.state_dict().items()} == {n: t.dtype for n, t in state.items()}
    assert torch.equal(module.state_dict()["scale"], state["scale"])


class Rotary(nn.Module):
    """Frequencies that are no part of its state: computed, never loaded."""

    freqs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("freqs", 1.0 / (1e4 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)), persistent=False)


def test_a_buffer_that_is_no_part_of_a_modules_state_is_not_taken_from_files(tmp_path: Path) -> None:
    """As old files have it: masks and rounded rotary frequencies. load_state_dict and transformers leave them out."""
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    reference = Rotary().bfloat16()
    save_file({**reference.state_dict(), "freqs": reference.freqs}, tmp_path / "hf" / "model.safetensors")
    tensors = Checkpoint(tmp_path / "hf", tmp_path / "ck").tensors()
    module: Any = weights.build_custom(Rotary, {}, torch.bfloat16)
    computed = module.freqs.clone()
    weights.bind(module, tensors, torch.bfloat16)
    assert module.freqs.dtype is computed.dtype
    assert torch.equal(module.freqs, computed)
    assert torch.equal(module.linear.weight, reference.linear.weight)

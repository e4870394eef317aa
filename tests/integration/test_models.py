"""Models of every supported architecture and from every source, deployed on the real platform."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_runtime.protocol.errors import ModelNotFound, SllmError, UnsupportedModel
from sllm_runtime.protocol.http import API
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here, sllm_json
from tests.fixtures.deployed import deploy, wait
from tests.fixtures.models import save_byte_tokenizer, save_model
from tests.fixtures.sources import TOKEN, hub, object_store, s3_settings
from tests.fixtures.waiting import until

EMBED = Path(__file__).parents[2] / "functions" / "embed"
IDS = list(range(5, 17))
TOKENS = 24


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``tiny``, a Llama with its tokenizer, as a hub or an object store would have it."""
    directory = tmp_path_factory.mktemp("shared")
    save_model("llama", directory / "tiny")
    save_byte_tokenizer(directory / "tiny")
    return directory


@pytest.fixture(scope="module")
def cluster(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A platform that finds its hub and its object store on loopback."""
    directory = tmp_path_factory.mktemp("models")
    store = tmp_path_factory.mktemp("store") / "buckets"
    shutil.copytree(shared / "tiny", store / "bucket" / "tiny")
    save_model("llama", directory / "other", seed=9)
    convert_directory(directory / "other", store / "bucket" / "converted")
    with hub(shared / "tiny", private=True) as server, object_store(store) as endpoint:
        env = {
            **s3_settings(endpoint), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "SLLM_PRELOAD": "all",
            "SLLM_GPUS": "Fake:64MiB,Fake:64MiB", "SLLM_FAKE_DEVICES": "2x64MiB@8GB/s",
        }  # fmt: skip
        with Cluster(directory, env=env) as started:
            yield started


def by_transformers(module: Any, directory: Path) -> str:
    """What transformers' own greedy ``generate`` says after ``IDS``."""
    configuration: Any = transformers.GenerationConfig
    settings = configuration(
        max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, repetition_penalty=9.0, pad_token_id=0,
        eos_token_id=2,
    )  # fmt: skip
    prompt = torch.tensor([IDS])
    ids = module.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)[0].tolist()
    assert len(ids) == len(IDS) + TOKENS
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (IDS, ids))
    return str(whole).removeprefix(str(before))


def by_platform(cluster: Cluster, name: str, model: str) -> str:
    """What a function on that model says."""
    deploy(cluster, "says", name=name, model=model, keep_alive=1)
    answer = cluster.http.post(f"/fn/{name}", json={"ids": IDS, "tokens": TOKENS})
    assert answer.status_code == 200, answer.text
    return "".join(answer.json())


# Each architecture's logits and text are compared in the worker's own tests; here, and with `slow` all: ties and fused
# rows, weights stored the other way round.
FAMILIES = ["gpt2", "tied_llama"]
OTHERS = ["mixtral", "llama", "qwen3", "mistral", "gemma", "opt", "phi"]


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_text_is_that_of_transformers(cluster: Cluster, tmp_path: Path, name: str) -> None:
    module = save_model(name, tmp_path / "model", seed=3)
    save_byte_tokenizer(tmp_path / "model")
    expected = by_transformers(module, tmp_path / "model")
    assert len(set(expected)) > 5
    assert by_platform(cluster, name.replace("_", "-"), str(tmp_path / "model")) == expected


def test_an_encoder_gives_the_vectors_of_transformers(cluster: Cluster) -> None:
    here(cluster.env, "fn", "deploy", str(EMBED / "function.py"))
    texts = ["def connect(host, port): open a socket", "import os"]
    answer = cluster.http.post("/fn/embed", json={"texts": texts}).json()
    module: Any = transformers.AutoModel.from_pretrained(EMBED / "model").eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(EMBED / "model")
    for text, vector in zip(texts, answer, strict=True):
        with torch.inference_mode():
            hidden = module(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].float()
        expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        # bf16 weights: padding in the batch changes the order of sums.
        assert torch.allclose(torch.tensor(vector), expected, atol=0.02)


def test_a_model_of_an_object_store_is_pulled_to_the_disk_before_anything_starts(cluster: Cluster) -> None:
    digest = sllm_json(cluster.env, "model", "register", "s3://bucket/converted")["digest"]

    def tiers() -> list[str]:
        found: list[str] = cluster.http.get(f"{API}/nodes/n1").json()["tiers"].get(digest, [])
        return found

    wait(lambda: tiers() == ["source"], "the node knows it and has nothing of it")
    pulled = sllm_json(cluster.env, "model", "pull", digest[:20], "--to", "n1")
    assert (pulled["digest"], pulled["nodes"]) == (digest, ["n1"])
    wait(lambda: tiers() == ["ssd"], "it lies on the disk, and not in memory")
    name = digest.removeprefix("sha256:")
    (copy,) = (cluster.data / "nodes" / "n1" / "loaderd" / "ssd").glob(f"{name}.0.bin")
    assert copy.stat().st_size == pulled["bytes"]
    (placed,) = [each for each in sllm_json(cluster.env, "model", "place")["models"] if each["model"] == digest]
    assert (placed["there"], placed["wanted"], placed["popularity"]) == (["n1"], [], 0.0), "nothing was started on it"
    assert "node n9 is not up" in here(cluster.env, "model", "pull", digest, "--to", "n9", expect=3).stderr


def test_a_hub_an_object_store_and_a_directory_give_one_model(cluster: Cluster, shared: Path) -> None:
    local = by_platform(cluster, "local", str(shared / "tiny"))
    assert by_platform(cluster, "hub", "hf://org/tiny@main") == local
    assert by_platform(cluster, "store", "s3://bucket/tiny") == local
    described = [sllm_json(cluster.env, "fn", "describe", name) for name in ("local", "hub", "store")]
    (digest,) = {function["versions"][0]["model"] for function in described}
    (model,) = [m for m in sllm_json(cluster.env, "model", "list")["models"] if m["digest"] == digest]
    assert model["architecture"] == "LlamaForCausalLM"
    assert {"local", "hub", "store"} <= {user.partition(":")[0] for user in model["used_by"]}
    (node,) = [node["node"] for node in sllm_json(cluster.env, "node", "list")["nodes"]]
    found = sllm_json(cluster.env, "node", "describe", node)
    assert "ssd" in found["tiers"][digest]
    assert found["storage"]["integrity"]
    assert "disk" in {path["path"] for path in found["storage"]["paths"]}
    assert f"{node}: " in here(cluster.env, "model", "list", "--tiers").stdout
    assert model["nodes"] == ["n1"]


def test_each_partition_goes_to_its_own_device(cluster: Cluster, shared: Path, tmp_path: Path) -> None:
    whole = by_platform(cluster, "whole", str(shared / "tiny"))
    parted = tmp_path / "parted"
    convert_directory(shared / "tiny", parted, options=ConvertOptions(plan=AutoPlan("auto-layers", 2)))
    deploy(cluster, "says", name="parted", model=str(parted), gpu="Fake:2")
    answer = cluster.http.post("/fn/parted", json={"ids": IDS, "tokens": TOKENS})
    assert "".join(answer.json()) == whole
    asyncio.run(until(lambda: each_device_holds_its_own(cluster, parted)))
    here(cluster.env, "fn", "delete", "parted", "--force")


def each_device_holds_its_own(cluster: Cluster, model: Path) -> bool:
    """As the node last reported it: a little after the call."""
    devices = sllm_json(cluster.env, "node", "describe", "n1")["storage"]["devices"]
    assert [device["device"] for device in devices] == ["fake:0", "fake:1"]
    sizes = [file.stat().st_size for file in sorted(model.glob("partition_*.bin"))]
    return all(device["used"] >= size for device, size in zip(devices, sizes, strict=True))


def test_each_stage_has_its_own_device(cluster: Cluster, shared: Path, tmp_path: Path) -> None:
    """Two processes, each with the partition of its layers."""
    whole = by_platform(cluster, "whole", str(shared / "tiny"))
    options: dict[str, Any] = {"gpu": "Fake:2", "parallelism": {"pipeline": 2}, "memory": "256MiB", "cpu": 0.5}
    with pytest.raises(SllmError, match="convert it with --plan auto-stages:2"):
        deploy(cluster, "says", name="staged", model=str(shared / "tiny"), **options)
    parted = tmp_path / "parted"
    convert_directory(shared / "tiny", parted, options=ConvertOptions(plan=AutoPlan("auto-stages", 2)))
    deploy(cluster, "says", name="staged", model=str(parted), **options)
    answer = cluster.http.post("/fn/staged", json={"ids": IDS, "tokens": TOKENS})
    assert "".join(answer.json()) == whole
    asyncio.run(until(lambda: each_device_holds_its_own(cluster, parted)))
    here(cluster.env, "fn", "delete", "staged", "--force")


def test_an_instance_states_its_engine_and_its_numerics_class(cluster: Cluster, shared: Path) -> None:
    deploy(cluster, "says", name="stated", model=str(shared / "tiny"), min_instances=1)
    (instance,) = sllm_json(cluster.env, "fn", "describe", "stated")["instances"]
    assert instance["capabilities"][0].startswith("engine:")
    assert len(instance["fingerprint"]) >= 12
    assert instance["fingerprint"][:12] in here(cluster.env, "fn", "describe", "stated").stdout
    here(cluster.env, "fn", "delete", "stated", "--force")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("hf://org/none", "hf://org/none@main is not there"),
        ("s3://bucket/none", "s3://bucket/none/ holds no model files"),
    ],
)
def test_a_model_that_is_not_there_is_refused_and_nothing_is_left(cluster: Cluster, uri: str, says: str) -> None:
    with pytest.raises(ModelNotFound, match=says):
        deploy(cluster, "says", name="absent", model=uri)
    assert cluster.http.get(f"{API}/functions/absent").status_code == 404


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["AlienForCausalLM"], "model_type": "alien"}, "AlienForCausalLM"),
        # Of these, unit/worker/test_weights.py says the same without a platform.
        pytest.param(
            {"architectures": ["X"], "model_type": "x", "auto_map": {"AutoModel": "modeling.X"}},
            "'X'.*never run",
            marks=pytest.mark.slow,
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "LlamaForCausalLM is quantised .gptq."),
        pytest.param(
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "t5 is no causal language model",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    cluster: Cluster, shared: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in (shared / "tiny").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=says):
        deploy(cluster, "says", name="refused", model=str(directory))
    assert cluster.http.get(f"{API}/functions/refused").status_code == 404

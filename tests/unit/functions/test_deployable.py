"""Functions and templates as they are deployed: what goes into the bundle, what a call may say, what comes out."""

import importlib.util
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForSequenceClassification

from sllm import ModelFunction, bundle
from sllm_runtime.protocol.errors import InvalidManifest

ROOT = Path(__file__).parents[3]
FUNCTIONS = sorted(path.parent for path in ROOT.glob("functions/*/function.py"))
TEMPLATES = sorted(path.parent for path in ROOT.glob("templates/*/function.py"))


def load(directory: Path) -> ModelFunction[Any, Any, Any]:
    """The function that `directory/function.py` describes, imported as a file, like the command does."""
    name = f"deployable_{directory.name}_{abs(hash(directory))}"
    spec = importlib.util.spec_from_file_location(name, directory / "function.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found = [value for value in vars(module).values() if isinstance(value, ModelFunction)]
    assert len(found) == 1, f"{directory} describes {len(found)} functions"
    return found[0]


def test_all_are_here() -> None:
    assert [path.name for path in FUNCTIONS] == ["coder", "counter", "echo", "embed"]
    assert [path.name for path in TEMPLATES] == ["basic", "class", "llm"]


@pytest.mark.parametrize("directory", FUNCTIONS + TEMPLATES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_has_a_readme_that_says_how_to_deploy_it(directory: Path) -> None:
    assert "sllm fn deploy" in (directory / "README.md").read_text()


@pytest.mark.parametrize("directory", FUNCTIONS, ids=lambda path: path.name)
def test_bundle_is_the_code_alone(directory: Path) -> None:
    built = bundle.build(load(directory))
    assert set(built.files) - {"README.md"} == {"function.py"}
    assert built.manifest.name == directory.name
    assert built.manifest.description
    assert built.manifest.handler.entry.startswith("function:")
    assert built.manifest.handler.python is None


@pytest.mark.parametrize(
    ("name", "kind", "streams", "engine", "arguments"),
    [
        ("coder", "generator", True, True, {"prompt", "max_tokens", "temperature", "seed"}),
        ("counter", "async_generator", True, False, {"to", "interval"}),
        ("echo", "function", False, False, {"text", "times"}),
        ("embed", "class", False, False, {"texts"}),
    ],
)
def test_manifest_says_what_a_call_is(name: str, kind: str, streams: bool, engine: bool, arguments: set[str]) -> None:
    manifest = bundle.build(load(ROOT / "functions" / name)).manifest
    assert (manifest.handler.kind, manifest.handler.streams, manifest.engine) == (kind, streams, engine)
    schema = manifest.handler.input_schema
    assert set(schema["properties"]) == arguments
    assert schema["additionalProperties"] is False


def test_engine_backed_function_batches() -> None:
    assert bundle.build(load(ROOT / "functions" / "coder")).manifest.concurrency == 8


def test_coder_asks_the_model_for_what_the_call_says() -> None:
    asked: list[dict[str, Any]] = []

    def generate(prompt: str, **sampling: Any) -> Iterator[str]:
        asked.append({"prompt": prompt, **sampling})
        yield from ("main", "():")

    pieces = load(ROOT / "functions" / "coder")(SimpleNamespace(generate=generate), prompt="def ", max_tokens=2)
    assert list(pieces) == ["main", "():"]
    assert asked == [{"prompt": "def ", "max_tokens": 2, "temperature": 0.0, "seed": None}]


def test_echo_answers_text_and_length() -> None:
    assert load(ROOT / "functions" / "echo")("ab", times=2) == {"text": "ab ab", "length": 5}


async def test_counter_yields_each_number() -> None:
    counter = load(ROOT / "functions" / "counter")
    assert [number async for number in counter(to=4, interval=0.001)] == [1, 2, 3, 4]
    assert [number async for number in counter(to=0)] == []


@pytest.fixture(scope="module")
def embed() -> Any:
    directory = ROOT / "functions" / "embed"
    module, info = AutoModel.from_pretrained(directory / "model", output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    instance = load(directory).target()
    instance.setup(SimpleNamespace(module=module, tokenizer=AutoTokenizer.from_pretrained(directory / "model")))
    return instance


def test_embed_gives_unit_vectors(embed: Any) -> None:
    vectors = embed(texts=["def f(): pass", "", "x" * 5000])
    assert [len(vector) for vector in vectors] == [128] * 3
    assert all(math.isclose(sum(value**2 for value in vector), 1, abs_tol=1e-4) for vector in vectors[::2])


def test_embed_does_not_depend_on_its_company(embed: Any) -> None:
    alone = torch.tensor(embed(texts=["import os"]))
    padded = torch.tensor(embed(texts=["import os", "class Queue:\n    pass\n" * 20])[:1])
    assert torch.allclose(alone, padded, atol=0.02)


def test_embed_finds_what_belongs_together(embed: Any) -> None:
    texts = [
        "def connect(self, host, port): open a socket to the server",
        "self.sock = socket.create_connection((self.host, self.port), self.timeout)",
        "tree = ElementTree.parse(source); root = tree.getroot()",
    ]
    ask, near, far = torch.tensor(embed(texts=texts))
    assert float(ask @ near) > float(ask @ far)


def copied(template: str, to: Path) -> Path:
    """As `sllm fn init` does."""
    return shutil.copytree(ROOT / "templates" / template, to / template)


def test_llm_template_deploys_once_it_has_a_model(tmp_path: Path) -> None:
    directory = copied("llm", tmp_path)
    shutil.copytree(ROOT / "functions" / "coder" / "model", directory / "model")
    built = bundle.build(load(directory))
    assert not [name for name in built.files if name.startswith("model/")]
    assert (built.manifest.model, built.manifest.engine) == (str(directory / "model"), True)


def test_class_template_classifies_with_the_model_beside_it(tmp_path: Path) -> None:
    directory = copied("class", tmp_path)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = BertConfig(**sizes, vocab_size=4096, id2label={0: "bad", 1: "good"})
    BertForSequenceClassification(config).save_pretrained(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "functions" / "embed" / "model")
    tokenizer.save_pretrained(directory / "model")
    built = bundle.build(load(directory))
    assert not [name for name in built.files if name.startswith("model/")]
    assert (built.manifest.handler.kind, built.manifest.engine) == ("class", False)
    instance = load(directory).target()
    module = BertForSequenceClassification.from_pretrained(directory / "model")
    instance.setup(SimpleNamespace(module=module, tokenizer=tokenizer))
    answer = instance(text="what a fine day")
    assert answer["label"] in {"bad", "good"}
    assert 0.5 <= answer["probability"] <= 1


def test_template_without_its_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    directory = copied("llm", tmp_path)
    with pytest.raises(InvalidManifest, match=r"model directory .*llm/model is not there; give a directory"):
        bundle.build(load(directory))


def test_basic_template_answers() -> None:
    assert load(ROOT / "templates" / "basic")(name="you") == "Hello, you!"

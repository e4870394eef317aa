"""The decorator: it describes, keeps the types, and refuses what is none."""

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sllm import Model, ModelFunction, model_function
from sllm.described import generates
from sllm_runtime.protocol.errors import InvalidManifest
from sllm_runtime.protocol.manifest import SCHEMA_VERSION, TARGET_ATTRIBUTE

TYPED = """
from collections.abc import Iterator
from sllm import Model, model_function

@model_function(memory="1GiB")
def chat(model: Model, prompt: str, n: int = 3) -> Iterator[str]:
    yield prompt

@model_function
def plain(a: int, *, b: str = "x") -> dict[str, int]:
    return {}

@model_function(gpu=["L4", "H100:2"])
class Stateful:
    def setup(self) -> None: ...
    def __call__(self, text: str) -> str: return text

reveal_type(plain(1, b="2"))
reveal_type(Stateful())
chat.remote("x", n=2)
plain.remote(a=1)
"""
WRONG = """
plain("a")
chat.remote(3)
chat.stream(prompt="x", m=2)
model_function(memroy="1GiB")
"""


@model_function
def bare(text: str, times: int = 1) -> str:
    """Says it again."""
    return text * times


@model_function(name="other-name", memory="1GiB", keep_alive="5m", labels={"zone": "a"}, slo={"ttft": "100ms"})
def described(model: Model, prompt: str) -> Iterator[str]:
    yield from model.generate(prompt)


@model_function(cpu=2)
class Stateful:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, step: int = 1) -> int:
        self.count += step
        return self.count


def undecorated(text: str) -> str:
    return text


def test_it_is_still_the_function() -> None:
    assert bare("a", times=2) == "aa"
    assert (bare.__name__, bare.__doc__) == ("bare", "Says it again.")
    assert str(inspect.signature(bare)) == "(text: str, times: int = 1) -> str"
    assert getattr(bare, TARGET_ATTRIBUTE)("a") == "a"
    assert asyncio.run(Stateful()(step=2)) == 2
    assert "bare" in repr(bare)


def test_the_manifest_says_it_all() -> None:
    manifest = described.manifest("module:described")
    assert manifest.schema_version == SCHEMA_VERSION
    assert (manifest.name, manifest.memory, manifest.keep_alive) == ("other-name", 2**30, 300.0)
    assert (manifest.slo.ttft, manifest.labels) == (0.1, {"zone": "a"})
    assert (manifest.handler.entry, manifest.handler.kind) == ("module:described", "generator")
    assert list(manifest.handler.input_schema["properties"]) == ["prompt"]
    assert (bare.manifest("m:bare").name, bare.manifest("m:bare").description) == ("bare", "Says it again.")
    stateful: Any = Stateful  # mypy takes no notice of what decorates a class
    assert stateful.manifest("m:Stateful").name == "stateful"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "lots"}, "memory: 'lots' is no size"),
        ({"memory": "9" * 400}, "memory: '9+ is too large a size"),
        ({"memory": 2**64}, "memory: .*less than or equal to"),
        ({"gpu_memory": 2**64}, "gpu_memory: .*less than or equal to"),
        ({"gpu": "H100:0"}, "gpu: 'H100:0' is no GPU"),
        ({"gpu": 1}, "gpu: this is neither a GPU nor a list of them.*given: 1"),
        ({"gpu": True}, "gpu: this is neither"),
        ({"gpu": [1]}, "gpu: this is neither"),
        ({"gpu": [["L4"]]}, "gpu: this is neither"),
        ({"gpu": b"L4"}, "gpu: this is neither"),
        ({"adapters": ["a"]}, r"adapters: .*dictionary \(given: \['a'\]\)"),
        ({"description": 3}, "description: .*string"),
        ({"keep_alive": "soon"}, "keep_alive: 'soon' is no duration"),
        ({"keep_alive": float("inf")}, "keep_alive: inf is no keep-alive; write seconds, 0 to 3153600000"),
        ({"keep_alive": 10**400}, "keep_alive: 10+ is no keep-alive"),
        ({"queue_timeout": float("inf")}, "queue_timeout: .*finite number"),
        ({"idle_timeout": "99999999h"}, "idle_timeout: .*less than or equal to 3153600000"),
        ({"queue_timeout": True}, "queue_timeout: this is no switch: .*given: True"),
        ({"gpu_memory": True}, "gpu_memory: this is no switch"),
        ({"slo": {"ttft": True}}, r"slo\.ttft: this is no switch"),
        ({"network": "cluster"}, "network: a network that processes share is the platform's to give"),
        ({"name": "Not A Name"}, "name: 'Not A Name' is no name"),
        ({"min_instances": 3}, "min_instances 3 is above max_instances 1"),
        ({"engine": True}, "engine=True needs a model"),
        ({"env": {"A=B": "c"}}, "env: 'A=B' is no environment variable's name"),
        ({"env": {"A": "b\0c"}}, "env: 'A' holds a NUL character"),
        ({"requirements": "numpy"}, r"requirements: it is a list .* requirements=\['one', .*given: 'numpy'"),
        ({"secrets": ("key")}, r"secrets: it is a list of texts; write secrets=\["),
        ({"cpu": -1}, "cpu: .*greater than 0"),
        ({"nme": "x"}, "there is no option 'nme'"),
        ({"model": "nowhere"}, "model directory .*/nowhere is not there"),
        ({"model": Path(__file__).name}, r"model directory .*\.py is a file"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    decorator: Any = model_function
    with pytest.raises(InvalidManifest, match=said):
        decorator(**options)(undecorated).manifest("m:f")


def test_a_default_that_cannot_travel_is_named() -> None:
    decorator: Any = model_function

    def large(seed: int = 2**64) -> int:
        return seed

    with pytest.raises(InvalidManifest, match=r"large: handler\.input_schema: it has the number 18446744073709551616"):
        decorator()(large).manifest("m:large")


def test_what_is_no_function_is_refused_where_it_stands() -> None:
    decorator: Any = model_function
    targets: list[Any] = [3, [], Model]
    for target in targets:
        with pytest.raises(InvalidManifest):
            decorator()(target)


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["LlamaForCausalLM"], True),
        (["GPT2LMHeadModel"], True),
        (["BertModel"], False),
        ([], False),
        (None, False),
    ],
)
def test_the_engine_is_for_models_that_generate(tmp_path: Path, architectures: Any, expected: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    assert generates(str(tmp_path)) is expected
    decorator: Any = model_function
    function: ModelFunction[Any, Any, Any] = decorator(model=str(tmp_path))(undecorated)
    manifest = function.manifest("m:f")
    assert (manifest.engine, manifest.concurrency) == ((True, 8) if expected else (False, 1))
    build = decorator(model=str(tmp_path), model_loader="build")(undecorated)
    assert build.manifest("m:f").engine is False


def test_where_a_model_cannot_be_looked_at() -> None:
    assert generates("hf://org/name")
    assert generates("sha256:" + "0" * 64)


def mypy(tmp_path: Path, text: str) -> str:
    file = tmp_path / "typed.py"
    file.write_text(text)
    root = Path(__file__).parents[3]
    argv = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(root / "pyproject.toml"), str(file)]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    return done.stdout


def test_types_are_kept(tmp_path: Path) -> None:
    """What mypy sees: the function's own signature here, the same without the model for calls."""
    found = mypy(tmp_path, TYPED + WRONG)
    assert 'Revealed type is "dict[str, int]"' in found or 'Revealed type is "builtins.dict' in found
    assert 'Revealed type is "typed.Stateful"' in found
    wrong = [int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line]
    first = TYPED.count("\n") + 2
    assert wrong == [first, first + 1, first + 2, first + 3], found


POOLED = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from sllm import model_function

@model_function
def double(n: int) -> int:
    return 2 * n

@model_function
class Halves:
    def __call__(self, n: int) -> int:
        return n // 2

def plain(n: int) -> int:
    return n + 1

under_another_name = model_function(plain)

def made(target, n):
    return target()(n)

if __name__ == "__main__":
    for how in multiprocessing.get_all_start_methods():
        with ProcessPoolExecutor(1, multiprocessing.get_context(how)) as pool:
            said = [pool.submit(double, 4), pool.submit(made, Halves, 4), pool.submit(under_another_name, 4)]
            assert [each.result() for each in said] == [8, 2, 5], how
"""


def test_other_processes_of_a_program_run_it_as_they_run_any_function(tmp_path: Path) -> None:
    """The name that pickle finds it by is that of what stands over it."""
    (tmp_path / "program.py").write_text(POOLED)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

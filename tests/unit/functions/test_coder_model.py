"""The demo model as committed: it loads as it is, ties what it says, and writes what looks like Python."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[3] / "functions" / "coder" / "model"
LIMIT = 20 * 2**20


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Any]]:
    both: Any = AutoModelForCausalLM.from_pretrained(MODEL, output_loading_info=True)
    return both[0].eval(), both[1]


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, dict[str, Any]]) -> Any:
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def complete(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Greedy, by hand: `generate` imports torch's compiler, which leaves a directory behind."""
    ids = tokenizer(prompt)["input_ids"]
    fed, cache = ids, None
    with torch.inference_mode():
        for _ in range(tokens):
            out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            fed = [int(out.logits[0, -1].argmax())]
            ids = ids + fed
    return str(tokenizer.decode(ids))


def test_fits_into_a_repository() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= LIMIT


def test_every_weight_is_there_and_none_is_left_over(loaded: tuple[Any, dict[str, Any]]) -> None:
    _, info = loaded
    assert {key: value for key, value in info.items() if value} == {}


def test_is_bf16_of_the_size_promised(model: Any) -> None:
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert 5e6 <= sum(weight.numel() for weight in model.parameters()) <= 10e6


def test_output_head_is_the_embedding(model: Any) -> None:
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_logits_are_finite_over_the_whole_context(model: Any, tokenizer: Any) -> None:
    context = model.config.max_position_embeddings
    ids = tokenizer("def f(x):\n    return x\n\n\n" * 300, return_tensors="pt")["input_ids"][:, :context]
    assert ids.shape[1] == context
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()


def test_completing_def_gives_a_definition(model: Any, tokenizer: Any) -> None:
    text = complete(model, tokenizer, "def ", 64)
    assert re.match(r"def [a-z_]\w*\(.*\).*:\n +\S", text), text


def test_completing_a_body_keeps_its_indent(model: Any, tokenizer: Any) -> None:
    prompt = "class Queue:\n    def __init__(self"
    text = complete(model, tokenizer, prompt, 48).removeprefix(prompt)
    assert re.match(r".*\):\n {8}\S", text), text


def test_writes_names_of_the_library_it_was_trained_on(model: Any, tokenizer: Any) -> None:
    lines = complete(model, tokenizer, "import os\nimport ", 24).splitlines()
    assert re.fullmatch(r"import \w+(, \w+)*", lines[1]), lines


def test_chat_is_completion_of_the_contents(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "import os\n"}, {"role": "user", "content": "def "}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "import os\ndef "


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_space_ends_a_token_so_that_prompts_may_end_in_one(tokenizer: Any) -> None:
    assert tokenizer("def ")["input_ids"] == tokenizer("def main")["input_ids"][:1]


def test_record_is_of_these_weights() -> None:
    record = json.loads((MODEL / "training.json").read_text())
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert record["weights"] == f"sha256:{digest}"
    assert record["steps"] == record["recipe"]["steps"], "an unfinished run was committed"

"""Calls of functions: read out of text in every form and however it is cut, and made by a model that must."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.worker.engine.base import Request, Sampling
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.tokens import Tokens
from sllm_runtime.worker.tools.calling import Calling, required
from sllm_runtime.worker.tools.forms import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, Form, form_of
from sllm_runtime.worker.tools.reader import CallReader
from tests.fixtures.models import llama
from tests.unit.worker.engine.driver import finish, ids
from tests.unit.worker.harness import Answer, Worker, Zygote, bundle_of, manifest

MODEL = Path(__file__).parents[3] / "functions" / "coder" / "model"
Read = tuple[str, list[tuple[str, str, str]]]
"""The text, and of each call id, name and arguments."""


def read(form: Form, pieces: Sequence[str], most: int = 16) -> Read:
    reader = CallReader(form, {"f", "g"}, "id{}".format, most)
    text = ""
    calls: dict[int, tuple[str, str, str]] = {}
    for said, parts in (*map(reader.feed, pieces), reader.flush()):
        text += said
        for part in parts:
            id_, name, arguments = calls.get(part.index, ("", "", ""))
            calls[part.index] = (id_ + part.id, name + part.name, arguments + part.arguments)
    return text, list(calls.values())


OUTPUTS: list[tuple[Form, str, Read]] = [
    (HERMES, 'Well.\n<tool_call>\n{"name": "f", "arguments": {"x": "\\"}{", "y": [1, {}]}}\n</tool_call>\n<tool_call>\n'
             '{"arguments": {}, "name": "g"}\n</tool_call> So.',
     ("Well. So.", [("id0", "f", '{"x": "\\"}{", "y": [1, {}]}'), ("id1", "g", "{}")])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", [("id0", "f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("id0", "f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a"', ("", [("id0", "f", '{"a"')])),
    (HERMES, '<tool_call>{"nom": "f"}</tool_call> x', ('<tool_call>{"nom": "f"}</tool_call> x', [])),
    (HERMES, "<tool_ca and <tool_call> none", ("<tool_ca and <tool_call> none", [])),
    (HERMES, '<tool_call>{"name": 5}', ('<tool_call>{"name": 5}', [])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
     ("", [("id0", "f", '{"x": 1}'), ("id1", "g", "{}")])),
    (MISTRAL_ARGS, 'Hm.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
     ("Hm.", [("id0", "f", '{"x": 1}'), ("id1", "g", "{}")])),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]", ("[TOOL_CALLS]f[ARGS]", [])),
    (LLAMA, ' {"name": "f", "parameters": {"x": "1"}}', ("", [("id0", "f", '{"x": "1"}')])),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"type": "function", "name": "g"}',
     ("", [("id0", "f", "{}"), ("id1", "g", "{}")])),
    (LLAMA, '{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    (LLAMA, '{"answer": {"name": "f"}}', ('{"answer": {"name": "f"}}', [])),
    (LLAMA, 'So {"name": "f", "parameters": {}}', ('So {"name": "f", "parameters": {}}', [])),
    (LLAMA, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "output", "expected"), OUTPUTS)
def test_outputs_are_read_however_they_are_cut(form: Form, output: str, expected: Read) -> None:
    assert read(form, [output]) == expected
    assert read(form, list(output)) == expected
    for size in (2, 3, 5, 11):
        assert read(form, [output[at : at + size] for at in range(0, len(output), size)]) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FORMS = pytest.mark.parametrize("form", [HERMES, MISTRAL, MISTRAL_ARGS, LLAMA], ids=["hermes", "list", "args", "llama"])


def written(form: Form, calls: Sequence[tuple[str, str]]) -> str:
    between = "".join(form.between if form.between is not None else ("; ",))
    parts = [
        "".join({"{name}": name, "{arguments}": arguments}.get(part, part) for part in form.written)
        for name, arguments in calls
    ]
    return "".join(form.before) + between.join(parts) + "".join(form.after)


@FORMS
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_written_is_read(form: Form, data: st.DataObject) -> None:
    objects = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
    calls = [
        (name, json.dumps(arguments, ensure_ascii=False))
        for name, arguments in data.draw(st.lists(st.tuples(st.sampled_from("fg"), objects), min_size=1, max_size=3))
    ]
    whole, pieces = written(form, calls), []
    while whole:
        size = data.draw(st.integers(1, 9))
        pieces.append(whole[:size])
        whole = whole[size:]
    text, found = read(form, pieces)
    assert text == ""
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    assert [id_ for id_, _, _ in found] == [f"id{number}" for number in range(len(calls))]
    assert read(form, pieces, most=1)[1] == found[:1]


@pytest.mark.parametrize(
    ("form", "output", "expected"),
    [
        (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>', r'{"a": "\ud83d"}'),
        (LLAMA, r'{"name": "f", "parameters": "{\"a\": \"\ud83d\"}"}', r'{"a": "\ud83d"}'),
        (HERMES, r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>', "{}"),
    ],
)
def test_half_a_character_that_is_written_as_an_escape_stays_one(form: Form, output: str, expected: str) -> None:
    """It has no UTF-8: as a character of its own no frame would take it, and the call would fail."""
    text, ((_, name, arguments),) = read(form, [output])
    assert (text, arguments) == ("", expected)
    assert name.encode().startswith(b"f")
    assert isinstance(json.loads(arguments.encode()), dict)


@FORMS
@given(pieces=st.lists(st.text(st.sampled_from('<tol_ca>[TOOL_CALLS]{}":,x \n'), max_size=8), max_size=8))
@example(pieces=["<tool_call>", '{"', 'x":1}'])
def test_what_calls_nothing_is_told_as_it_is(form: Form, pieces: list[str]) -> None:
    text, calls = read(form, pieces)
    if not calls:
        assert text == "".join(pieces)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} within <tool_call></tool_call> XML tags", HERMES),
        ("within <tool_call> tags <function=name><parameter=x>", None),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", MISTRAL_ARGS),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', LLAMA),
        ("{{ tools | tojson }}", None),
    ],
)
def test_templates_tell_the_form(template: str, form: Form | None) -> None:
    assert form_of(template) is form


# --- a model that must call -------------------------------------------------------------------------
SIZE, EOS = 4160, frozenset({0})
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {
        "$defs": {"unit": {"enum": ["c", "f"]}}, "type": "object", "additionalProperties": False,
        "properties": {"place": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["place", "unit"]}}},
    {"type": "function", "function": {"name": "g"}},
]  # fmt: skip


@cache
def tokens() -> Tokens:
    """The demo model's, with marks that are special tokens."""
    made = json.loads((MODEL / "tokenizer.json").read_bytes())
    for number, mark in enumerate(MARKS):
        made["added_tokens"].append({**made["added_tokens"][0], "id": 4096 + number, "content": mark})
    return Tokens.from_json(json.dumps(made).encode())


@cache
def core() -> OurEngine:
    torch.manual_seed(0)
    module = llama(vocab_size=SIZE, max_position_embeddings=1024, bos_token_id=None, eos_token_id=0).eval()
    return OurEngine(
        build("LlamaForCausalLM", module.config, module.state_dict(), torch.float32, 4), EOS, EXACT, 8 << 20
    )


@FORMS
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_model_that_must_call_does(form: Form, choice: Any) -> None:
    body = {"tools": FUNCTIONS, "tool_choice": choice, "parallel_tool_calls": False}
    vocabulary = tokens().vocabulary(SIZE, EOS)
    grammar, calling = required(body, form, vocabulary), Calling.of(body, form, tokens())
    assert grammar is not None
    assert calling is not None
    for seed in range(2):
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=900)
        core().add(Request(id=seed, prompt=(5, 6, 7), sampling=sampling, constraints=(grammar.start(),)))
    for events in finish(core()).values():
        assert events[-1].finish == "stop"
        text, calls = read(form, [calling.decoder.decode([token]) for token in ids(events)])
        assert text == ""
        ((_, name, arguments),) = calls
        assert choice == "required" or name == "f"
        given = json.loads(arguments)
        assert given == {} if name == "g" else set(given) == {"place", "unit"} and given["unit"] in ("c", "f")


@FORMS
@pytest.mark.parametrize("several", [True, False])
def test_several_calls_where_they_are_allowed(form: Form, several: bool) -> None:
    body = {"tools": FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": several}
    grammar = required(body, form, tokens().vocabulary(SIZE, EOS))
    assert grammar is not None

    def accepted(calls: int) -> bool:
        """Whether an output may be so many calls, and nothing more."""
        shape, said = grammar.start(), tokens().encode(written(form, [("g", "{}")] * calls), special=False)
        return all(shape.allowed(said[:at])[token] for at, token in enumerate((*said, 0)))

    most = 1 if form is LLAMA or not several else 16
    assert [accepted(calls) for calls in (0, 1, 2, 16, 17)] == [False, True, most > 1, most > 1, False]


def test_calls_that_cannot_be_asked_for() -> None:
    vocabulary = tokens().vocabulary(SIZE, EOS)
    body = {"tools": FUNCTIONS, "tool_choice": "required"}
    with pytest.raises(InvalidRequest) as unknown:
        required(body, None, vocabulary)
    assert unknown.value.field == "tool_choice"
    wrong = {"name": "f", "parameters": {"type": "wobble"}}
    with pytest.raises(InvalidRequest) as schema:
        required({**body, "tools": [{"type": "function", "function": wrong}]}, HERMES, vocabulary)
    assert schema.value.field == "tools"
    assert required({**body, "tool_choice": "auto"}, HERMES, vocabulary) is None
    assert Calling.of({**body, "tool_choice": "none"}, HERMES, tokens()) is None


# --- in a worker ------------------------------------------------------------------------------------
TEMPLATE = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
TEMPLATE += "{% endfor %}{% endfor %}{% if tools %}in <tool_call> tags{% endif %}"
SOURCE = "def fn(model):\n    yield 1\n"


@pytest.fixture(scope="module")
def caller(zygote: Zygote, loader: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    home = tmp_path_factory.mktemp("tools")
    shutil.copytree(MODEL, home / "model")
    config = home / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    worker = zygote.spawn()
    made = manifest(kind="generator", streams=True, model="m", engine=True)
    worker.start(made, bundle_of({"user.py": SOURCE}), workdir=home / "w", session=loader.grant(home / "model"))
    yield worker
    worker.close()
    zygote.exited(zygote.count)


def chat(worker: Worker, **body: Any) -> Answer:
    messages = [{"role": "user", "content": "def f"}]
    return worker.run({"model": "m", "messages": messages, "seed": 3, "tools": FUNCTIONS, **body}, kind="chat")


def test_a_conversation_goes_on_behind_a_call_with_half_a_character(caller: Worker) -> None:
    """The model wrote it, as an escape, and its caller sends back what it got."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": r'{"x": "\ud83d"}'}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = chat(caller, messages=[*said, {"role": "tool", "tool_call_id": "call_1", "content": "1"}], max_tokens=4)
    assert answer.end is not None
    assert answer.end.error is None, answer.end.error.message


def test_an_answer_calls_as_it_is_asked_to(caller: Worker) -> None:
    answer = chat(caller, tool_choice="required", parallel_tool_calls=False, n=2, max_tokens=400)
    assert answer.end is not None
    assert answer.end.error is None
    for choice in (0, 1):
        deltas = [delta for delta in answer.deltas if delta.choice == choice]
        assert "".join(delta.text for delta in deltas) == ""
        first, *more = [part for delta in deltas for part in delta.tool_calls]
        assert (first.index, first.name) in ((0, "f"), (0, "g"))
        assert first.id.startswith("call_")
        assert not any(part.id or part.name or part.index for part in more)
        json.loads(first.arguments + "".join(part.arguments for part in more))
        assert deltas[-1].finish == "tool_calls"
    again = chat(caller, tool_choice="required", parallel_tool_calls=False, n=2, max_tokens=400)
    assert [[part.arguments for part in delta.tool_calls] for delta in again.deltas] == [
        [part.arguments for part in delta.tool_calls] for delta in answer.deltas
    ]
    plain = chat(caller, max_tokens=8, temperature=0)
    assert "".join(delta.text for delta in plain.deltas)
    assert not any(delta.tool_calls for delta in plain.deltas)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "wobble"}}}]}, "tools"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_named(caller: Worker, body: dict[str, Any], field: str) -> None:
    assert chat(caller, **body).error.field == field

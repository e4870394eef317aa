"""What outputs must look like: over the demo model's byte-level tokenizer and our engine with a tiny random model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import FunctionError, InvalidRequest
from sllm_runtime.worker.constraints import BadWords, Grammar
from sllm_runtime.worker.engine.base import Constraint, Engine, Request, Sampling
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.transformers_engine import TransformersEngine
from sllm_runtime.worker.tokens import Tokens, Vocabulary
from sllm_runtime.worker.tools.forms import HERMES
from tests.fixtures.examples import examples
from tests.fixtures.models import llama
from tests.unit.worker.engine.driver import finish, ids, run

TOKENIZER = Path(__file__).parents[3] / "functions" / "coder" / "model" / "tokenizer.json"
SIZE, EOS = 4096, frozenset({0})
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
                   "kind": {"enum": ["a", "b"]}},
    "required": ["name", "age", "kind"], "additionalProperties": False,
}  # fmt: skip
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d( [a-z]{2,5}){1,3}"


@cache
def tokens() -> Tokens:
    return Tokens.from_json(TOKENIZER.read_bytes())


@cache
def vocabulary() -> Vocabulary:
    return tokens().vocabulary(SIZE, EOS)


@cache
def module() -> Any:
    torch.manual_seed(0)
    return llama(vocab_size=SIZE, max_position_embeddings=512, bos_token_id=None, eos_token_id=0).eval()


def engine(kind: str = "ours") -> Engine:
    if kind == "transformers":
        return TransformersEngine(module(), EOS, 512, SIZE)
    decoder = build("LlamaForCausalLM", module().config, module().state_dict(), torch.float32, EXACT.rows)
    return OurEngine(decoder, EOS, EXACT, 8 << 20)


def regex(pattern: str) -> Grammar:
    made = Grammar.of({"regex": pattern}, vocabulary())
    assert made is not None
    return made


def schema(given: Any) -> Grammar:
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}
    made = Grammar.of(body, vocabulary())
    assert made is not None
    return made


def asked(number: int, *constraints: Constraint, **sampling: Any) -> Request:
    options = {"temperature": 1.0, "seed": number, "max_tokens": 120, **sampling}
    prompt = tuple(range(100, 110))
    return Request(id=number, prompt=prompt, sampling=Sampling(**options), constraints=constraints)


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_outputs_have_the_shape_that_was_asked_for(kind: str) -> None:
    shapes = [regex(DATE), schema(PERSON)] * 3
    core = engine(kind)
    made = run(core, *(asked(number, shape.start()) for number, shape in enumerate(shapes)))
    assert len(made) == len(shapes)
    for number, output in made.items():
        text = tokens().decode(output)
        if number % 2 == 0:
            assert re.fullmatch(DATE, text), text
        else:
            person = json.loads(text)
            assert list(person) == ["name", "age", "kind"]
            assert isinstance(person["age"], int)
            assert person["kind"] in ("a", "b")


def test_any_object_is_json_and_white_space_ends() -> None:
    made = Grammar.of({"response_format": {"type": "json_object"}}, vocabulary())
    assert made is not None
    text = tokens().decode(run(engine(), asked(1, made.start(), max_tokens=400))[1])
    assert not re.search(r"\s{25}", text)
    # A random model may go on with a string for as long as it may: what there is begins an object.
    assert text.lstrip().startswith("{")
    assert Grammar.of({"response_format": {"type": "text"}}, vocabulary()) is None


RULES: list[tuple[Any, dict[str, Any]]] = [
    (lambda: (regex(DATE).start(),), {}),
    (lambda: (schema(PERSON).start(),), {"repetition_penalty": 1.2, "top_k": 50}),
    (lambda: (schema(PERSON).start(), BadWords(vocabulary(), ["x", "7"])), {"temperature": 0.0}),
    (lambda: (BadWords(vocabulary(), ["in", " s", "\n"]),), {"top_p": 0.9, "min_tokens": 20, "max_tokens": 30}),
    (lambda: (regex("[a-z ]{30,60}").start(), BadWords(vocabulary(), ["e"])), {"presence_penalty": 0.5, "logprobs": 2}),
]


@pytest.mark.parametrize("number", range(len(RULES)))
def test_a_resume_goes_on_at_every_position(number: int) -> None:
    rules, sampling = RULES[number]
    whole = run(engine(), asked(0, *rules(), **sampling))[0]
    assert len(whole) > 8
    core = engine()
    first = asked(0, **sampling)
    for at in range(len(whole)):
        core.add(replace(first, id=at, emitted=whole[:at], constraints=rules()))
    for at, events in finish(core).items():
        assert whole[:at] + ids(events) == whole, at


def test_a_preempted_or_moved_request_goes_on() -> None:
    """Its constraint may be asked about any output again: what it has read is a cache."""
    shape = schema(PERSON)
    output = run(engine(), asked(3, shape.start()))[3]
    used = shape.start()
    for at in (5, 9, 2, 0, len(output), 3):
        assert (used.allowed(output[:at]) == shape.start().allowed(output[:at])).all()
        if at == 2:
            used.forget()


def stream(number: int) -> Request:
    rules, sampling = RULES[number % len(RULES)]
    return asked(number, *rules(), **sampling)


@cache
def alone(number: int) -> tuple[int, ...]:
    return run(engine(), stream(number))[number]


@settings(max_examples=examples(8))
@given(st.data())
def test_no_schedule_changes_a_token(data: st.DataObject) -> None:
    """Outputs held to rules join, leave, sleep and move to another engine with what their rules have read."""
    cores = [engine(), engine()]
    home: dict[int, Engine] = {}
    got: dict[int, tuple[int, ...]] = {}
    waiting, gone = list(data.draw(st.permutations(range(7)))), set[int]()
    while waiting or any(core.busy for core in cores):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "cancel", "move", "sleep"]))
        if action == "add" and waiting:
            number = waiting.pop()
            home[number], got[number] = cores[number % 2], ()
            home[number].add(stream(number))
        elif action == "cancel" and home:
            number = data.draw(st.sampled_from(sorted(home)))
            gone.add(number)
            home.pop(number).cancel(number)
        elif action == "move" and home:
            number = data.draw(st.sampled_from(sorted(home)))
            exported = home[number].export(number)
            home[number].cancel(number)
            home[number] = cores[home[number] is cores[0]]
            home[number].add(replace(exported.request, emitted=exported.ids))
        elif action == "sleep":
            cores[0].sleep()
            cores[0].wake()
        for event in [event for core in cores for event in core.step()]:
            assert event.error is None
            got[event.request] += event.ids
            if event.finish is not None:
                del home[event.request]
    for number, found in got.items():
        assert found == (alone(number)[: len(found)] if number in gone else alone(number))


@settings(max_examples=examples(60))
@given(
    words=st.lists(st.text("abe \n", min_size=1, max_size=4), min_size=1, max_size=3),
    picks=st.lists(st.integers(0, 2**20), max_size=12),
)
def test_a_token_is_forbidden_where_it_would_complete_a_word(words: list[str], picks: list[int]) -> None:
    """Whatever the borders of tokens: compared with the text of every token there is."""
    rule, texts = BadWords(vocabulary(), words), vocabulary().texts
    bad = [word.encode() for word in words]
    output: list[int] = []
    for pick in picks:
        open_ = rule.allowed(output).nonzero()[0]
        # Mostly short ones of these letters: they are what words are made of.
        likely = [token for token in open_.tolist() if texts[token] and set(texts[token]) <= set(b"abe \n")]
        output.append((likely or open_.tolist())[pick % len(likely or open_)])
    said = b"".join(texts[token] for token in output)
    assert not any(word in said for word in bad)
    expected = [not any(word in said + text for word in bad) for text in texts]
    assert rule.allowed(output).tolist() == expected


def test_each_rest_of_a_word_is_looked_up_once_and_before_any_token(monkeypatch: pytest.MonkeyPatch) -> None:
    known, asked_for = vocabulary(), list[bytes]()

    def beginning(self: Vocabulary, prefix: bytes) -> list[int]:
        asked_for.append(prefix)
        return found(self, prefix)

    found = Vocabulary.beginning
    monkeypatch.setattr(Vocabulary, "beginning", beginning)
    rule = BadWords(known, ["a" * size for size in range(193, 257)])
    longest = max(map(len, known.texts))
    assert sorted(asked_for, key=len) == [b"a" * size for size in range(1, longest + 1)]
    asked_for.clear()
    a = known.texts.index(b"a")
    assert rule.allowed([a] * 191)[a]
    assert not rule.allowed([a] * 192)[a]
    assert not asked_for


def test_every_token_has_its_bytes() -> None:
    texts = vocabulary().texts
    parts = tokens().encode("𝄞")
    assert "\ufffd" in "".join(map(tokens().text_of, parts)), "it is several tokens"
    assert b"".join(vocabulary().written(token) or b"" for token in parts).decode() == "𝄞"
    assert vocabulary().written(0) is None, "no text shows <|endoftext|>"
    for text in ("def f(x):\n    return 'ä€𝄞'", "  \t\n\n# \u00a0z"):
        encoded = tokens().encode(text)
        assert b"".join(texts[token] for token in encoded).decode() == text
    assert texts[0] == b""
    assert sorted(vocabulary().beginning(b"retu")) == [i for i, text in enumerate(texts) if text.startswith(b"retu")]


@pytest.mark.parametrize(
    "pattern",
    ["(", r"(?=a)b", r"(a)\1", "a{1000000}", "a{3,10000}", "(a{,100000}b)*", r"[^\x00-\U0010ffff]"],
)
def test_a_regex_that_is_wrong_or_explodes_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        regex(pattern)
    assert refused.value.field == "regex"
    assert len(refused.value.message) < 500


DEEP: Any = {"type": "integer"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "wobble"},
        {"not": {"type": "string"}},
        {"$ref": "#/nowhere"},
        {"$ref": "http://localhost/schema"},
        {"enum": ["x" * 128 * 1024]},
        DEEP,
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "a{100000}"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(200_000)}},
    ],
    ids=lambda given: str(given)[:30],
)
def test_a_schema_that_is_wrong_or_explodes_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        schema(given)
    assert refused.value.field == "response_format"
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    "given",
    [
        {"type": "object", "properties": {"zip": {"type": "string", "description": "as {12345}"}}},
        {"const": "{10000}"},
        {"enum": ["order {20000,30000}", "none"]},
        {"type": "string", "pattern": r"^\{[0-9]{5}\}$", "examples": ["{12345}"]},
    ],
    ids=lambda given: str(given)[:30],
)
def test_a_brace_in_words_repeats_nothing(given: Any) -> None:
    """What a schema describes, names or gives as a value is no repetition; nor is a brace that is meant as one."""
    assert schema(given).start().allowed(()).any()
    function: Any = {"name": "f", "parameters": {"type": "object", "properties": {"a": given}}}
    assert Grammar.of_calls(HERMES, [function], vocabulary(), several=False)
    assert regex(r"\{12345\}").start().allowed(()).any()


def test_a_regex_that_explodes_on_its_way_is_refused_there() -> None:
    shape = regex(".*(a|b)*a(.|b){50}x").start()
    random, output = np.random.default_rng(0), list[int]()

    def go_on() -> None:
        for _ in range(500):
            output.append(int(random.choice(shape.allowed(output)[1:].nonzero()[0])) + 1)

    with pytest.raises(InvalidRequest, match="too many states"):
        go_on()
    assert output


class Failing:
    """A rule that breaks on its way."""

    field = "regex"

    def __init__(self, after: int) -> None:
        self.after = after

    def allowed(self, output: Sequence[int]) -> Any:
        if len(output) >= self.after:
            raise FunctionError("it broke")
        return torch.ones(SIZE, dtype=torch.bool).numpy()

    def forget(self) -> None:
        """It keeps nothing."""


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_who_leaves_no_token_fails_alone(kind: str) -> None:
    alone = run(engine(kind), asked(2))[2]
    core = engine(kind)
    stuck = asked(0, regex("(abc){30}").start(), BadWords(vocabulary(), ["cab"]))
    for each in (stuck, asked(1, Failing(4)), asked(2)):
        core.add(each)
    events = finish(core)
    errors = {number: found[-1].error for number, found in events.items()}
    assert isinstance(errors[0], InvalidRequest)
    assert errors[0].field == "bad_words", "the shape alone would have left one"
    assert errors[0].message.startswith("'bad_words': ")
    assert isinstance(errors[1], FunctionError)
    assert ids(events[2]) == alone


def test_a_model_without_an_end_has_no_shapes() -> None:
    with pytest.raises(InvalidRequest, match="no end-of-text token"):
        Grammar.of({"regex": "a"}, Tokens.from_json(TOKENIZER.read_bytes()).vocabulary(SIZE, frozenset()))

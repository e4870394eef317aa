"""Prompts become ids: what is too long is refused before it costs anything, and nobody waits for it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from sllm_runtime.protocol.errors import ContextLengthExceeded, InvalidRequest
from sllm_runtime.worker import prompts
from sllm_runtime.worker.tokens import Tokens
from tests.fixtures.vocabularies import SPECIAL, byte_level, llama

Make = Callable[[], Tokenizer]
KINDS = pytest.mark.parametrize("make", [llama, byte_level])
TEXTS = st.lists(st.sampled_from([*"ab world é🦙鳥ж👩‍👧", *SPECIAL]), max_size=30).map("".join)


@dataclass(frozen=True)
class Engine:
    max_context: int = 64
    vocabulary: int = 256


@KINDS
@given(text=TEXTS, special=st.booleans())
def test_ids_are_those_of_the_tokenizer(make: Make, text: str, special: bool) -> None:
    made = Tokenizer.from_str(make().to_str())
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    expected = tuple(made.encode(text, add_special_tokens=special).ids)
    assert Tokens(made).encode(text, special=special) == expected


def test_others_run_while_a_text_is_encoded() -> None:
    """Again and again within one text; where the machine gives the watcher no time, within another one."""
    text, tokens = "hello world, or " * 100_000, Tokens(byte_level())
    ended, turns, within = threading.Event(), 0, list[int]()

    def watch() -> None:
        nonlocal turns
        while not ended.wait(0.001):
            turns += 1

    watching = threading.Thread(target=watch)
    watching.start()
    while len(within) < 10 and max(within, default=0) < 10:
        before = turns
        tokens.encode(text)
        within.append(turns - before)
    ended.set()
    watching.join()
    assert max(within) >= 10, within


@KINDS
def test_what_is_too_long_however_it_is_cut_is_not_encoded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, most = Tokens(make()), max(map(len, map(str.encode, make().get_vocab())))
    assert len(prompts.encoded("a" * 64 * most, Engine(), tokens)) > 64, "that may fit, for all that its length says"
    monkeypatch.setattr(tokens, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    for text in ("a" * (64 * most + 1), "é" * (32 * most + 1)):
        with pytest.raises(ContextLengthExceeded, match="64 tokens") as refused:
            prompts.encoded(text, Engine(), tokens)
        assert refused.value.field == "prompt"


def test_what_was_asked_is_what_it_was_when_it_was_given() -> None:
    ids, schema = array("q", [65]), {"type": "string"}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = prompts.Asked.of(ids, 1, {"response_format": shape})
    ids.append(66)
    schema["type"] = "number"
    assert prompts.prompt_ids(asked.prompt, Engine(), Tokens(byte_level()), {}) == (65,)
    assert asked.options.response_format is not None
    assert asked.options.response_format["json_schema"]["schema"] == {"type": "string"}


@KINDS
@given(text=TEXTS)
def test_no_token_stands_for_more_than_the_longest(make: Make, text: str) -> None:
    tokens = Tokens(make())
    assert len(text.encode()) <= tokens.longest * len(tokens.encode(text))


@pytest.mark.parametrize("wrong", [-1, 256, 2**32, 2**70])
def test_ids_are_looked_at_before_they_are_decoded(wrong: int) -> None:
    with pytest.raises(InvalidRequest, match=str(wrong)) as refused:
        prompts.given_ids((5, wrong), Engine())
    assert refused.value.field == "prompt"
    with pytest.raises(ContextLengthExceeded):
        prompts.given_ids((wrong,) * 64, Engine())


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_frameworks_look_for() -> None:
    """litellm (its ``context_window_fallbacks``) and LangChain know an overflow by what its message says."""
    tokens = Tokens(byte_level())
    with pytest.raises(ContextLengthExceeded) as by_ids:
        prompts.given_ids((65,) * 64, Engine())
    with pytest.raises(ContextLengthExceeded) as by_text:
        prompts.encoded("a" * 64 * 1024, Engine(), tokens)
    refused = [by_ids.value.message, by_text.value.message]
    assert all("prompt is too long" in said for said in refused)
    assert all("this model's maximum context length is 64 tokens" in said for said in refused)

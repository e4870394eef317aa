"""Text of ids that come one after the other, with the decoders of real tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sllm_runtime.worker.engine.text import Detokenizer
from sllm_runtime.worker.tokens import Tokens
from tests.fixtures.vocabularies import SPECIAL, byte_level, llama

BROKEN = "\ufffd"
KINDS = pytest.mark.parametrize("make", [llama, byte_level])
Make = Callable[[], Tokenizer]

# Words of the vocabularies beside characters of two to four bytes that they lack.
TEXTS = st.text(st.sampled_from("ab world é🦙鳥ж👩‍👧"), max_size=30)


def told(tokens: Tokens, context: Sequence[int], groups: Sequence[Sequence[int]]) -> str:
    detokenizer = Detokenizer(tokens, context)
    return "".join([*(detokenizer.feed(group) for group in groups), detokenizer.flush()])


def grouped(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(places)]


def whole(tokens: Tokens, ids: Sequence[int]) -> Sequence[int]:
    """Without the beginning of a character at their end."""
    return next(ids[:end] for end in range(len(ids), -1, -1) if not tokens.decode(ids[:end]).endswith(BROKEN))


@KINDS
def test_many_characters_that_the_vocabulary_lacks(make: Make) -> None:
    tokens, text = Tokens(make()), "a " + "🦙" * 9 + " world"
    detokenizer = Detokenizer(tokens, tokens.encode("b"))
    pieces = [detokenizer.feed([token]) for token in tokens.encode(text)]
    assert "".join(pieces).lstrip() == text
    assert sum("🦙" in piece for piece in pieces) == 9, "each is told when it is whole"


@KINDS
@given(TEXTS, st.integers(0, 60), st.lists(st.integers(0, 200), max_size=8))
def test_the_text_goes_on_where_the_prompt_ends(make: Make, text: str, at: int, cuts: list[int]) -> None:
    tokens = Tokens(make())
    ids = tokens.encode(text)
    prompt = whole(tokens, ids[:at])
    rest = ids[len(prompt) :]
    assert tokens.decode(prompt) + told(tokens, prompt, grouped(rest, cuts)) == text


@KINDS
@given(TEXTS, st.integers(0, 60))
def test_a_prompt_that_ends_in_a_character_costs_that_one(make: Make, text: str, at: int) -> None:
    tokens = Tokens(make())
    ids = tokens.encode(text)
    begun = whole(tokens, ids[:at])
    output = told(tokens, ids[:at], [ids[at:]])
    rest = text.removeprefix(tokens.decode(begun))
    assert output.lstrip(BROKEN) == (rest[1:] if len(begun) < at and rest else rest)


@KINDS
@given(st.data(), st.lists(st.integers(0, 200), max_size=8))
def test_any_ids_have_one_text(make: Make, data: st.DataObject, cuts: list[int]) -> None:
    tokens = Tokens(make())
    drawn = st.lists(st.integers(0, make().get_vocab_size() + 1), max_size=40)
    prompt, ids = data.draw(drawn), data.draw(drawn)
    assert told(tokens, prompt, grouped(ids, cuts)) == told(tokens, prompt, [[token] for token in ids])


@KINDS
def test_broken_bytes_cost_themselves_alone(make: Make) -> None:
    tokens = Tokens(make())
    broken = tokens.encode("🦙")[-1]
    output = told(tokens, tokens.encode("a"), [[*tokens.encode("🦙"), broken, *tokens.encode(" a🦙🦙🦙")]])
    assert output.split() == [f"🦙{BROKEN}", "a🦙🦙🦙"]


@KINDS
def test_special_tokens_do_not_take_the_context_away(make: Make) -> None:
    tokens = Tokens(make())
    ends = [SPECIAL.index("</s>")] * 40
    word = tokens.encode(" a")[-1]
    assert told(tokens, tokens.encode("b"), [[word, *ends, word]]) == " a a"


@KINDS
def test_a_prompt_of_characters_that_the_vocabulary_lacks_goes_on_with_another(make: Make) -> None:
    """Its last ids begin inside of one: all bytes of a run that begins so are broken for some decoders."""
    tokens = Tokens(make())
    assert told(tokens, tokens.encode("a🦙🦙"), [[token] for token in tokens.encode("a🦙")[-4:]]) == "🦙"


class Longest:
    """A decoder that knows the most ids it was asked for at once."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.most = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.most = max(self.most, len(ids))
        return self._tokens.decode(ids)


@KINDS
def test_a_token_costs_the_same_however_many_there_were(make: Make) -> None:
    tokens = Tokens(make())
    parts = (tokens.encode(" a")[-1:], tokens.encode("🦙")[-1:], [SPECIAL.index("</s>")])
    decoder = Longest(tokens)
    detokenizer = Detokenizer(decoder, tokens.encode("b"))
    for part in parts:
        detokenizer.feed(part * 200)
    assert decoder.most <= 40

"""Log probabilities as they are told: the tokens make up the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from sllm_gateway.openai.outputs import completion_logprobs
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.frames import Delta, TokenLogprob
from sllm_runtime.protocol.limits import MAX_PART
from sllm_runtime.worker.engine.base import TokenChoice
from sllm_runtime.worker.engine.sinks import Piece
from sllm_runtime.worker.telling import _TEXT, Shown, Telling, parted
from sllm_runtime.worker.tokens import Tokens
from tests.fixtures.vocabularies import byte_level, llama

EOS = 2
KINDS = pytest.mark.parametrize("make", [llama, byte_level])
Make = Callable[[], Tokenizer]


def shown(make: Make, eos: frozenset[int] = frozenset({EOS})) -> tuple[Tokens, Shown]:
    tokens = Tokens(make())
    return tokens, Shown(tokens, tokens.vocabulary(make().get_vocab_size(), eos))


def raw(told: TokenLogprob) -> bytes:
    return told.raw[0] if told.raw else told.token.encode()


@KINDS
def test_tokens_make_up_the_text(make: Make) -> None:
    tokens, show = shown(make)
    text = "a world a🦙 wor b"
    told = show([TokenChoice(token, -1.0) for token in tokens.encode(text)])
    assert b"".join(map(raw, told)).decode().lstrip() == text
    assert [each.token for each in told[-3:]] == [" wor", " ", "b"]
    assert [each.token for each in told if each.raw] == ["\ufffd"] * 4, "a part of a character is no text"


@KINDS
def test_a_word_and_the_same_behind_a_space_are_two(make: Make) -> None:
    tokens, show = shown(make)
    spaced, alone = tokens.encode("b a")[-1], tokens.encode("ba")[-1]
    (told,) = show([TokenChoice(spaced, -0.5, ((spaced, -0.5), (alone, -1.0), (EOS, -2.0)))])
    assert (told.token, told.top) == (" a", ((" a", -0.5), ("a", -1.0), ("</s>", -2.0)))
    assert (show.first(EOS).token, show.first(spaced).logprob) == ("</s>", None)


@KINDS
def test_offsets_are_those_of_the_text(make: Make) -> None:
    """Also behind what it does not show, as the token that begins it, and behind a character of several tokens."""
    tokens, show = shown(make)
    told = show([TokenChoice(token, -1.0) for token in (EOS, *tokens.encode("a🦙 wor b"))])
    offsets, text = completion_logprobs(told, 0)["text_offset"], b"".join(map(raw, told)).decode()
    assert text.lstrip() == "a🦙 wor b"
    assert [text[at:].startswith(each.token) for at, each in zip(offsets, told, strict=True) if not each.raw] == [
        True
    ] * (len(told) - 5)
    assert offsets[:2] == [0, 0]


@KINDS
@pytest.mark.parametrize("prompt", ["a world", " a world", "é🦙 wor", "<s>a world</s> b"])
def test_offsets_are_those_of_an_echoed_prompt(make: Make, prompt: str) -> None:
    """Whoever scores a text looks by them for where its prompt ends."""
    tokens, show = shown(make)
    first, *rest = tokens.encode(prompt)
    telling = Telling(0, show, prompt, first)
    drawn = TokenChoice(tokens.encode("b wor")[-1], -1.0)
    piece = Piece(" wor", prompt=tuple(TokenChoice(token, -1.0) for token in rest), finish="length", logprobs=(drawn,))
    delta = telling.delta(piece)
    assert delta is not None
    assert delta.text == prompt + " wor"
    told = completion_logprobs(delta.logprobs, 0)
    assert told["text_offset"][-1] == len(prompt)
    for at, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert token == "\ufffd" or delta.text[at:].startswith((token, token.lstrip())), (at, token)


def test_a_tokenizer_that_cannot_be_read_is_shown_as_it_decodes() -> None:
    tokens, show = shown(llama, eos=frozenset())
    (told,) = show([TokenChoice(tokens.encode("b a")[-1], -0.5)])
    assert (told.token, told.raw) == ("a", ())


@pytest.mark.parametrize("letters", [0, 1, _TEXT, _TEXT + 1, 3 * _TEXT, 100_000])
def test_a_prompt_that_is_repeated_is_told_in_parts_that_each_go_into_one_frame(letters: int) -> None:
    text = "é😀" * (letters // 2) + "x" * (letters % 2)
    scores = tuple(TokenLogprob(f"t{number}", -1.0) for number in range(60))
    whole = Delta(1, text, "length", scores)
    parts = list(parted(whole))
    assert "".join(part.text for part in parts) == text
    assert tuple(score for part in parts for score in part.logprobs) == scores
    assert [part.finish for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert max(len(codec.pack(part)) for part in parts) < MAX_PART
    assert all(part.text or part.logprobs or part.finish for part in parts)

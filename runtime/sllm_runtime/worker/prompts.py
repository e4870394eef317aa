"""What a caller asks of a model, checked: prompts to token ids, sampling parameters to ``Sampling`` and rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sllm_runtime.protocol.errors import ContextLengthExceeded, InvalidArgument
from sllm_runtime.protocol.openai import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_REGEX,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_WORD,
    check,
)
from sllm_runtime.worker.chat import ChatTemplate
from sllm_runtime.worker.constraints import BadWords, Grammar
from sllm_runtime.worker.engine.admission import check_ids, end_ids
from sllm_runtime.worker.engine.base import Constraint, Request, Sampling
from sllm_runtime.worker.tokens import Tokens, Vocabulary

_Text = Annotated[str, Field(min_length=1)]
_Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD)]


class Limits(Protocol):
    """Of an engine."""

    @property
    def max_context(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else () if value is None else value


class SamplingOptions(BaseModel):
    """Sampling parameters by OpenAI's names, and the usual ones beside. ``None`` is the default everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=MAX_BIASES)
    stop: Annotated[tuple[_Text, ...], BeforeValidator(_one_or_many)] = Field(
        default=(), max_length=MAX_STOPS, strict=False
    )
    stop_ids: Annotated[tuple[int, ...], BeforeValidator(_one_or_many)] = Field(
        default=(), max_length=MAX_STOP_IDS, strict=False
    )
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    bad_words: Annotated[tuple[_Word, ...], BeforeValidator(_one_or_many)] = Field(
        default=(), max_length=MAX_BAD_WORDS, strict=False
    )
    """Texts that the output never holds."""
    regex: str | None = Field(default=None, max_length=MAX_REGEX)
    """The whole output matches it."""
    response_format: dict[str, Any] | None = None
    """As OpenAI's: ``{"type": "json_object"}``, or ``json_schema`` with a schema."""

    def sampling(self, max_tokens: int, *, temperature: float, logprobs: int | None = None) -> Sampling:
        """As the engine takes it; ``temperature`` is the default."""
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_token_ids(self.logit_bias or {}),
            stop=self.stop,
            stop_ids=self.stop_ids,
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            logprobs=logprobs,
        )

    def rules(self, vocabulary: Vocabulary) -> Rules:
        """What outputs must look like. Raises ``InvalidRequest`` naming the field."""
        words = BadWords(vocabulary, self.bad_words) if self.bad_words else None
        grammar = Grammar.of({"regex": self.regex, "response_format": self.response_format}, vocabulary)
        return Rules(grammar, words)


@dataclass(frozen=True, slots=True)
class Rules:
    """What all outputs of a request keep."""

    grammar: Grammar | None = None
    bad_words: BadWords | None = None

    def constraints(self) -> tuple[Constraint, ...]:
        """For one output."""
        started = () if self.grammar is None else (self.grammar.start(),)
        return started if self.bad_words is None else (*started, self.bad_words)


def _token_ids(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise InvalidArgument("logit_bias: its keys are token ids", field="logit_bias") from error


def options(given: Mapping[str, Any]) -> SamplingOptions:
    """``generate``'s keyword arguments. Raises ``InvalidArgument`` by name."""
    named = {key: {str(token): bias for token, bias in value.items()} if key == "logit_bias" and value else value
             for key, value in given.items()}  # fmt: skip
    try:
        made = SamplingOptions.model_validate(named)
    except ValidationError as error:
        raise refused(error) from error
    check(named, chat=False)
    return made


@dataclass(frozen=True, slots=True)
class Asked:
    """``generate``'s arguments, copied: their caller may go on with what was given, and change it."""

    prompt: Any
    max_tokens: int
    options: SamplingOptions

    @classmethod
    def of(cls, prompt: Any, max_tokens: int, given: Mapping[str, Any]) -> Asked:
        """What costs nothing is looked at: raises ``InvalidArgument`` naming the argument."""
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
            raise InvalidArgument(f"max_tokens is {max_tokens!r}; give a number from 0 on", field="max_tokens")
        return cls(_copied(prompt), max_tokens, options(given).model_copy(deep=True))


def _copied(prompt: Any) -> Any:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return prompt
    items = list(prompt)  # ids have nothing within, and may be very many
    return copy.deepcopy(items) if items and isinstance(items[0], Mapping) else items


def request(asked: Asked, engine: Limits, tokens: Tokens, files: Mapping[str, bytes]) -> Request:
    """What ``generate`` asks of the engine; greedy unless it says otherwise. Takes as long as the prompt and the shape
    are. Raises ``InvalidArgument`` naming the argument, ``InvalidRequest``, ``ContextLengthExceeded``."""
    ids = prompt_ids(asked.prompt, engine, tokens, files)
    sampling = asked.options.sampling(fit(len(ids), asked.max_tokens, engine.max_context), temperature=0.0)
    rules = asked.options.rules(vocabulary_of(engine, tokens, files))
    return Request(id=-1, prompt=ids, sampling=sampling, constraints=rules.constraints())


def vocabulary_of(engine: Limits, tokens: Tokens, files: Mapping[str, bytes]) -> Vocabulary:
    """The ids of the engine's model."""
    config = json.loads(files.get("config.json", b"{}"))
    size = engine.vocabulary
    return tokens.vocabulary(size, end_ids(config, files.get("generation_config.json"), size))


def refused(error: ValidationError) -> InvalidArgument:
    """The first problem, by the parameter's name."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidArgument(f"there is no parameter '{path}'", field=path)
    return InvalidArgument(f"'{path}': {first['msg']} (given: {first['input']!r:.80})", field=path)


def prompt_ids(prompt: Any, engine: Limits, tokens: Tokens, files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Token ids of text, of ids, or of chat messages. Raises ``InvalidArgument``, ``ContextLengthExceeded``."""
    if isinstance(prompt, str):
        return encoded(prompt, engine, tokens)
    if isinstance(prompt, Sequence) and all(isinstance(item, Mapping) for item in prompt) and prompt:
        return encoded(ChatTemplate.from_files(files).render(prompt), engine, tokens, special=False)
    if isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return tuple(prompt)
    kind = type(prompt).__name__
    raise InvalidArgument(f"the prompt is a {kind}; give text, token ids or chat messages", field="prompt")


def encoded(text: str, engine: Limits, tokens: Tokens, *, special: bool = True) -> tuple[int, ...]:
    """``Tokens.encode``. Raises ``ContextLengthExceeded`` for a text that is too long however it is cut: to count its
    tokens would take seconds, and memory that an instance may not have."""
    size, context = len(text.encode()), engine.max_context
    if size > context and size > context * tokens.longest:
        raise ContextLengthExceeded(
            f"the prompt has {size} bytes and this model's context is {context} tokens of at most {tokens.longest} "
            "bytes: no token would fit; shorten it",
            field="prompt",
        )
    return tokens.encode(text, special=special)


def given_ids(ids: Sequence[int], engine: Limits) -> tuple[int, ...]:
    """A prompt of ids. Raises ``ContextLengthExceeded``, ``InvalidRequest`` for one that is outside the vocabulary."""
    fit(len(ids), 0, engine.max_context)
    check_ids("prompt", ids, engine.vocabulary)
    return tuple(ids)


def fit(prompt: int, wanted: int, context: int) -> int:
    """``max_tokens`` cut to what the context leaves. Raises ``ContextLengthExceeded`` where nothing is left."""
    if prompt >= context:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens and this model's context is {context}: no token would fit; shorten it",
            field="prompt",
        )
    return min(wanted, context - prompt)

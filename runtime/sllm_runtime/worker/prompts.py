"""What a caller asks of a model, checked: prompts to token ids, sampling parameters to ``Sampling`` and rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from pydantic import ValidationError

from sllm_runtime.protocol.errors import ContextLengthExceeded, InvalidArgument
from sllm_runtime.protocol.openai import check
from sllm_runtime.protocol.openai_requests import SamplingOptions, first_wrong
from sllm_runtime.worker.chat import ChatTemplate
from sllm_runtime.worker.constraints import BadWords, Grammar
from sllm_runtime.worker.engine.admission import check_ids, end_ids
from sllm_runtime.worker.engine.base import Constraint, Request, Sampling
from sllm_runtime.worker.tokens import Tokens, Vocabulary


class Limits(Protocol):
    """The bounds of an engine that a request is checked against."""

    @property
    def max_context(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...


def sampling_of(
    options: SamplingOptions, max_tokens: int, *, temperature: float, logprobs: int | None = None
) -> Sampling:
    """As the engine takes it; ``temperature`` is the default."""
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens or 0,
        temperature=temperature if options.temperature is None else options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        top_k=max(options.top_k or 0, 0),
        min_p=options.min_p or 0.0,
        repetition_penalty=options.repetition_penalty or 1.0,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        logit_bias=_token_ids(options.logit_bias or {}),
        stop=_texts(options.stop),
        stop_ids=tuple(options.stop_ids or ()),
        ignore_eos=bool(options.ignore_eos),
        seed=options.seed,
        logprobs=logprobs,
    )


def rules_of(options: SamplingOptions, vocabulary: Vocabulary) -> Rules:
    """What outputs must look like. Raises ``InvalidRequest`` naming the field."""
    words = BadWords(vocabulary, _texts(options.bad_words)) if options.bad_words else None
    grammar = Grammar.of({"regex": options.regex, "response_format": options.response_format}, vocabulary)
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


def _texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def _token_ids(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise InvalidArgument("logit_bias: its keys are token ids", field="logit_bias") from error


def options(given: Mapping[str, Any]) -> SamplingOptions:
    """``generate``'s keyword arguments. Raises ``InvalidArgument`` by name."""
    named = {key: _as_json(key, value) for key, value in given.items()}
    try:
        made = SamplingOptions.model_validate(named)
    except ValidationError as error:
        raise refused(error) from error
    check(named, chat=False)
    return made


_LISTS: Final = ("stop", "stop_ids", "bad_words")


def _as_json(name: str, value: Any) -> Any:
    """What Python has and JSON has not: lists of other kinds, and keys of ``logit_bias`` that are numbers."""
    if name in _LISTS and isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return list(value)
    return {str(token): bias for token, bias in value.items()} if name == "logit_bias" and value else value


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
    room = fit(len(ids), asked.max_tokens, engine.max_context)
    sampling = within(sampling_of(asked.options, asked.max_tokens, temperature=0.0), room)
    rules = rules_of(asked.options, vocabulary_of(engine, tokens, files))
    return Request(id=-1, prompt=ids, sampling=sampling, constraints=rules.constraints())


def vocabulary_of(engine: Limits, tokens: Tokens, files: Mapping[str, bytes]) -> Vocabulary:
    """The ids of the engine's model."""
    config = json.loads(files.get("config.json", b"{}"))
    size = engine.vocabulary
    return tokens.vocabulary(size, end_ids(config, files.get("generation_config.json"), size))


def refused(error: ValidationError) -> InvalidArgument:
    """The first problem, by the parameter's name."""
    wrong, place = first_wrong(error)
    path = ".".join(str(part) for part in place)
    if wrong["type"] == "extra_forbidden":
        return InvalidArgument(f"there is no parameter '{path}'", field=path)
    return InvalidArgument(f"'{path}': {wrong['msg']} (given: {wrong['input']!r:.80})", field=path)


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
            f"the prompt is too long: it has {size} bytes, and this model's maximum context length is {context} tokens "
            f"of at most {tokens.longest} bytes; shorten it",
            field="prompt",
        )
    return tokens.encode(text, special=special)


def given_ids(ids: Sequence[int], engine: Limits) -> tuple[int, ...]:
    """A prompt of ids. Raises ``ContextLengthExceeded``, ``InvalidRequest`` for one that is outside the vocabulary."""
    fit(len(ids), 0, engine.max_context)
    check_ids("prompt", ids, engine.vocabulary)
    return tuple(ids)


def within(sampling: Sampling, room: int) -> Sampling:
    """``sampling`` with its ``max_tokens`` cut to ``room``, and ``min_tokens``, if it is no more than was asked for."""
    least = sampling.min_tokens
    return replace(sampling, max_tokens=room, min_tokens=min(least, room) if least <= sampling.max_tokens else least)


def fit(prompt: int, wanted: int, context: int) -> int:
    """``max_tokens`` cut to what the context leaves. Raises ``ContextLengthExceeded`` where nothing is left, in words
    by which litellm and LangChain know it: they read the message."""
    if prompt >= context:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {prompt} tokens, and this model's maximum context length is {context} "
            "tokens; shorten it",
            field="prompt",
        )
    return min(wanted, context - prompt)

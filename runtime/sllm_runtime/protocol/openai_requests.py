"""Shapes of OpenAI's requests and of ``generate``'s options. The gateway refuses by them before anything is started;
the worker, which gets the body as it came, reads it by the same ones."""

from __future__ import annotations

from typing import Annotated, Any, Final, NotRequired, Required

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from sllm_runtime.protocol.openai import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_REGEX,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_WORD,
    WITHOUT_MEANING,
)

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1)]
_Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD)]
_FIRST: Final = Field(fail_fast=True)
"""Of a list its first wrong part is told, and no other looked for: pydantic takes a kilobyte and 10 µs for
each, without letting go of the interpreter, and a body has room for millions."""
_ANY: Final = ConfigDict(frozen=True, strict=True, extra="allow")
"""Unknown fields are ignored: OpenAI adds some every few months, and its clients send them."""


def _first_wrong(biases: Any) -> Any:
    """As ``_FIRST``, which dictionaries have from pydantic 2.14 on: the first item alone that is wrong, if one is."""
    if not isinstance(biases, dict):
        return biases
    numbers = (int, float)  # and no bool, which is an int
    wrong = ({key: each} for key, each in biases.items() if not (type(each) in numbers and -100 <= each <= 100))
    return next(wrong, biases)


class SamplingOptions(BaseModel):
    """Sampling parameters by OpenAI's names, and the usual ones beside. ``None`` is the default everywhere."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=MAX_BIASES),
        BeforeValidator(_first_wrong),
    ] = None
    stop: _Text | Annotated[list[_Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    bad_words: _Word | Annotated[list[_Word], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    """Texts that the output never holds."""
    regex: str | None = Field(default=None, max_length=MAX_REGEX)
    """The whole output matches it."""
    response_format: dict[str, Any] | None = None
    """As OpenAI's: ``{"type": "json_object"}``, or ``json_schema`` with a schema."""


class StreamOptions(BaseModel):
    model_config = _ANY

    include_usage: bool | None = None


class OpenAIRequest(SamplingOptions):
    """What both routes share."""

    model_config = _ANY

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    user: str | None = None

    @property
    def unknown(self) -> list[str]:
        """Its fields that nobody knows, by name."""
        return sorted(name for name in self.model_extra or {} if name not in WITHOUT_MEANING)

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk of the tokens used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """How many continuations are asked for."""
        return self.n or 1


class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[list[str], _FIRST]
        | Annotated[list[int], _FIRST]
        | Annotated[list[Annotated[list[int], _FIRST]], _FIRST]
    )
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1)
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each text or list of ids to continue."""
        given: Any = self.prompt
        return given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]

    @property
    def choices(self) -> int:
        return len(self.prompts) * (self.n or 1)


class Message(TypedDict):
    """Stays as it came: a template may know more of its fields."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[_Text]
    content: NotRequired[str | Annotated[list[dict[str, Any]], _FIRST] | None]


class ChatRequest(OpenAIRequest):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[dict[str, Any]], _FIRST] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def first_wrong(error: ValidationError) -> tuple[ErrorDetails, tuple[int | str, ...]]:
    """What is wrong with the first wrong field, and the field's path. Of a union each form complains: one that has the
    right type knows better than those that have not."""
    first, *others = error.errors(include_url=False)
    place = _place(first)
    own = [first, *(each for each in others if _place(each) == place)]
    return next((each for each in own if not each["type"].endswith("_type")), first), place


def _place(error: ErrorDetails) -> tuple[int | str, ...]:
    """Without pydantic's names for the members of a union."""
    parts: list[int | str] = []
    for part in error["loc"]:
        if isinstance(part, str) and (not part.isidentifier() or part in ("str", "int")):
            break
        parts.append(part)
    return tuple(parts)

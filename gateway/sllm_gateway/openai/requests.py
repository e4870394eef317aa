"""Shapes of OpenAI's requests. The worker gets the body as it came; here it is refused before anything is started."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from sllm_gateway.arguments import parse, path_text
from sllm_gateway.errors import quoted
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.openai import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_REGEX,
    MAX_STOPS,
    MAX_WORD,
    OWN_FIELDS,
    WITHOUT_MEANING,
    check,
)

_PASSED_ON = OWN_FIELDS | WITHOUT_MEANING
"""Not checked here: the engine's own sampling parameters, and fields that mean nothing to any model."""
_NAMED: Final = 20
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1)]
_Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD)]


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")


class StreamOptions(_Shape):
    include_usage: bool | None = None


class OpenAIRequest(_Shape):
    """What both routes share."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=MAX_BIASES)
    seed: int | None = None
    stop: _Text | Annotated[list[_Text], Field(max_length=MAX_STOPS)] | None = None
    bad_words: _Word | Annotated[list[_Word], Field(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    regex: str | None = Field(default=None, max_length=MAX_REGEX)
    response_format: dict[str, Any] | None = None
    user: str | None = None

    @property
    def warnings(self) -> list[str]:
        """Fields that mean nothing here, for the log: the first _NAMED by name. A caller names as many as it likes."""
        unknown = sorted(name for name in self.model_extra or {} if name not in _PASSED_ON)
        named = [f"unknown field {quoted(name)} is ignored" for name in unknown[:_NAMED]]
        return [*named, f"and {len(unknown) - _NAMED} more"] if len(unknown) > _NAMED else named

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

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1)
    suffix: str | None = None

    @property
    def choices(self) -> int:
        many = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return (len(self.prompt) if many else 1) * (self.n or 1)


class Message(_Shape):
    role: str = Field(min_length=1)
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(OpenAIRequest):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


R = TypeVar("R", bound=OpenAIRequest)


def read(type_: type[R], body: bytes) -> R:
    """The request in ``body``. Raises ``MalformedJson``; ``InvalidRequest`` or ``InvalidArgument`` naming the field."""
    value = parse(body)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        request = type_.model_validate(value)
    except ValidationError as error:
        told = _telling(error)
        param = _param(told["loc"])
        raise InvalidRequest(f"'{param}': {told['msg'][:300]}", field=param) from error
    check(value, chat=type_ is ChatRequest)
    return request


def _telling(error: ValidationError) -> ErrorDetails:
    """What is wrong with the first wrong field. Of a union each form complains: one that has the right type knows
    better than those that have not."""
    first, *others = error.errors(include_url=False)
    own = [first, *(each for each in others if _param(each["loc"]) == _param(first["loc"]))]
    return next((each for each in own if not each["type"].endswith("_type")), first)


def _param(place: tuple[int | str, ...]) -> str:
    """The path of a field, without pydantic's names for the members of a union."""
    parts: list[int | str] = []
    for part in place:
        if isinstance(part, str) and (not part.isidentifier() or part in ("str", "int")):
            break
        parts.append(part)
    return path_text(parts)

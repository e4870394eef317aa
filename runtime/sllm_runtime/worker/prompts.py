"""What a caller asks of a model, checked: prompts to token ids, sampling parameters to ``Sampling``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sllm_runtime.protocol.errors import ContextLengthExceeded, InvalidArgument
from sllm_runtime.worker.chat import ChatTemplate
from sllm_runtime.worker.engine.base import Sampling
from sllm_runtime.worker.tokens import Tokens

MAX_STOPS = 16


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
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many)] = Field(
        default=(), max_length=MAX_STOPS, strict=False
    )
    stop_ids: tuple[int, ...] = Field(default=(), strict=False)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)

    def sampling(self, max_tokens: int, *, temperature: float, logprobs: int | None = None) -> Sampling:
        """As the engine takes it; ``temperature`` is the default."""
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
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
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=logprobs,
        )


def _token_ids(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise InvalidArgument("logit_bias: its keys are token ids", field="logit_bias") from error


def sampling(max_tokens: int, options: Mapping[str, Any]) -> Sampling:
    """``generate``'s keyword arguments; greedy unless they say otherwise. Raises ``InvalidArgument`` by name."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise InvalidArgument(f"max_tokens is {max_tokens!r}; give a number from 0 on", field="max_tokens")
    given = {key: dict((str(k), v) for k, v in value.items()) if key == "logit_bias" and value else value
             for key, value in options.items()}  # fmt: skip
    try:
        return SamplingOptions.model_validate(given).sampling(max_tokens, temperature=0.0)
    except ValidationError as error:
        raise refused(error) from error


def refused(error: ValidationError) -> InvalidArgument:
    """The first problem, by the parameter's name."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidArgument(f"there is no parameter '{path}'", field=path)
    return InvalidArgument(f"'{path}': {first['msg']} (given: {first['input']!r:.80})", field=path)


def prompt_ids(prompt: Any, tokens: Tokens, files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Token ids of text, of ids, or of chat messages. Raises ``InvalidArgument``."""
    if isinstance(prompt, str):
        return tokens.encode(prompt)
    if isinstance(prompt, Sequence) and all(isinstance(item, Mapping) for item in prompt) and prompt:
        return tokens.encode(ChatTemplate.from_files(files).render(prompt), special=False)
    if isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return tuple(prompt)
    kind = type(prompt).__name__
    raise InvalidArgument(f"the prompt is a {kind}; give text, token ids or chat messages", field="prompt")


def fit(prompt: int, wanted: int, context: int) -> int:
    """``max_tokens`` cut to what the context leaves. Raises ``ContextLengthExceeded`` where nothing is left."""
    if prompt >= context:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens and this model's context is {context}: no token would fit; shorten it",
            field="prompt",
        )
    return min(wanted, context - prompt)

"""What no engine could run is refused before it costs anybody a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sllm_runtime.protocol.errors import ContextLengthExceeded, InvalidRequest
from sllm_runtime.worker.engine.base import Request, Sampling

_DEFAULT_CONTEXT: Final = 2048
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def check(request: Request, max_context: int, vocabulary: int) -> None:
    """Raises ``InvalidRequest`` or ``ContextLengthExceeded`` naming the field."""
    if not request.prompt:
        raise InvalidRequest("the prompt is empty: it has no token", field="prompt")
    if len(request.prompt) >= max_context:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {len(request.prompt)} tokens, and this model's maximum context length is "
            f"{max_context} tokens, of which one at least is drawn; shorten it",
            field="prompt",
        )
    if len(request.prompt) + len(request.emitted) > max_context:
        raise ContextLengthExceeded(
            f"{len(request.prompt)} tokens of prompt and {len(request.emitted)} of output are above {max_context}, the "
            "model's context; it was another model that wrote them",
            field="emitted",
        )
    for name, ids in (
        ("prompt", request.prompt),
        ("emitted", request.emitted),
        ("logit_bias", request.sampling.logit_bias),
        ("stop_ids", request.sampling.stop_ids),
    ):
        check_ids(name, ids, vocabulary)
    _check_sampling(request.sampling)


def check_ids(field: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raises ``InvalidRequest`` naming ``field`` for an id that is outside the vocabulary."""
    wrong = next((number for number in ids if not 0 <= number < vocabulary), None)
    if wrong is not None:
        raise InvalidRequest(f"token id {wrong} is not below {vocabulary}, the vocabulary", field=field)


def refuse_scores(request: Request) -> None:
    """For an engine that keeps no row of a prompt but its last: raises ``InvalidRequest`` if ``request`` asks for the
    log probabilities of its prompt."""
    if request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "the engine of this model gives no log probabilities of a prompt; leave out echo or logprobs",
            field="logprobs",
        )


def refuse_adapter(request: Request) -> None:
    """For an engine that runs none: raises ``InvalidRequest`` if ``request`` names one."""
    if request.lora is not None:
        raise InvalidRequest("the engine of this model runs no adapters; name the model alone", field="model")


def _check_sampling(sampling: Sampling) -> None:
    """Values that contradict each other or mean nothing."""
    rules = (
        ("max_tokens", sampling.max_tokens >= 0, "must not be negative"),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, "must lie between 0 and max_tokens"),
        ("temperature", 0 <= sampling.temperature < math.inf, "must be finite and not negative"),
        ("top_p", 0 <= sampling.top_p <= 1, "must lie between 0 and 1"),
        ("top_k", sampling.top_k >= 0, "must not be negative"),
        ("min_p", 0 <= sampling.min_p <= 1, "must lie between 0 and 1"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < math.inf, "must be above 0"),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), "must be finite"),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty), "must be finite"),
        ("logprobs", sampling.logprobs is None or sampling.logprobs >= 0, "must not be negative"),
        ("logit_bias", not any(math.isnan(bias) for bias in sampling.logit_bias.values()), "must not be NaN"),
    )
    for name, right, rule in rules:
        if not right:
            raise InvalidRequest(f"{name} {rule}, not {getattr(sampling, name)}", field=name)


def max_context(config: Mapping[str, Any]) -> int:
    """Most tokens a model takes, by its config.json."""
    text = config.get("text_config", config)
    found = [text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)]
    return int(found[0]) if found else _DEFAULT_CONTEXT


def end_ids(config: Mapping[str, Any], generation_config: bytes | None, vocabulary: int) -> frozenset[int]:
    """Ids that end an output: generation_config.json's where it names any, else config.json's. Of these the ones below
    ``vocabulary``: no row has a logit of others, so no output ends with them."""
    settings = json.loads(generation_config) if generation_config else {}
    value = settings.get("eos_token_id", config.get("eos_token_id"))
    ids: Sequence[Any] = value if isinstance(value, list) else [value]
    return frozenset(number for number in ids if isinstance(number, int) and 0 <= number < vocabulary)

"""The engine over transformers: a plain forward with a KV cache for each request, one token a step for each."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache

from sllm_runtime.protocol.errors import ContextLengthExceeded, FunctionError, InvalidRequest, SllmError
from sllm_runtime.worker.engine.base import Capabilities, Event, Exported, Finish, Request, Stats
from sllm_runtime.worker.engine.sampling import choose

_DEFAULT_CONTEXT = 2048
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(slots=True)
class _Running:
    request: Request
    output: list[int]
    cache: Any
    fed: int = 0
    """Tokens the cache holds."""


@dataclass(slots=True)
class _Counters:
    prefilled: int = 0
    generated: int = 0


@dataclass(slots=True)
class TransformersEngine:
    """``module`` is a causal language model of transformers in eval mode, ``eos`` the ids that end an output."""

    module: Any
    eos: frozenset[int]
    max_context: int
    vocabulary: int
    name: str = "transformers"
    capabilities: Capabilities = field(default_factory=Capabilities)
    _waiting: dict[int, _Running] = field(default_factory=dict)
    _running: dict[int, _Running] = field(default_factory=dict)
    _counters: _Counters = field(default_factory=_Counters)
    _options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Only the last row is sampled from; older classes compute the head for all of them.
        if "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            self._options["logits_to_keep"] = 1

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """See ``Engine.add``."""
        check(request, self.max_context, self.vocabulary)
        cache = DynamicCache(config=self.module.config)
        self._waiting[request.id] = _Running(request, list(request.emitted), cache)

    def step(self) -> list[Event]:
        """At most one prefill, then one token for every request that runs: a long prompt delays the others by one
        prefill and not by all that wait."""
        events: list[Event] = []
        running = list(self._running.values())
        if self._waiting:
            number = next(iter(self._waiting))
            self._running[number] = self._waiting.pop(number)
            running.append(self._running[number])
        with torch.inference_mode():
            for run in running:
                event = self._advance(run)
                if event.finish is not None or event.error is not None:
                    del self._running[run.request.id]
                events.append(event)
        return events

    def cancel(self, request: int) -> None:
        """See ``Engine.cancel``."""
        self._waiting.pop(request, None)
        self._running.pop(request, None)

    def export(self, request: int) -> Exported:
        """See ``Engine.export``."""
        run = self._running.get(request) or self._waiting[request]
        return Exported(run.request, tuple(run.output))

    def stats(self) -> Stats:
        """See ``Engine.stats``."""
        return Stats(len(self._waiting), len(self._running), self._counters.prefilled, self._counters.generated)

    def _advance(self, run: _Running) -> Event:
        number = run.request.id
        sampling = run.request.sampling
        if self._full(run):  # a resume of what was complete
            return Event(request=number, finish="length")
        try:
            row = self._forward(run)
            picked = choose(row, self._blocked(run), run.request.prompt, run.output, run.request.choice)
        except SllmError as error:
            return Event(request=number, error=error)
        except Exception as error:  # whatever a model's forward raises fails its own request, never the batch
            return Event(request=number, error=FunctionError(f"the model failed: {type(error).__name__}: {error}"))
        if self._ends(picked.id, run):
            return Event(request=number, finish="stop")
        run.output.append(picked.id)
        self._counters.generated += 1
        finish: Finish | None = "length" if self._full(run) else None
        logprobs = () if sampling.logprobs is None else (picked,)
        return Event(request=number, ids=(picked.id,), logprobs=logprobs, finish=finish)

    def _forward(self, run: _Running) -> Any:
        tokens = (*run.request.prompt, *run.output)
        new = tokens[run.fed :]
        if len(new) > 1:
            self._counters.prefilled += len(new)
        ids = torch.tensor([new], dtype=torch.long, device=self.module.device)
        output = self.module(input_ids=ids, past_key_values=run.cache, use_cache=True, **self._options)
        run.fed = len(tokens)
        return output.logits[0, -1].to(torch.float32).cpu().numpy()

    def _blocked(self, run: _Running) -> Any:
        """The request's sampling, with the ends forbidden until ``min_tokens`` are out."""
        sampling = run.request.sampling
        if len(run.output) >= sampling.min_tokens:
            return sampling
        ends = dict.fromkeys((*self.eos, *sampling.stop_ids), float("-inf"))
        return replace(sampling, logit_bias={**sampling.logit_bias, **ends})

    def _ends(self, token: int, run: _Running) -> bool:
        sampling = run.request.sampling
        return token in sampling.stop_ids or (token in self.eos and not sampling.ignore_eos)

    def _full(self, run: _Running) -> bool:
        tokens = len(run.request.prompt) + len(run.output)
        return len(run.output) >= run.request.sampling.max_tokens or tokens >= self.max_context


def check(request: Request, max_context: int, vocabulary: int) -> None:
    """Raises ``InvalidRequest`` or ``ContextLengthExceeded`` for what no engine could run."""
    if not request.prompt:
        raise InvalidRequest("the prompt is empty: it has no token", field="prompt")
    if len(request.prompt) >= max_context:
        raise ContextLengthExceeded(
            f"the prompt has {len(request.prompt)} tokens, the model's context is {max_context} and one token at "
            "least must fit; shorten the prompt",
            field="prompt",
        )
    for field_name, ids in (("prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
        wrong = next((number for number in ids if not 0 <= number < vocabulary), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is not below {vocabulary}, the vocabulary", field=field_name)


def max_context(config: Mapping[str, Any]) -> int:
    """Most tokens a model takes, by its config.json."""
    text = config.get("text_config", config)
    found = [text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)]
    return int(found[0]) if found else _DEFAULT_CONTEXT


def end_ids(config: Mapping[str, Any], generation_config: bytes | None) -> frozenset[int]:
    """Ids that end an output: generation_config.json's where it names any, else config.json's."""
    settings = json.loads(generation_config) if generation_config else {}
    value = settings.get("eos_token_id", config.get("eos_token_id"))
    ids: Sequence[Any] = value if isinstance(value, list) else [value]
    return frozenset(number for number in ids if isinstance(number, int))

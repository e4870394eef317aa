"""The engine over transformers: a plain forward with a KV cache for each request, one token a step for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import DynamicCache

from sllm_runtime.protocol.errors import Draining, FunctionError, SllmError
from sllm_runtime.worker.engine import admission, devices, endings
from sllm_runtime.worker.engine.base import (
    AdapterTable,
    Capabilities,
    Event,
    Exported,
    Finish,
    Request,
    Stats,
    TokenChoice,
)
from sllm_runtime.worker.engine.choosing import next_token
from sllm_runtime.worker.engine.sampling import Seen, broken, reported

_SCORED: Final = 32
"""Positions of a prompt that are fed at once where every row's logits are wanted: what they take is bounded so."""


@dataclass(slots=True)
class _Running:
    request: Request
    output: list[int]
    cache: Any
    fed: int = 0
    """Tokens the cache holds."""
    scores: list[TokenChoice] = field(default_factory=list)
    """Of the prompt's tokens from the second on, where they are asked for."""
    seen: Seen = field(init=False)
    """What its penalties count."""

    def __post_init__(self) -> None:
        self.seen = Seen(self.request.prompt)

    @property
    def scoring(self) -> bool:
        """Whether some of them are to be computed."""
        return self.request.sampling.prompt_logprobs is not None and not self.scores and len(self.request.prompt) > 1


@dataclass(slots=True)
class _Counters:
    prefilled: int = 0
    generated: int = 0


@dataclass(slots=True)
class TransformersEngine:
    """``module`` is a causal language model of transformers in eval mode, ``eos`` the ids that end an output;
    ``why_broken`` as ``Backend.broken``."""

    module: Any
    eos: frozenset[int]
    max_context: int
    vocabulary: int
    why_broken: Callable[[], str] = lambda: ""
    name: str = "transformers"
    fingerprint: str = ""
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(sleep=True, prompt_logprobs=True))
    adapters: AdapterTable | None = None
    _waiting: dict[int, _Running] = field(default_factory=dict)
    _running: dict[int, _Running] = field(default_factory=dict)
    _counters: _Counters = field(default_factory=_Counters)
    _options: dict[str, Any] = field(default_factory=dict)
    _draining: bool = False
    _asleep: bool = False

    def __post_init__(self) -> None:
        # Only the last row is sampled from; older classes compute the head for all of them.
        if "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            self._options["logits_to_keep"] = 1

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running) and not self._asleep

    def add(self, request: Request) -> None:
        """See ``Engine.add``."""
        if self._draining:
            raise Draining("this instance's engine takes no more requests; the call goes to another instance")
        admission.check(request, self.max_context, self.vocabulary)
        admission.refuse_adapter(request)
        self._waiting[request.id] = _Running(request, list(request.emitted), self._cache())

    def step(self) -> list[Event]:
        """At most one prefill, then one token for every request that runs: a long prompt delays the others by one
        prefill and not by all that wait. Raises ``InstanceLost`` where its device computes nothing more."""
        if self._asleep:
            return []
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

    def feed(self, request: int, first: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Engine.feed``: it takes none, since its prefill and its decoding differ in bits."""
        return ()

    def hold(self, request: int) -> None:
        """See ``Engine.hold``: it cannot."""

    def release(self, request: int) -> None:
        """See ``Engine.release``: it holds none."""

    def export(self, request: int) -> Exported:
        """See ``Engine.export``."""
        run = self._running.get(request) or self._waiting[request]
        return Exported(run.request, tuple(run.output))

    def drain(self) -> None:
        """See ``Engine.drain``."""
        self._draining = True

    def sleep(self) -> None:
        """See ``Engine.sleep``: what ran waits and is computed again."""
        self._asleep = True
        self._waiting = {**self._running, **self._waiting}
        self._running = {}
        for run in self._waiting.values():
            run.cache, run.fed, run.scores = self._cache(), 0, []

    def wake(self) -> None:
        """See ``Engine.wake``."""
        self._asleep = False

    def stats(self) -> Stats:
        """See ``Engine.stats``."""
        return Stats(len(self._waiting), len(self._running), self._counters.prefilled, self._counters.generated)

    def _advance(self, run: _Running) -> Event:
        number = run.request.id
        sampling = run.request.sampling
        if endings.complete(run.request, len(run.output), self.max_context):  # a resume of what was complete
            return Event(request=number, finish="length")
        first = len(run.output) == len(run.request.emitted)
        try:
            if run.scoring:
                self._score(run)
                if (wrong := broken(run.scores)) is not None:
                    raise wrong
            if self._full(run):
                return Event(request=number, prompt=tuple(run.scores), finish="length")
            row = self._forward(run)
            picked = next_token(row, run.request, run.output, self.eos, run.seen)
        except SllmError as error:
            return Event(request=number, error=error)
        except Exception as error:  # whatever a model's forward raises fails its own request, never the batch
            if why := self.why_broken():
                raise devices.lost(why, error) from error
            return Event(request=number, error=FunctionError(f"the model failed: {type(error).__name__}: {error}"))
        prompt = tuple(run.scores) if first else ()
        if endings.ends(picked.id, sampling, self.eos):
            return Event(request=number, prompt=prompt, finish="stop")
        run.output.append(picked.id)
        self._counters.generated += 1
        finish: Finish | None = "length" if self._full(run) else None
        logprobs = () if sampling.logprobs is None else (picked,)
        return Event(request=number, ids=(picked.id,), logprobs=logprobs, prompt=prompt, finish=finish)

    def _forward(self, run: _Running) -> Any:
        new = (*run.request.prompt, *run.output)[run.fed :]
        if len(new) > 1:
            self._counters.prefilled += len(new)
        return self._fed(run, new, self._options)[-1]

    def _score(self, run: _Running) -> None:
        """Feed the prompt but for its last token: each row tells of the token after its own."""
        prompt, count = run.request.prompt, run.request.sampling.prompt_logprobs
        for at in range(0, len(prompt) - 1, _SCORED):
            end = min(at + _SCORED, len(prompt) - 1)
            rows = self._fed(run, prompt[at:end], {})
            following = prompt[at + 1 : end + 1]
            run.scores += (reported(row, token, count) for row, token in zip(rows, following, strict=True))
        self._counters.prefilled += len(prompt) - 1

    def _fed(self, run: _Running, new: Sequence[int], options: Mapping[str, Any]) -> Any:
        """Float32 logits of the rows of ``new``, or of the last of them, by ``options``."""
        ids = torch.tensor([new], dtype=torch.long, device=self.module.device)
        output = self.module(input_ids=ids, past_key_values=run.cache, use_cache=True, **options)
        run.fed += len(new)
        return output.logits[0].to(torch.float32).cpu().numpy()

    def _full(self, run: _Running) -> bool:
        return endings.full(run.request, len(run.output), self.max_context)

    def _cache(self) -> Any:
        return DynamicCache(config=self.module.config)

"""An engine that says what it is told to: for tests of everything around engines, in microseconds and without weights.

The next token is a function of the tokens so far, so a resume goes on as any exact engine's would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sllm_runtime.protocol.errors import Draining, SllmError
from sllm_runtime.worker.engine import admission, endings, feeding
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

Script = Callable[[Sequence[int], Sequence[int]], int | SllmError]
"""``(prompt, output so far)`` to the next id, or to the error that the request ends with."""


def counting(prompt: Sequence[int], output: Sequence[int]) -> int:
    """The id after the last one."""
    return (output or prompt)[-1] + 1


@dataclass(slots=True)
class ScriptedEngine:
    """Every request gets one token a step."""

    script: Script = counting
    eos: frozenset[int] = frozenset()
    max_context: int = 4096
    vocabulary: int = 1 << 20
    name: str = "scripted"
    fingerprint: str = "scripted"
    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(exact_resume=True, sleep=True, prompt_logprobs=True, feeds=True)
    )
    adapters: AdapterTable | None = None
    _outputs: dict[int, tuple[Request, list[int]]] = field(default_factory=dict)
    _draining: bool = False
    _asleep: bool = False
    _generated: int = 0

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._outputs) and not self._asleep

    def add(self, request: Request) -> None:
        """See ``Engine.add``."""
        if self._draining:
            raise Draining("this instance's engine takes no more requests; the call goes to another instance")
        admission.check(request, self.max_context, self.vocabulary)
        admission.refuse_adapter(request)
        self._outputs[request.id] = (request, list(request.emitted))

    def step(self) -> list[Event]:
        """See ``Engine.step``."""
        events = [] if self._asleep else [self._advance(*each) for each in list(self._outputs.values())]
        for event in events:
            if event.finish is not None or event.error is not None:
                del self._outputs[event.request]
        return events

    def cancel(self, request: int) -> None:
        """See ``Engine.cancel``."""
        self._outputs.pop(request, None)

    def feed(self, request: int, first: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Engine.feed``."""
        if request not in self._outputs:
            return ()
        asked, output = self._outputs[request]
        context, vocabulary = self.max_context, self.vocabulary
        new = feeding.new_ids(asked, output, first, ids, max_context=context, vocabulary=vocabulary)
        output += new
        return new

    def export(self, request: int) -> Exported:
        """See ``Engine.export``."""
        asked, output = self._outputs[request]
        return Exported(asked, tuple(output))

    def drain(self) -> None:
        """See ``Engine.drain``."""
        self._draining = True

    def sleep(self) -> None:
        """See ``Engine.sleep``."""
        self._asleep = True

    def wake(self) -> None:
        """See ``Engine.wake``."""
        self._asleep = False

    def stats(self) -> Stats:
        """See ``Engine.stats``."""
        return Stats(0, len(self._outputs), 0, self._generated)

    def _advance(self, request: Request, output: list[int]) -> Event:
        first = len(output) == len(request.emitted) and request.sampling.prompt_logprobs is not None
        prompt = tuple(TokenChoice(token, 0.0) for token in request.prompt[1:]) if first else ()
        if endings.full(request, len(output), self.max_context):
            return Event(request=request.id, prompt=prompt, finish="length")
        token = self.script(request.prompt, output)
        if isinstance(token, SllmError):
            return Event(request=request.id, error=token)
        if endings.ends(token, request.sampling, self.eos) and len(output) >= request.sampling.min_tokens:
            return Event(request=request.id, prompt=prompt, finish="stop")
        output.append(token)
        self._generated += 1
        finish: Finish | None = "length" if endings.full(request, len(output), self.max_context) else None
        logprobs = () if request.sampling.logprobs is None else (TokenChoice(token, 0.0),)
        return Event(request=request.id, ids=(token,), logprobs=logprobs, prompt=prompt, finish=finish)

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
        default_factory=lambda: Capabilities(
            exact_resume=True, sleep=True, prompt_logprobs=True, holds=True, retells=True
        )
    )
    adapters: AdapterTable | None = None
    _outputs: dict[int, tuple[Request, list[int]]] = field(default_factory=dict)
    _untold: dict[int, list[int]] = field(default_factory=dict)
    """Of requests that are told again: ids that they were given."""
    _held: dict[int, bool] = field(default_factory=dict)
    """Requests that draw nothing, and whether they have said so."""
    _draining: bool = False
    _asleep: bool = False
    _generated: int = 0

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        return not self._asleep and any(not self._held.get(number, False) for number in self._outputs)

    def add(self, request: Request) -> None:
        """See ``Engine.add``."""
        if self._draining:
            raise Draining("this instance's engine takes no more requests; the call goes to another instance")
        admission.check(request, self.max_context, self.vocabulary)
        admission.refuse_adapter(request)
        self._outputs[request.id] = (request, list(request.emitted))
        if request.retell:
            self._untold[request.id] = list(request.emitted)
        if request.held:
            self._held[request.id] = False

    def step(self) -> list[Event]:
        """See ``Engine.step``."""
        events: list[Event] = []
        for request, output in [] if self._asleep else list(self._outputs.values()):
            mine = self._tell(request, output)
            if request.id in self._held and not endings.full(request, len(output), self.max_context):
                mine += [] if self._held[request.id] else [Event(request=request.id, rests=True)]
                self._held[request.id] = True
            elif not mine or mine[-1].finish is None:
                mine.append(self._advance(request, output, first=not mine and len(output) == len(request.emitted)))
            if mine and (mine[-1].finish is not None or mine[-1].error is not None):
                self.cancel(request.id)
            events += mine
        return events

    def cancel(self, request: int) -> None:
        """See ``Engine.cancel``."""
        self._outputs.pop(request, None)
        self._untold.pop(request, None)
        self._held.pop(request, None)

    def feed(self, request: int, first: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Engine.feed``."""
        if request not in self._outputs:
            return ()
        asked, output = self._outputs[request]
        context, vocabulary = self.max_context, self.vocabulary
        new = feeding.new_ids(asked, output, first, ids, max_context=context, vocabulary=vocabulary)
        output += new
        if asked.retell:
            self._untold[request] += new
        if new and request in self._held:
            self._held[request] = False
        return new

    def hold(self, request: int) -> None:
        """See ``Engine.hold``."""
        if request in self._outputs:
            self._held.setdefault(request, False)

    def release(self, request: int) -> None:
        """See ``Engine.release``."""
        self._held.pop(request, None)

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

    def _tell(self, request: Request, output: list[int]) -> list[Event]:
        ids, events = self._untold.get(request.id, []), []
        for at, token in enumerate(ids, len(output) - len(ids)):
            prompt = self._scores(request) if at == 0 else ()
            full = endings.full(request, at + 1, self.max_context)
            events.append(self._event(request, token, prompt, "length" if full else None))
        ids.clear()
        return events

    def _scores(self, request: Request) -> tuple[TokenChoice, ...]:
        asked = request.sampling.prompt_logprobs is not None
        return tuple(TokenChoice(token, 0.0) for token in request.prompt[1:]) if asked else ()

    def _event(self, request: Request, token: int, prompt: tuple[TokenChoice, ...], finish: Finish | None) -> Event:
        logprobs = () if request.sampling.logprobs is None else (TokenChoice(token, 0.0),)
        return Event(request=request.id, ids=(token,), logprobs=logprobs, prompt=prompt, finish=finish)

    def _advance(self, request: Request, output: list[int], *, first: bool) -> Event:
        prompt = self._scores(request) if first else ()
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
        return self._event(request, token, prompt, finish)

"""What an engine is: a synchronous core that is fed requests and stepped. Text, stop strings and threads are not its
business (``text``, ``loop``), so that every engine gets them alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from sllm_runtime.protocol.errors import SllmError

Finish = Literal["stop", "length"]
Mask = npt.NDArray[np.bool_]
"""(vocabulary): which ids may come next."""
GREEDY_BELOW: Final = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a continuation is chosen. ``max_tokens`` and ``min_tokens`` count the whole output, resumed ids included."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; the two below over the output alone, as OpenAI defines them."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    """Strings: matched by ``text``, not by engines."""
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """``None``: 0, unless the call that generates has one."""
    logprobs: int | None = None
    """Alternatives to report with each token; ``None``: no log probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt but its first, which follows nothing."""

    @property
    def scored(self) -> bool:
        """Whether log probabilities of any tokens are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def penalised(self) -> bool:
        """Whether a token's score depends on which ids there are already."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken. A temperature too small to divide float32 logits by means that too."""
        return self.temperature < GREEDY_BELOW


class Constraint(Protocol):
    """A rule that outputs keep, as a shape they have. It belongs to one request."""

    @property
    def field(self) -> str:
        """What of a request asks for it."""

    def allowed(self, output: Sequence[int]) -> Mask:
        """Which ids may follow ``output``: a function of these ids alone, so that a resume goes on alike. Raises
        ``SllmError``, which ends the request."""

    def forget(self) -> None:
        """Its output has ended: what it keeps beside the rule itself is given up. Repeatable, and ``allowed`` may be
        asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One continuation. ``emitted``: ids this output already has (a resume), which are prefilled and not reported."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    emitted: tuple[int, ...] = ()
    choice: int = 0
    """Which of ``n`` continuations of one prompt; each has its own noise."""
    lora: str | None = None
    """The adapter that its rows go through."""
    constraints: tuple[Constraint, ...] = ()
    held: bool = False
    """It draws nothing before ``Engine.release``: what it was given is computed but for its last token, and what it is
    fed meanwhile. For engines that can (``holds``)."""
    retell: bool = False
    """``emitted`` and fed ids are reported all the same, as those that are drawn: with their log probabilities, one to
    an event. For engines that can (``retells``)."""


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Natural-log probability of the chosen id and of the likeliest alternatives, before temperature and filters."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one step did for one request. ``ids`` leaves out the id that ended it. With ``finish`` or ``error`` set
    the engine has forgotten the request."""

    request: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenChoice, ...] = ()
    prompt: tuple[TokenChoice, ...] = ()
    """Of the prompt's tokens from the second on, where the request asks for them; all in its first event."""
    finish: Finish | None = None
    cached: int = 0
    """Prompt tokens that were not computed anew."""
    rests: bool = False
    """It is held, and what it was given is computed. Nothing else is told with that."""
    error: SllmError | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """A running request as another engine of the same fingerprint can go on with it."""

    request: Request
    ids: tuple[int, ...]
    """The whole output so far."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers may rely on."""

    seeded: bool = True
    penalties: bool = True
    exact_resume: bool = False
    layer_ranges: bool = False
    kv_transfer: bool = False
    lora: bool = False
    sleep: bool = False
    prompt_logprobs: bool = False
    holds: bool = False
    """A request may be held before it draws (``Request.held``), and while it does (``Engine.hold``); and ids may be fed
    into it: their rows have the bits that drawing them would have given."""
    retells: bool = False
    """Ids that an output was given are reported with the log probabilities that drawing them gave (``retell``)."""

    def names(self) -> tuple[str, ...]:
        """Those that hold, for ``Ready.capabilities``."""
        return tuple(name for name in self.__slots__ if getattr(self, name))


@dataclass(frozen=True, slots=True)
class Stats:
    """Requests waiting for their prefill and running, tokens computed since the start."""

    waiting: int
    running: int
    prefilled: int
    generated: int
    kv_pages: int = 0
    """Of the KV cache; 0 where an engine has no pages. Of these, held by requests, and kept for the next that begin
    alike."""
    kv_held: int = 0
    kv_cached: int = 0
    preempted: int = 0
    """How often a request was computed again because another needed its pages."""


class AdapterTable(Protocol):
    """The adapters that an engine's requests may name. From any thread; requests that run keep theirs."""

    def put(self, name: str, adapter: Any) -> None:
        """From now on. Raises ``UnsupportedModel`` or ``InvalidCheckpoint`` for one that does not fit the model."""

    def drop(self, name: str) -> None:
        """No longer. Repeatable."""


class Engine(Protocol):
    """Used from one thread only."""

    @property
    def name(self) -> str:
        """Part of the numerics fingerprint."""

    @property
    def fingerprint(self) -> str:
        """What decides the bits of its logits beside the weights; equal ones go on with each other's requests."""

    @property
    def capabilities(self) -> Capabilities:
        """Constant for one engine."""

    @property
    def max_context(self) -> int:
        """Most tokens that prompt and output may have together."""

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""

    @property
    def adapters(self) -> AdapterTable | None:
        """LoRA adapters by name; None where it runs none."""

    def add(self, request: Request) -> None:
        """Take a request. Raises ``ModelNotFound`` for an adapter that is not there, ``InvalidRequest``,
        ``ContextLengthExceeded``, ``QueueFull`` or ``Draining``; the engine then has no part of it."""

    def step(self) -> list[Event]:
        """Advance; an error of one request is an event of its own and leaves the others alone."""

    def cancel(self, request: int) -> None:
        """Forget a request; unknown ones are no error."""

    def feed(self, request: int, first: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The output of a running request has ``ids`` from its ``first`` on: those beyond what it has are computed as
        if it had drawn them, and are in no event (but see ``retell``). Returns them: none where they leave a gap, where
        the request is unknown, or where the engine cannot (``holds``) or the request asks for log probabilities and is
        not told again. Raises ``NotDeterministic`` for ids that are not what it drew or could not be its own."""

    def hold(self, request: int) -> None:
        """A request draws no more from now on, as one that is ``held``; what a step on its way draws is told.
        Repeatable; others and unknown ones are no error, and where the engine cannot (``holds``) nothing changes."""

    def release(self, request: int) -> None:
        """A request that is held draws from now on. Repeatable; others and unknown ones are no error."""

    def export(self, request: int) -> Exported:
        """The state of a running request, which goes on. Raises ``KeyError`` if there is none."""

    def drain(self) -> None:
        """Take no more requests: ``add`` raises ``Draining``. What is there goes on."""

    def sleep(self) -> None:
        """Give memory back that only running requests need. They stay, ``step`` does nothing until ``wake``."""

    def wake(self) -> None:
        """End ``sleep``. Repeatable."""

    def stats(self) -> Stats:
        """Counters."""

"""The engine: requests in, one ragged batch a step, tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from sllm_runtime.protocol.errors import ContextLengthExceeded, Draining, InstanceLost, InternalError, SllmError
from sllm_runtime.worker.engine import admission, devices, endings, feeding
from sllm_runtime.worker.engine.base import Capabilities, Event, Exported, Finish, Request, Stats, TokenChoice
from sllm_runtime.worker.engine.ours import room
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE, ROOT, Pages, page_hash
from sllm_runtime.worker.engine.ours.rehearsal import Rehearsal
from sllm_runtime.worker.engine.ours.runner import LocalRunner, Runner
from sllm_runtime.worker.engine.ours.sampler import choose_rows
from sllm_runtime.worker.engine.ours.scheduler import Limits, Scheduler, Sequence, State
from sllm_runtime.worker.engine.ours.scoring import given, score
from sllm_runtime.worker.engine.sampling import broken


@dataclass(frozen=True, slots=True)
class KvPage:
    """One full page as it travels: ``tokens`` of its PAGE positions, ``content`` as ``KvStore.read`` gives it."""

    tokens: tuple[int, ...]
    content: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One that is on its way: whose rows come back, and how many tokens each had when it left."""

    samples: tuple[Sequence, ...]
    lengths: tuple[int, ...]


class OurEngine:
    """``kv_bytes`` bounds the cache, at least one page. Used from one thread only; see ``base.Engine``.

    ``runner``: who computes; the layers of ``decoder`` in this process unless it is given.

    Raises ``ContextLengthExceeded`` from ``add`` for what the cache could never hold, so a request that was taken is
    never starved of pages: what runs beside it is preempted first.
    """

    name = "ours"

    def __init__(
        self,
        decoder: Decoder,
        eos: frozenset[int],
        numerics: Numerics,
        kv_bytes: int,
        *,
        proven: bool = False,
        fingerprint: str = "",
        max_context: int | None = None,
        limits: Limits | None = None,
        runner: Runner | None = None,
    ) -> None:
        limits = limits or Limits()
        self.decoder = decoder
        self.vocabulary = decoder.vocabulary
        self.fingerprint = fingerprint
        self.numerics = numerics
        self.runner: Runner = runner or LocalRunner(decoder, numerics)
        self._head = self.runner.head
        whole, lora = self._head is not None, self.runner.lora
        self.capabilities = Capabilities(
            exact_resume=proven,
            layer_ranges=self.runner.layer_ranges,
            kv_transfer=whole,
            lora=lora,
            sleep=True,
            prompt_logprobs=whole,
            holds=proven,
            retells=whole and proven,
        )
        self.adapters = decoder.lora if lora else None
        self._eos = eos
        context = min(decoder.context, max_context or decoder.context)
        most = -(-context // PAGE) * limits.running
        self._total = max(1, min(self.runner.room(kv_bytes), most))
        self.max_context = min(context, self._total * PAGE)
        self._by_memory = self.max_context < context
        if self._by_memory and decoder.backend.shared:
            self.max_context = room.served(self._total) * PAGE
            self.fingerprint = room.class_of(fingerprint, self.max_context)
        self.scheduler = Scheduler(Pages(self._total), limits)
        self._rehearsal = Rehearsal(self.runner, numerics)
        self._awake = False
        self._steps: deque[Step] = deque()
        self._given: list[tuple[Sequence, TokenChoice]] = []  # to be told before what the step draws
        self._sequences: dict[int, Sequence] = {}
        self._complete: list[int] = []
        self._draining = False
        self._prefilled = self._generated = 0
        self.wake()

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        scheduler = self.scheduler
        owes = scheduler.busy or scheduler.tells or bool(self._complete) or bool(self._steps)
        return self._awake and (owes or self._rehearsal.due)

    def add(self, request: Request) -> None:
        """See ``Engine.add``."""
        if self._draining:
            raise Draining("this instance's engine takes no more requests; the call goes to another instance")
        if self._by_memory and len(request.prompt) >= self.max_context:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens, the KV memory of this instance holds "
                f"{self.max_context}; shorten the prompt or raise {self.decoder.backend.bound}=... in @model_function",
                field="prompt",
            )
        admission.check(request, self.max_context, self.vocabulary)
        if self.adapters is None:
            admission.refuse_adapter(request)
        if not self.capabilities.prompt_logprobs:
            admission.refuse_scores(request)
        adapter = self.decoder.lora.get(request.lora)
        if endings.complete(request, len(request.emitted), self.max_context):
            self._complete.append(request.id)  # a resume of what was complete
            return
        self._sequences[request.id] = self.scheduler.add(request, adapter)

    def step(self) -> list[Event]:
        """See ``Engine.step``: one token for each that decodes, some prompt tokens for those that do not yet. Raises
        ``InstanceLost`` where a step failed and no other one can be computed.

        Begins as many steps as the runner takes, and ends the oldest.
        """
        events = [Event(request=number, finish="length") for number in self._complete]
        self._complete.clear()
        if not self._awake:
            return events
        try:
            while len(self._steps) < self.runner.depth and self._launch():
                pass
            told, self._given = self._given, []
            events += [self._tell(*each) for each in told if each[0].state is not State.DONE]
            if self._steps:
                events += self._collect(self._steps.popleft())
        except SllmError as error:  # the runner's: what was on its way is lost
            self._steps.clear()
            if isinstance(error, InternalError):  # a bug in a process that computes with this one: as if it had died
                raise InstanceLost(error.message) from error
            raise
        except Exception as error:
            if why := self.decoder.backend.broken():
                raise devices.lost(why, error) from error
            raise
        if rested := self.scheduler.rested():
            self._rehearsal.plan(self.scheduler.running)
            events += [Event(request=sequence.request.id, rests=True) for sequence in rested]
        if not self.scheduler.busy:
            self.scheduler.check()
        return events

    def _launch(self) -> bool:
        """Begin a step; False if there is nothing to compute for anybody (then what those who rest will compute is
        rehearsed). What is to be computed later sees it as done: steps are computed in order."""
        chunks = self.scheduler.schedule(self.runner.depth)
        if not chunks:
            self._rehearsal.compute()
            return False
        samples = self.runner.launch(chunks, self.scheduler.pages.fresh())
        self._rehearsal.computed(chunks)
        if self._head is not None:
            score(chunks, self._head)
            self._given += given(chunks, self._head)
        for chunk in chunks:
            self._prefilled += chunk.count if chunk.sequence.state is State.PREFILL else 0
            self.scheduler.computed(chunk)
        self._steps.append(Step(samples, tuple(len(sequence.tokens) for sequence in samples)))
        return True

    def _collect(self, step: Step) -> list[Event]:
        found = self.runner.collect()
        if found is None:
            return []
        picked = choose_rows(found, step.samples, self._eos)
        return [
            self._advance(sequence, choice)
            for sequence, length, choice in zip(step.samples, step.lengths, picked, strict=True)
            # Cancelled, or preempted and computed again, while the step was on its way.
            if sequence.state is not State.DONE and len(sequence.tokens) == length
        ]

    def cancel(self, request: int) -> None:
        """See ``Engine.cancel``."""
        if request in self._complete:
            self._complete.remove(request)
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def feed(self, request: int, first: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Engine.feed``: they are prefilled onto the KV cache that the request has."""
        sequence = self._sequences.get(request)
        if sequence is None or not self.capabilities.holds:
            return ()
        asked, context = sequence.request, self.max_context
        new = feeding.new_ids(asked, sequence.output, first, ids, max_context=context, vocabulary=self.vocabulary)
        self.scheduler.feed(sequence, new)
        if new and endings.complete(asked, sequence.produced, context):
            self.cancel(request)
            self._complete.append(request)
        return new

    def hold(self, request: int) -> None:
        """See ``Engine.hold``."""
        sequence = self._sequences.get(request)
        if sequence is not None and self.capabilities.holds:
            self.scheduler.hold(sequence)

    def release(self, request: int) -> None:
        """See ``Engine.release``."""
        sequence = self._sequences.get(request)
        if sequence is not None:
            self.scheduler.release(sequence)

    def export(self, request: int) -> Exported:
        """See ``Engine.export``."""
        sequence = self._sequences[request]
        return Exported(sequence.request, tuple(sequence.output))

    def export_pages(self, request: int) -> list[KvPage]:
        """Copies of a request's full pages. Raises ``KeyError`` if there is no such request."""
        sequence = self._sequences[request]
        kv = self.runner.kv
        if kv is None:
            return []
        return [
            KvPage(tuple(sequence.tokens[at * PAGE : (at + 1) * PAGE]), kv.read(page))
            for at, page in enumerate(sequence.pages[: sequence.computed // PAGE])
        ]

    def import_pages(self, pages: Many[KvPage], lora: str | None = None) -> int:
        """Take the first pages of a sequence (of the adapter ``lora``) from an engine of the same fingerprint: a
        request that begins with their tokens will find them. Returns how many found room. Raises ``ValueError`` for
        pages of another shape, ``ModelNotFound``."""
        adapter = self.decoder.lora.get(lora)
        kv, key, taken = self.runner.kv, ROOT if adapter is None else adapter.root, []
        try:
            for each in pages:
                page = self.scheduler.pages.take() if kv is not None else None
                if page is None or kv is None:
                    break
                taken.append(page)
                kv.fill(page, each.content)
                key = page_hash(key, each.tokens)
                self.scheduler.pages.keep(page, key)
        finally:
            self.scheduler.pages.fresh()  # they have their content; one that has not is taken again first
            self.scheduler.pages.release(taken)
        return len(taken)

    def drain(self) -> None:
        """See ``Engine.drain``."""
        self._draining = True

    def sleep(self) -> None:
        """See ``Engine.sleep``: the KV cache is given back, what ran waits and is computed again after ``wake``."""
        self.scheduler.preempt_all()
        self.scheduler.pages.drop_cached()
        self.runner.sleep()
        self._awake = False

    def wake(self) -> None:
        """See ``Engine.wake``."""
        if not self._awake:
            self.runner.wake(self._total)
            self._awake = True

    def stats(self) -> Stats:
        """See ``Engine.stats``."""
        scheduler = self.scheduler
        return Stats(
            len(scheduler.waiting),
            len(scheduler.running),
            self._prefilled,
            self._generated,
            kv_pages=self._total,
            kv_held=scheduler.pages.held,
            kv_cached=scheduler.pages.cached,
            preempted=scheduler.preempted,
        )

    def _advance(self, sequence: Sequence, picked: TokenChoice | SllmError) -> Event:
        request = sequence.request
        if isinstance(picked, SllmError):
            self.cancel(request.id)
            return Event(request=request.id, error=picked)
        if endings.full(request, sequence.produced, self.max_context):  # its prompt alone was asked about
            return self._event(sequence, None, "length")
        if endings.ends(picked.id, request.sampling, self._eos):
            return self._event(sequence, None, "stop")
        sequence.tokens.append(picked.id)
        self._generated += 1
        return self._tell(sequence, picked)

    def _tell(self, sequence: Sequence, choice: TokenChoice) -> Event:
        """The next id of an output, drawn or given, and maybe its last."""
        sequence.told += 1
        full = endings.full(sequence.request, sequence.told, self.max_context)
        return self._event(sequence, choice, "length" if full else None)

    def _event(self, sequence: Sequence, choice: TokenChoice | None, finish: Finish | None) -> Event:
        number, scored = sequence.request.id, sequence.request.sampling.logprobs is not None
        prompt = () if sequence.spoken else tuple(sequence.scores)
        choices = () if choice is None else (choice,)
        wrong = broken((*prompt, *choices))
        if wrong is not None or finish is not None:
            self.cancel(number)
        if wrong is not None:
            return Event(request=number, error=wrong)
        sequence.spoken = True
        ids, told = tuple(each.id for each in choices), choices if scored else ()
        return Event(request=number, ids=ids, logprobs=told, prompt=prompt, finish=finish, cached=sequence.cached)

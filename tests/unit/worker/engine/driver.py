"""Drives our engine in tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from sllm_runtime.worker.engine.base import Engine, Event, Request, Sampling
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.batch import Batches
from sllm_runtime.worker.engine.ours.engine import KvPage, OurEngine
from sllm_runtime.worker.engine.ours.kv import KvShape, KvStore
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.model.survey import survey
from sllm_runtime.worker.engine.ours.numerics import EXACT, Numerics
from sllm_runtime.worker.engine.ours.pages import pages_for
from sllm_runtime.worker.engine.ours.sampler import Likeliest
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Limits
from sllm_runtime.worker.engine.ours.scheduler import Sequence as Running
from tests.fixtures.families import family

MIB = 2**20


def decoder(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Ours over the weights of transformers' model."""
    model = family(name, dtype)
    return build(type(model).__name__, model.config, model.state_dict(), dtype, EXACT.rows)


def names_of(name: str, low: int, high: int, dtype: torch.dtype = torch.float32) -> frozenset[str]:
    """The tensors that its layers ``[low, high)`` read."""
    model = family(name, dtype)
    shapes = {each: tuple(tensor.shape) for each, tensor in model.state_dict().items()}
    needs = survey(type(model).__name__, model.config, shapes, dtype, EXACT.rows)
    return frozenset().union(*(needs[number] for number in range(low, high)))


def exact(name: str = "llama", dtype: torch.dtype = torch.float32) -> Numerics:
    """The level that an instance takes here."""
    return _proven(name, dtype, torch.get_num_threads())


@cache
def _proven(name: str, dtype: torch.dtype, threads: int) -> Numerics:
    proof = selftest.prove(decoder(name, dtype), "")
    assert proof.exact, f"no level holds for {name} in {dtype} with {threads} threads"
    return proof.numerics


def engine(
    name: str = "llama", *, dtype: torch.dtype = torch.float32, eos: frozenset[int] = frozenset(), kv: int = 8 * MIB,
    numerics: Numerics = EXACT, proven: bool = False, **limits: int,
) -> OurEngine:  # fmt: skip
    return OurEngine(decoder(name, dtype), eos, numerics, kv, proven=proven, limits=Limits(**limits))


@cache
def page_bytes(name: str = "llama") -> int:
    made = decoder(name)
    return KvShape(made.count, made.heads.kv, made.heads.width).page_bytes


def request(number: int = 0, prompt: Sequence[int] = tuple(range(5, 17)), **sampling: Any) -> Request:
    emitted = tuple(sampling.pop("emitted", ()))
    return Request(
        id=number, prompt=tuple(prompt), emitted=emitted, sampling=Sampling(**{"max_tokens": 12, **sampling})
    )


def finish(core: Engine, events: dict[int, list[Event]] | None = None) -> dict[int, list[Event]]:
    """Step until nothing is left; events by request."""
    events = {} if events is None else events
    while core.busy:
        for event in core.step():
            events.setdefault(event.request, []).append(event)
    return events


def run(core: Engine, *requests: Request) -> dict[int, tuple[int, ...]]:
    """The new ids of each."""
    for each in requests:
        core.add(each)
    return {number: ids(events) for number, events in finish(core).items()}


def ids(events: Sequence[Event]) -> tuple[int, ...]:
    assert all(event.error is None for event in events), [event.error for event in events]
    return tuple(number for event in events for number in event.ids)


def kept(core: OurEngine) -> list[torch.Tensor]:
    """Logits of every step to come, of runners that give them for all."""
    logits: list[torch.Tensor] = []
    collect = core.runner.collect

    def collected() -> torch.Tensor | Likeliest | None:
        found = collect()
        assert not isinstance(found, Likeliest)
        if found is not None:
            logits.append(found.clone())
        return found

    core.runner.collect = collected  # type: ignore[method-assign]
    return logits


def rows_of(core: OurEngine) -> dict[tuple[int, int], torch.Tensor]:
    """Logits to come, by request and how many ids its output had then. Of runners that choose by themselves none but
    those of steps in which they do not."""
    rows: dict[tuple[int, int], torch.Tensor] = {}
    launched: deque[list[tuple[int, int]]] = deque()
    launch, collect = core.runner.launch, core.runner.collect

    def launching(chunks: Sequence[Chunk], fresh: Sequence[int]) -> tuple[Running, ...]:
        samples = launch(chunks, fresh)
        launched.append([(each.request.id, each.produced) for each in samples])
        return samples

    def collected() -> torch.Tensor | Likeliest | None:
        found, keys = collect(), launched.popleft()
        if isinstance(found, torch.Tensor):
            rows.update((key, found[at].clone()) for at, key in enumerate(keys))
        return found

    core.runner.launch = launching  # type: ignore[method-assign]
    core.runner.collect = collected  # type: ignore[method-assign]
    return rows


class Rows:
    """Computes chunks of one sequence and gives the logits of every row."""

    def __init__(self, model: Decoder, tokens: Sequence[int], numerics: Numerics = EXACT) -> None:
        shape = KvShape(model.count, model.heads.kv, model.heads.width)
        self._model = model
        self._kv = KvStore(shape, pages_for(len(tokens)))
        self._batches = Batches(self._kv, model.heads, numerics)
        request = Request(id=0, prompt=tuple(tokens), sampling=Sampling())
        self._sequence = Running(request, list(tokens), pages=list(range(self._kv.pages)))

    def chunk(self, start: int, count: int) -> torch.Tensor:
        with torch.inference_mode():
            batch = self._batches.make([Chunk(self._sequence, start, count)])
            hidden = self._model.run(self._model.begin(batch), batch, 0, self._model.count)
            return self._model.logits(hidden, torch.arange(batch.rows))[:count]


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(chr(32 + number % 90) for number in numbers)


def moves_with_its_pages(make: Callable[[], OurEngine]) -> tuple[OurEngine, list[KvPage], Request]:
    """A request goes on in another engine with its pages, and says what it says in one: that engine, the pages."""
    first = request(1, tuple(range(3, 101)) * 3, max_tokens=30)
    source, target = make(), make()
    whole = run(make(), first)[1]
    source.add(first)
    while source.stats().generated < 10:
        source.step()
    pages, exported = source.export_pages(1), source.export(1)
    assert target.import_pages(pages) == len(pages) == 2
    target.add(replace(first, emitted=exported.ids))
    events = finish(target)[1]
    assert exported.ids + ids(events) == whole
    assert events[0].cached == 256
    return target, pages, first


def pages_belong_to_their_adapter(core: OurEngine, prompt: tuple[int, ...], cached: int) -> list[Request]:
    """One prompt with each of two adapters and with none: nobody finds what another computed, everybody ``cached``
    tokens of his own again. The requests."""
    made = [replace(request(n, prompt), lora=lora) for n, lora in enumerate(("narrow", "wide", None))]
    first = run(core, *made)
    assert len(set(first.values())) == 3
    for each in made:
        core.add(replace(each, id=each.id + 10))
    again = finish(core)
    assert {number - 10: ids(events) for number, events in again.items()} == first
    assert all(events[0].cached == cached for events in again.values())
    return made

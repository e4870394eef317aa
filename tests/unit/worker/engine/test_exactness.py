"""The same tokens, and the same bits, whatever else is in the batch, wherever a call is resumed, however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import NotDeterministic
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.numerics import EXACT, Numerics
from tests.fixtures.examples import examples
from tests.unit.worker.engine import driver
from tests.unit.worker.engine.driver import Rows, decoder, exact, finish, ids, page_bytes, request, run

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.5, "seed": 5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {9: 2.0, 11: -100.0}, "min_tokens": 8},
]


@pytest.fixture
def _threads() -> Iterator[None]:
    """Two threads, where the default here is one."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def engine(*, dtype: torch.dtype = torch.float32, **options: Any) -> OurEngine:
    """As an instance has it here."""
    return driver.engine(dtype=dtype, numerics=exact(dtype=dtype), proven=True, **options)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def _cut(name: str, dtype: torch.dtype, size: int, *ways: list[int], numerics: Numerics | None = None) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(3, 101, (size,)).tolist()
    model, numerics = decoder(name, dtype), numerics or exact(name, dtype)
    whole = Rows(model, tokens, numerics).chunk(0, len(tokens))
    for cuts in ways:
        rows, at = Rows(model, tokens, numerics), 0
        for count in cuts:
            assert torch.equal(rows.chunk(at, count), whole[at : at + count]), (cuts, at)
            at += count


@DTYPES
@pytest.mark.parametrize("name", ["llama", "gemma 3", "mixtral", "falcon 40b"])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(name: str, dtype: torch.dtype) -> None:
    _cut(name, dtype, 290, [1] * 12, [7, 121, 1, 1, 127, 3], [128, 128, 1], [130, 2, 5, 61])


@DTYPES
def test_the_stricter_level_holds_where_the_self_test_says_so(dtype: torch.dtype) -> None:
    """In float32 it does not with every processor's products."""
    if not selftest.prove(decoder("llama", dtype), "", [EXACT]).exact:
        pytest.skip(f"{EXACT.name} does not hold in {dtype} on this processor, and the self-test says so")
    _cut("llama", dtype, 150, [1, 1, 2, 3, 121, 1, 1], [131], numerics=EXACT)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)],
    ids=["bfloat16", "float32"],
)
@pytest.mark.usefixtures("_threads")
def test_a_row_has_the_same_bits_with_two_threads(dtype: torch.dtype) -> None:
    _cut("llama", dtype, 150, [1, 1, 2, 3, 121, 1, 1], [131])


def stream(number: int) -> Request:
    """Requests of many kinds and lengths, some of which share a prefix."""
    shared = tuple(range(3, 101)) * 2
    own = tuple((number * 7 + at) % 97 + 3 for at in range(number * 9 % 61 + 1))
    prompt = shared[: 130 + number % 3] if number % 4 == 0 else own
    return request(number, prompt, max_tokens=10 + number % 14, **OPTIONS[number % len(OPTIONS)])


def _batches(dtype: torch.dtype, count: int) -> None:
    """The same tokens, each from the same bits."""
    alone = {number: _drawn(number, dtype) for number in range(count)}
    core = engine(dtype=dtype, prefill=96, quantum=48, running=33)
    rows = driver.rows_of(core)
    assert run(core, *(stream(number) for number in range(count))) == {n: ids for n, (ids, _) in alone.items()}
    for (number, at), row in rows.items():
        assert torch.equal(row, alone[number][1][at]), (number, at)


@DTYPES
def test_batches_up_to_33_with_joins_and_leaves(dtype: torch.dtype) -> None:
    _batches(dtype, 45)


@pytest.mark.slow
@DTYPES
@pytest.mark.usefixtures("_threads")
def test_batches_with_two_threads(dtype: torch.dtype) -> None:
    _batches(dtype, 45)


@settings(max_examples=examples(25))
@given(st.data())
def test_no_schedule_changes_a_token(data: st.DataObject) -> None:
    """Joins, cancellations, exports and sleeps in any order, with too little KV memory for all: the same tokens, each
    from the same bits."""
    core = engine(
        kv=data.draw(st.integers(3, 8)) * page_bytes(),
        prefill=data.draw(st.sampled_from([16, 100, 256])),
        quantum=data.draw(st.sampled_from([16, 60])),
        running=data.draw(st.integers(1, 6)),
    )
    rows = driver.rows_of(core)
    got: dict[int, tuple[int, ...]] = {}
    waiting, gone = list(data.draw(st.permutations(range(9)))), set()
    while waiting or core.busy:
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "cancel", "move", "sleep"]))
        if action == "add" and waiting:
            core.add(stream(waiting.pop()))
        elif action == "cancel" and got:
            chosen = data.draw(st.sampled_from(sorted(got)))
            gone.add(chosen)
            core.cancel(chosen)
        elif action == "move" and got:
            _move(core, data.draw(st.sampled_from(sorted(got))))
        elif action == "sleep":
            core.sleep()
            assert core.step() == []
            core.wake()
        for event in core.step():
            assert event.error is None
            got[event.request] = got.get(event.request, ()) + event.ids
    core.scheduler.check()
    for number, tokens in got.items():
        expected, _ = _whole(number, torch.float32)
        assert tokens == (expected[: len(tokens)] if number in gone else expected), number
    for (number, at), row in rows.items():
        assert torch.equal(row, _whole(number, torch.float32)[1][at]), (number, at)


def _move(core: OurEngine, number: int) -> None:
    """As a migration does it: out of one engine, into another."""
    try:
        exported = core.export(number)
    except KeyError:
        return  # it has ended
    core.cancel(number)
    core.add(replace(exported.request, emitted=exported.ids))


@DTYPES
@settings(max_examples=5)
@given(data=st.data())
def test_fed_ids_are_as_if_drawn(data: st.DataObject, dtype: torch.dtype) -> None:
    """At any moment and in any pieces, repeated and out of order, also while it is held: the same tokens, each from the
    same bits."""
    core = engine(
        dtype=dtype,
        kv=data.draw(st.integers(4, 8)) * page_bytes(),
        prefill=data.draw(st.sampled_from([48, 256])),
        running=data.draw(st.integers(1, 6)),
    )
    rows = driver.rows_of(core)
    numbers = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True))
    whole = {number: _whole(number, dtype) for number in numbers}
    got = dict.fromkeys(numbers, tuple[int, ...]())
    held = data.draw(st.sets(st.sampled_from(numbers)))
    for number in numbers:
        core.add(replace(stream(number), held=number in held))
    moments = data.draw(st.integers(1, 40))
    while core.busy or held:
        if held and (moments == 0 or data.draw(st.integers(0, 9)) == 7):
            core.release(held.pop())
        if moments > 0:
            moments -= 1
            number = data.draw(st.sampled_from(numbers))
            first = data.draw(st.integers(0, len(whole[number][0])))
            ids = whole[number][0][first : first + data.draw(st.sampled_from([0, 1, 2, 5, 30]))]
            got[number] += core.feed(number, first, ids)
            if data.draw(st.integers(0, 9)) == 7 and len(got[number]) < len(whole[number][0]):
                core.hold(number)
                held.add(number)
            if data.draw(st.integers(0, 29)) == 7:
                core.sleep()
                core.wake()
        for event in core.step():
            assert event.error is None
            assert not event.ids or event.request not in held
            got[event.request] += event.ids
    assert got == {number: tokens for number, (tokens, _) in whole.items()}
    for (number, at), row in rows.items():
        assert torch.equal(row, whole[number][1][at]), (number, at)
    core.scheduler.check()


@cache
def _whole(number: int, dtype: torch.dtype) -> tuple[tuple[int, ...], dict[int, torch.Tensor]]:
    """``_drawn``, on one thread."""
    return _drawn(number, dtype)


def _drawn(number: int, dtype: torch.dtype) -> tuple[tuple[int, ...], dict[int, torch.Tensor]]:
    """Its output when it is alone, and the logits that each id of it was drawn from."""
    core = engine(dtype=dtype)
    rows = driver.rows_of(core)
    tokens = run(core, stream(number))[number]
    return tokens, {at: row for (_, at), row in rows.items()}


def test_what_it_was_not_is_not_fed() -> None:
    core, first = engine(), request(max_tokens=12)
    whole = run(engine(), first)[0]
    core.add(first)
    core.step()
    assert core.feed(0, 3, whole[3:6]) == (), "a gap"
    assert core.feed(1, 0, whole[:6]) == (), "nobody's"
    for wrong in ((whole[0] + 1,), (*whole, 5), (whole[0], 10**9)):
        with pytest.raises(NotDeterministic):
            core.feed(0, 0, wrong)
    assert core.feed(0, 0, whole[:7]) == whole[1:7]
    assert whole[:7] + ids(finish(core)[0]) == whole
    core.add(first)
    assert core.feed(0, 0, whole) == whole, "before its prefill, and to its end"
    (event,) = finish(core)[0]
    assert (event.ids, event.finish) == ((), "length")
    for unproven in (driver.engine(), engine()):
        scored = unproven.capabilities.holds
        unproven.add(replace(first, sampling=replace(first.sampling, logprobs=0 if scored else None)))
        assert unproven.feed(0, 0, whole[:3]) == ()
        assert run(unproven)[0] == whole


def test_pages_move_with_a_request() -> None:
    target, pages, first = driver.moves_with_its_pages(engine)
    assert target.stats().prefilled < len(first.prompt) + 10 - 255
    target.scheduler.check()
    with pytest.raises(ValueError, match="float32"):
        target.import_pages([replace(pages[0], content=pages[0].content.double())])
    target.scheduler.check()


def test_pages_that_came_before_one_that_does_not_fit_keep_their_content() -> None:
    """They are found by who begins alike."""
    _, pages, first = driver.moves_with_its_pages(engine)
    whole, target = run(engine(), first)[1], engine()
    with pytest.raises(ValueError, match="float32"):
        target.import_pages([pages[0], replace(pages[1], content=pages[1].content.double())])
    target.scheduler.check()
    target.add(first)
    events = finish(target)[1]
    assert (events[0].cached, ids(events)) == (128, whole)

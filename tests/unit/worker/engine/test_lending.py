"""Adapters on stages: the bits of one process, whoever comes and goes meanwhile; and what a stage takes of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import (
    InstanceLost,
    InvalidCheckpoint,
    InvalidRequest,
    OutOfMemory,
    ProtocolError,
    SllmError,
)
from sllm_runtime.protocol.stages import Lend, Lent, LowRankShape, Part, Step
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.ours.adapter import TILE, Adapter, LowRank
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.pipeline.lending import SEALS, Borrowed, Lender
from sllm_runtime.worker.engine.ours.scheduler import Limits
from sllm_runtime.worker.engine.sinks import Piece, ThreadSink
from tests.fixtures.families import family
from tests.fixtures.nursery import Nursery
from tests.unit.worker.engine.driver import (
    Letters,
    decoder,
    engine,
    finish,
    ids,
    kept,
    names_of,
    page_bytes,
    request,
    run,
)
from tests.unit.worker.engine.pipelines import stages

CHANGED = ("q_proj", "v_proj", "o_proj", "out_proj", "down_proj", "fc1")
NAMES = ("a", "b", "c")


def adapter(digest: str, name: str = "llama") -> Adapter:
    """Of some matrices of each layer, with content that follows from ``digest``."""
    made = torch.Generator().manual_seed(sum(digest.encode()))
    rank = 2 + len(digest)
    modules = {}
    for label, tensor in family(name).state_dict().items():
        module = label.removesuffix(".weight")
        if module.endswith(CHANGED) and tensor.ndim == 2:  # single experts take none
            outputs, inputs = tensor.shape
            a, b = torch.randn(inputs, rank, generator=made), torch.randn(rank, outputs, generator=made)
            modules[module] = LowRank(a * 0.3, b * 0.3)
    assert modules
    return Adapter(digest, modules)


def put(core: OurEngine, *digests: str, name: str = "llama") -> None:
    for digest in digests:
        core.decoder.lora.put(digest, adapter(digest, name))


def asked(number: int, lora: str | None, count: int = 14, **more: float) -> Request:
    prompt = tuple((number * 7 + at * 3) % 97 + 3 for at in range(5 + number * 41 % 180))
    return replace(request(number, prompt, max_tokens=count, **more), lora=lora)


def mixed(count: int) -> list[Request]:
    """Each with another adapter than the one before, or with none."""
    return [asked(number, (None, *NAMES)[number % 4], temperature=number % 3 / 2, seed=7) for number in range(count)]


@pytest.mark.parametrize(
    ("name", "cuts", "dtype"),
    [
        ("llama", (0, 1, 2, 3), torch.float32),
        ("gemma 3", (0, 1, 2, 3, 4), torch.bfloat16),
        ("opt", (0, 2, 3), torch.float32),
        ("mixtral", (0, 1, 3), torch.bfloat16),
    ],
)
def test_stages_with_adapters_compute_the_bits_of_one_process(
    nursery: Nursery, name: str, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = engine(name, dtype=dtype)
    put(whole, *NAMES, name=name)
    expected = kept(whole)
    tokens = run(whole, *mixed(8))
    assert tokens[1] != run(engine(name, dtype=dtype), replace(mixed(8)[1], lora=None))[1], "they change something"
    with stages(nursery, name, *cuts, depth=1, dtype=dtype) as made:
        assert made.core.capabilities.lora
        put(made.core, *NAMES, name=name)
        got = kept(made.core)
        assert run(made.core, *mixed(8)) == tokens
    assert len(got) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_adapters_come_and_go_while_steps_are_on_their_way(nursery: Nursery) -> None:
    """Also while too little memory makes sequences wait, and while those that name one run without its name."""
    whole = engine("llama")
    put(whole, *NAMES)
    expected = {each.id: run(whole, each)[each.id] for each in mixed(16)}
    got = {each.id: list[int]() for each in mixed(16)}
    limits = Limits(prefill=40, quantum=16)
    with stages(nursery, "llama", 0, 1, 2, 3, limits=limits, kv=4 * page_bytes()) as made:
        core = made.core
        for number, each in enumerate(mixed(16)):
            if each.lora is not None:
                put(core, each.lora)
            core.add(each)
            if each.lora is not None:
                core.decoder.lora.drop(each.lora)
            if number == 9:
                core.sleep()
                core.wake()
            for _ in range(6):
                for event in core.step():
                    got[event.request] += ids([event])
        for number, events in finish(core).items():
            got[number] += ids(events)
        assert got == {number: list(each) for number, each in expected.items()}
        core.scheduler.check()
        run(core, asked(0, None))
        run(core, asked(0, None))  # after a step that none of them is in, nobody has them any more
        lender = made.pipeline._lender
        assert (lender._next, len(lender._numbers), len(lender._gone)) == (12, 0, 0)


def test_without_common_memory_adapters_are_refused_by_name(nursery: Nursery) -> None:
    with stages(nursery, "llama", 0, 1, 3, tcp=True) as made:
        assert not made.core.capabilities.lora
        assert made.core.adapters is None
        with pytest.raises(InvalidRequest, match="runs no adapters") as refused:
            made.core.add(asked(0, "a"))
        assert refused.value.field == "model"
        assert run(made.core, asked(0, None)) == run(engine("llama"), asked(0, None))


def test_who_comes_after_an_adapter_that_could_not_be_handed_on_is_not_told_of_it(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance ends when its other processes are missed: a call of these seconds goes on elsewhere."""

    def none(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with stages(nursery, "llama", 0, 1, 3) as made:
        put(made.core, "a")
        first, second = ThreadSink(), ThreadSink()
        loop = EngineLoop(made.core, Letters())
        loop.on_lost(lambda error: second.put(Piece(error=error)))  # which no call is told: its process is to be ended
        loop.start()
        try:
            with monkeypatch.context() as patched:
                patched.setattr("sllm_runtime.worker.engine.ours.pipeline.lending.os.memfd_create", none)
                loop.submit(asked(0, "a"), first)
                with pytest.raises(OutOfMemory, match="cannot be handed to the other stages"):
                    list(first)
            loop.submit(asked(1, None), second)
            with pytest.raises(InstanceLost, match="cannot be handed to the other stages"):
                list(second)
        finally:
            loop.close()


# --- without processes ----------------------------------------------------------------------------
SECOND = names_of("llama", 1, 3)
STEP = Step(0, (Part(0, 3, True, (0,)), Part(5, 1, True, (1,), adapter=0)))


def borrowed() -> Borrowed:
    return Borrowed(decoder("llama").lora, SECOND)


def test_the_head_keeps_its_own_halves_and_tells_what_is_gone() -> None:
    first = names_of("llama", 0, 1)
    lender, stage, made = Lender(first), borrowed(), [adapter(name) for name in NAMES]
    whole = {name: dict(each.modules) for name, each in zip(NAMES, made, strict=True)}
    news = lender.news([None, made[0], made[1], made[0]])
    assert news is not None
    message, fd = news
    assert fd is not None
    try:
        stage.take(message, fd)
    finally:
        os.close(fd)
    assert [lender.number(each) for each in (None, *made[:2])] == [None, 0, 1]
    for number, name in enumerate(NAMES[:2]):
        here, there = made[number].modules, stage._adapters[number].modules
        assert here.keys() | there.keys() == whole[name].keys()
        assert here.keys() & there.keys() == set()
        assert {f"{module}.weight" for module in here} == first & {f"{module}.weight" for module in whole[name]}
        for module, half in there.items():
            assert torch.equal(half.a, whole[name][module].a)
            assert torch.equal(half.b, whole[name][module].b)
        assert stage._adapters[number].tile == made[number].tile == TILE
    assert lender.news(made[:2]) is None
    stage.begin(STEP)
    del made[0], here
    assert lender.news([made[0]]) == (Lend(drop=(0,)), None)
    stage.take(Lend(drop=(0,)), None)
    with pytest.raises(ProtocolError, match="names adapter 0, which is not here"):
        stage.begin(STEP)


@contextlib.contextmanager
def memory(content: bytes, seals: int = SEALS) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def table(*sizes: int, tile: int = TILE) -> bytes:
    return codec.pack((Lent(0, tile, (LowRankShape("model.layers.1.self_attn.q_proj", *sizes),)),))


GOOD, HALVES = table(64, 2, 64), bytes(4 * 2 * (64 + 64))
TWICE = codec.pack((Lent(0, TILE, ()), Lent(0, TILE, ())))


@pytest.mark.parametrize(
    ("kind", "why", "made", "rest"),
    [
        (ProtocolError, "in a memory file of", GOOD, HALVES[1:]),
        (ProtocolError, "in a memory file of", GOOD, HALVES + b"x"),
        (ProtocolError, "in a memory file of", table(1 << 30, 1 << 30, 64), HALVES),
        (ProtocolError, "not a valid", table(64, 2, 64, tile=0), HALVES),
        (ProtocolError, "not a valid", table(-64, 2, 64), HALVES),
        (ProtocolError, "came twice", TWICE, b""),
        (InvalidCheckpoint, "another model", table(63, 2, 65), HALVES),
    ],
)
def test_a_stage_takes_no_adapter_that_does_not_fit(kind: type[SllmError], why: str, made: bytes, rest: bytes) -> None:
    with memory(made + rest) as fd, pytest.raises(kind, match=why):
        borrowed().take(Lend(len(made)), fd)


def test_memory_that_others_could_change_is_not_read() -> None:
    for length, seals in ((len(GOOD), fcntl.F_SEAL_SHRINK), (9999, SEALS)):
        with memory(GOOD + HALVES, seals) as fd, pytest.raises(ProtocolError, match="in no sealed memory file"):
            borrowed().take(Lend(length), fd)


def test_a_stage_takes_what_fits_and_drops_nothing_else() -> None:
    stage = borrowed()
    with memory(GOOD + HALVES) as fd:
        stage.take(Lend(len(GOOD)), fd)
        with pytest.raises(ProtocolError, match="came twice"):
            stage.take(Lend(len(GOOD)), fd)
    stage.begin(STEP)
    with pytest.raises(ProtocolError, match="adapter 1, which is to be dropped"):
        stage.take(Lend(drop=(1,)), None)


@given(st.binary(max_size=200), st.integers(0, 250))
def test_no_bytes_do_more_than_be_refused(content: bytes, length: int) -> None:
    with memory(content) as fd:
        stage = borrowed()
        with contextlib.suppress(ProtocolError, InvalidCheckpoint):
            stage.take(Lend(length), fd)
            assert all(len(content) >= length for _ in stage._adapters)

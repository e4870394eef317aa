"""What a stage and a head take from the other processes: nothing that does not fit is computed, and it is said why."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.platform.framing import Splitter, frame
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import (
    ErrorBody,
    InstanceLost,
    OutOfMemory,
    ProtocolError,
    SllmError,
    StartFailed,
    Unavailable,
)
from sllm_runtime.protocol.stages import (
    STAGE_TRANSITIONS,
    Failed,
    Hello,
    LayerRange,
    Lend,
    OnEdge,
    Part,
    Rows,
    Sleep,
    StageState,
    Step,
    Wake,
)
from sllm_runtime.worker.engine.ours import ring
from sllm_runtime.worker.engine.ours.edge import Edges
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.pipeline.head import Pipeline
from sllm_runtime.worker.engine.ours.pipeline.stage import Stage
from sllm_runtime.worker.engine.ours.ring import Slots
from tests.unit.worker.engine.driver import MIB, decoder, page_bytes

HELLO = Hello(
    fingerprint="same", level="exact-4", dtype="float32", hidden=64, rows=320, slots=2, layers=(LayerRange(0, 1),),
    pages=9, shared=True,
)  # fmt: skip
PART = Part(0, 3, True, (0,))
STEP = Step(0, (PART,))
ROWS = Rows(0, 4)


def changed(message: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(message, **fields)


@contextlib.contextmanager
def edges(messages: Sequence[OnEdge | bytes], fds: Sequence[int] = ()) -> Iterator[tuple[Edges, socket.socket]]:
    """Edges on which ``messages`` have come and nothing follows, and the socket of the stage behind."""
    (one, before), (behind, four) = socket.socketpair(), socket.socketpair()
    with before, behind, four:
        with one:
            for number, message in enumerate(messages):
                data = message if isinstance(message, bytes) else frame(codec.pack(message))
                socket.send_fds(one, [data], fds if number == 0 else ())
        yield Edges(before, behind, patience_s=30), four


def said(sock: socket.socket) -> list[OnEdge]:
    """What came until the end."""
    splitter, found = Splitter(), []
    while data := sock.recv(1 << 16):
        found += splitter.feed(data)
    return [codec.unpack(OnEdge, each) for each in found]  # type: ignore[arg-type]


@contextlib.contextmanager
def memory(nbytes: int | None = None, *, seals: bool = True) -> Iterator[int]:
    """A descriptor as the stage before sends one."""
    if seals and nbytes is None:
        fd, _ = ring.create(Slots.of(HELLO))
    else:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes or Slots.of(HELLO).nbytes)
    try:
        yield fd
    finally:
        os.close(fd)


def stage_of(*messages: OnEdge | bytes, fds: Sequence[int] | None = None) -> tuple[SllmError, list[OnEdge]]:
    """What a stage of the last two layers comes to, and what it says to the one behind."""
    with memory() as fd, edges(messages, [fd] if fds is None else fds) as (each, behind):
        error = Stage(decoder("llama"), 1, 3, each, kv_bytes=MIB, fingerprint="same").run()
        return error, said(behind)


def test_a_stage_computes_what_fits_and_ends_with_the_one_before() -> None:
    plenty = changed(HELLO, pages=1000)
    error, heard = stage_of(
        plenty, Wake(5), STEP, ROWS, Sleep(), Wake(5), changed(STEP, number=1), changed(ROWS, step=1)
    )
    assert isinstance(error, InstanceLost)
    assert "layers [0, 1) is gone" in error.message
    assert heard[0] == changed(ALL, pages=MIB // (page_bytes() * 2 // 3))
    assert heard[1:3] == [ROWS, changed(ROWS, step=1)]
    assert heard[3:] == [Failed(error.body())]


WRONG: list[tuple[list[OnEdge | bytes], type[SllmError], str]] = [
    ([changed(HELLO, version=7)], ProtocolError, "version 7"),
    ([changed(HELLO, hidden=32)], ProtocolError, "sealed memfd"),
    ([changed(HELLO, dtype="int64")], ProtocolError, "no dtype"),
    ([changed(HELLO, dtype="load")], ProtocolError, "no dtype"),
    ([changed(HELLO, level="nearly")], ProtocolError, "level"),
    ([changed(HELLO, slots=9)], ProtocolError, "sealed memfd"),
    ([changed(HELLO, slots=10_000)], ProtocolError, "slots"),
    ([changed(HELLO, layers=())], ProtocolError, "comes before"),
    ([changed(HELLO, layers=(LayerRange(0, 2),))], ProtocolError, "comes before"),
    ([changed(HELLO, fingerprint="other")], StartFailed, "other bits"),
    ([Wake(5)], ProtocolError, "not Hello"),
    ([b"\xff\xff\xff\xff"], ProtocolError, "above the limit"),
    ([frame(b"nonsense")], ProtocolError, "not a valid"),
    ([HELLO, HELLO], ProtocolError, "Hello came"),
    ([HELLO, STEP], ProtocolError, "asleep"),
    ([HELLO, Lend(table=9)], ProtocolError, "runs no adapters"),
    ([HELLO, Sleep()], ProtocolError, "asleep"),
    ([HELLO, Wake(0)], ProtocolError, "0 pages"),
    ([HELLO, Wake(1 << 30)], ProtocolError, "pages"),
    ([HELLO, Wake(5), Wake(5)], ProtocolError, "awake"),
    ([HELLO, Wake(5), changed(STEP, number=1)], ProtocolError, "step 0 was due"),
    ([HELLO, Wake(5), changed(STEP, parts=())], ProtocolError, "no rows"),
    ([HELLO, Wake(5), changed(STEP, parts=(PART,) * 200)], ProtocolError, "more than 320"),
    ([HELLO, Wake(5), changed(STEP, fresh=(5,))], ProtocolError, "not below 5"),
    ([HELLO, Wake(5), changed(STEP, parts=(changed(PART, pages=(5,)),))], ProtocolError, "not below 5"),
    ([HELLO, Wake(5), changed(STEP, parts=(changed(PART, start=127),))], ProtocolError, "1 pages hold no 130"),
    ([HELLO, Wake(5), changed(STEP, parts=(changed(PART, pages=()),))], ProtocolError, "0 pages"),
    ([HELLO, Wake(5), STEP, changed(ROWS, rows=3)], ProtocolError, "were due"),
    ([HELLO, Wake(5), STEP, changed(ROWS, step=1)], ProtocolError, "were due"),
    ([HELLO, Wake(5), STEP, STEP], ProtocolError, "Step came"),
    ([HELLO, Failed(ErrorBody("unavailable", "no weights", 503))], Unavailable, "no weights"),
]


@pytest.mark.parametrize(("messages", "kind", "why"), WRONG)
def test_a_stage_takes_nothing_that_does_not_fit(
    messages: list[OnEdge | bytes], kind: type[SllmError], why: str
) -> None:
    error, heard = stage_of(*messages)
    assert isinstance(error, kind)
    assert why in error.message
    assert heard[-1] == Failed(error.body())


def test_memory_that_others_could_shorten_is_not_mapped() -> None:
    for made in (memory(seals=False), memory(4096)):
        with made as fd:
            error, _ = stage_of(HELLO, fds=[fd])
            assert "no sealed memfd" in error.message
    assert "1 descriptors" in stage_of(HELLO, fds=[])[0].message


def test_rows_in_the_stream_are_as_many_bytes_as_they_say() -> None:
    plain = changed(HELLO, shared=False)
    content = torch.ones(4, 64).numpy().tobytes()
    heard = stage_of(plain, Wake(5), STEP, Rows(0, 4, 0, content[:100]), Rows(0, 4, 100, content[100:]), fds=[])[1]
    assert isinstance(heard[1], Rows)
    for rows, why in [
        ([Rows(0, 4, 0, content + b"1234")], "came as 1028 bytes"),
        ([Rows(0, 4, 0, content[:100]), Rows(0, 4, 99, content[99:])], "were due"),
        ([Rows(0, 4, 0, content[:100]), Rows(0, 4, 100)], "end after 100"),
    ]:
        assert why in stage_of(plain, Wake(5), STEP, *rows, fds=[])[0].message


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_end_a_stage(data: bytes) -> None:
    error, heard = stage_of(HELLO, Wake(5), data, frame(data))
    assert isinstance(error, ProtocolError | InstanceLost)
    assert heard[-1] == Failed(error.body())


def head_of(*messages: OnEdge) -> None:
    """A head of the first layer behind which such messages come round."""
    shared = isinstance(messages[0], Hello) and messages[0].shared if messages else False
    with memory() as fd, edges(messages, [fd] if shared else ()) as (each, _):
        made = decoder("llama")
        pipeline = Pipeline(made, EXACT, 1, each, depth=2, kv_bytes=MIB, fingerprint="same")
        assert pipeline.room(1 << 40) == pipeline.room(1) == 9, "each process was given its own"
        pipeline._steps.append((0, 4))
        with contextlib.closing(pipeline):
            pipeline.collect()


ALL = changed(HELLO, layers=(LayerRange(0, 1), LayerRange(1, 3)))


@pytest.mark.parametrize(
    ("messages", "kind", "why"),
    [
        ([], InstanceLost, "the stage before is gone"),
        ([changed(ALL, version=9)], ProtocolError, "version 9"),
        ([HELLO], ProtocolError, "are not all"),
        ([changed(ALL, layers=(LayerRange(0, 1), LayerRange(2, 3)))], ProtocolError, "do not follow"),
        ([changed(ALL, layers=(LayerRange(0, 1), LayerRange(1, 9)))], ProtocolError, "are not all"),
        ([changed(ALL, layers=())], ProtocolError, "do not follow"),
        ([changed(ALL, pages=0)], OutOfMemory, "no room for one page"),
        ([ALL], InstanceLost, r"layers [1, 3) is gone"),
        ([ALL, changed(ROWS, rows=8)], ProtocolError, "were due"),
        ([ALL, Wake(1)], ProtocolError, "Wake came"),
    ],
)
def test_a_head_takes_nothing_that_does_not_fit(messages: list[OnEdge], kind: type[SllmError], why: str) -> None:
    with pytest.raises(kind) as caught:
        head_of(*messages)
    assert why in caught.value.message


def test_every_state_of_a_stage_leads_to_its_end() -> None:
    assert set(STAGE_TRANSITIONS) == set(StageState)
    for state, following in STAGE_TRANSITIONS.items():
        assert state is StageState.ENDED or StageState.ENDED in following

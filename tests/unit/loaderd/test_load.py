"""The worker's side of a load: how what is ready becomes calls that fill in page tables."""

import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.client.load import SessionLoad, runs
from sllm_runtime.protocol.checkpoint import (
    BLOCK_ALIGN,
    INDEX_NAME,
    BlockRecord,
    CheckpointIndex,
    PartitionRecord,
    encode_index,
)
from sllm_runtime.protocol.errors import Cancelled
from sllm_runtime.protocol.loader import Chunks, Done, FileEntry, Files, Ready

SPANS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=12)
"""Holes and sizes, one behind the other."""


@given(SPANS, st.integers(1, 100))
def test_runs_cover_what_they_are_given_in_few_ranges(pieces: list[tuple[int, int]], most: int) -> None:
    spans, end = [], 0
    for hole, nbytes in pieces:
        spans.append((end + hole, nbytes))
        end += hole + nbytes
    found = list(runs(spans, most))
    covered = [byte for offset, nbytes in found for byte in range(offset, offset + nbytes)]
    assert covered == [byte for offset, nbytes in spans for byte in range(offset, offset + nbytes)]
    largest = max((nbytes for _, nbytes in spans), default=0)
    assert all(0 < nbytes <= max(most, largest) for _, nbytes in found)
    for (offset, nbytes), (following, more) in itertools.pairwise(found):
        assert offset + nbytes < following or nbytes + more > most  # else they would be one


def test_spans_in_any_order_stay_in_theirs() -> None:
    assert list(runs([(10, 5), (0, 10), (15, 5), (20, 5)], 100)) == [(10, 5), (0, 10), (15, 10)]


def memfd(data: bytes, name: str = "test") -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


def one_block(chunks: int = 1) -> bytes:
    part = PartitionRecord(rank=0, nbytes=chunks * BLOCK_ALIGN, digests=("0" * 32,) * chunks)
    block = BlockRecord(rank=0, offset=0, nbytes=BLOCK_ALIGN, layers=None, shared=())
    return encode_index(CheckpointIndex(partitions=(part,), blocks=(block,), chunk_bytes=BLOCK_ALIGN, tensors=()))


@pytest.mark.parametrize("huge", [False, True])
def test_page_tables_of_large_pages_wait_for_who_waits_for_them(huge: bool) -> None:
    def begun() -> bool:
        return any(thread.name == "sllm-populate" for thread in threading.enumerate())

    load, index = SessionLoad(lambda message: None, lambda number: None, 1, 0), one_block()
    try:
        load.heard(Files(request=1, files=(FileEntry(INDEX_NAME, 0, len(index)),)), [memfd(index)])
        chunk = Chunks(request=1, numbers=(0,), chunk_bytes=BLOCK_ALIGN, fds=1, last=True, huge_pages=huge)
        load.heard(chunk, [memfd(bytes(BLOCK_ALIGN))])
        assert load.attach().nbytes == BLOCK_ALIGN
        assert begun() is not huge
        load.heard(Ready(request=1, block=0), [])
        assert begun()  # behind what comes while it loads, whatever its pages are
        load.heard(Done(request=1), [])
        load.wait_all()
    finally:
        load.detach()
    assert not begun()


@pytest.mark.parametrize("before", [0, 1])
def test_chunks_that_come_when_it_was_let_go_are_mapped_nowhere(before: int) -> None:
    """Their place may be somebody else's memory by then."""
    load, index = SessionLoad(lambda message: None, lambda number: None, 1, 0), one_block(chunks=2)
    load.heard(Files(request=1, files=(FileEntry(INDEX_NAME, 0, len(index)),)), [memfd(index)])
    for number in range(before):
        chunk = Chunks(request=1, numbers=(number,), chunk_bytes=BLOCK_ALIGN, fds=1, last=False)
        load.heard(chunk, [memfd(bytes(BLOCK_ALIGN), "early")])
    load.detach()
    late = [memfd(bytes(BLOCK_ALIGN), "late") for _ in range(2)]
    load.heard(Chunks(request=1, numbers=(0, 1), chunk_bytes=BLOCK_ALIGN, fds=2, last=True), late)
    mapped = Path("/proc/self/maps").read_text()
    assert "memfd:late" not in mapped
    assert "memfd:early" not in mapped
    for fd in late:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises(Cancelled):
        load.attach(0)

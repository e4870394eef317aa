"""A call's journal, put together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol.calls import Batch, Journaled
from sllm_runtime.protocol.frames import Frame, FrameKind


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_batches_are_put_in_order_however_they_are_stored(sizes: list[int], data: st.DataObject) -> None:
    """A repeated write that a server which stood still hands on late lies behind what was written after it."""
    frames = [Frame(number, FrameKind.OUTPUT, b"%d" % number) for number in range(sum(sizes))]
    batches, first = [], 0
    for size in sizes:
        batches.append(Batch(first, tuple(frames[first : first + size])))
        first += size
    stored = data.draw(st.permutations(batches + data.draw(st.lists(st.sampled_from(batches), max_size=4))))
    cut = data.draw(st.integers(0, len(stored)))
    journaled, found = Journaled(), list[Frame]()
    for batch in stored[:cut]:
        found += journaled.take(batch)
    there = set(batch.first for batch in stored[:cut])
    whole = next((batch.first for batch in batches if batch.first not in there), len(frames))
    assert found == frames[:whole]
    assert journaled.frames == whole
    assert journaled.written == max((batch.first + len(batch.frames) for batch in stored[:cut]), default=0)
    for batch in stored[cut:]:
        found += journaled.take(batch)
    assert found == frames

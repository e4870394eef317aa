"""The worker's side of a load: how what is ready becomes calls that fill in page tables."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.client.load import runs

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

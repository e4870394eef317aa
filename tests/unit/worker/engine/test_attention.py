"""Decode rows of many sequences at once see what each sees by itself, bit by bit, whatever pages they have."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.worker.engine.ours.attention import Heads, Look, filled
from sllm_runtime.worker.engine.ours.attention_batch import RowsOfMany, plan, runs
from sllm_runtime.worker.engine.ours.attention_rows import RowsOfOne
from sllm_runtime.worker.engine.ours.kv import KvShape, KvStore
from sllm_runtime.worker.engine.ours.pages import PAGE
from tests.fixtures.examples import examples
from tests.unit.worker.engine.driver import exact

HEADS = Heads(4, 2, 16)
PAGES = 12


def store() -> KvStore:
    """Every place holds something: what is not masked would be seen."""
    made = KvStore(KvShape(1, HEADS.kv, HEADS.width), PAGES)
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(1)))
    return made


@settings(max_examples=examples(40))
@given(st.data())
def test_rows_of_many_see_what_each_sees_by_itself(data: st.DataObject) -> None:
    page = st.integers(0, PAGES - 1)
    tables = data.draw(st.lists(st.lists(page, min_size=1, max_size=3, unique=True), min_size=2, max_size=6))
    look = Look(0.25, window=data.draw(st.sampled_from([0, 40])))
    numerics, (k, v) = exact(), store().layer(0)
    many = RowsOfMany(plan(tables, HEADS, numerics), len(tables), HEADS, numerics)
    for turn in range(2):  # the second step finds the buffers as the first left them
        offsets = data.draw(st.lists(st.integers(0, PAGE - 1), min_size=len(tables), max_size=len(tables)))
        positions = [(len(table) - 1) * PAGE + offset for table, offset in zip(tables, offsets, strict=True)]
        generator = torch.Generator().manual_seed(turn)
        qkv = torch.randn(len(tables), HEADS.queries + 2 * HEADS.kv, HEADS.width, generator=generator)
        together, alone = (torch.zeros(len(tables), HEADS.queries * HEADS.width) for _ in range(2))
        many.begin(torch.tensor(positions)).attend(qkv, k, v, look, together)
        for row, (table, position) in enumerate(zip(tables, positions, strict=True)):
            RowsOfOne(row, position, 1, table, HEADS, numerics).attend(qkv, k, v, look, alone)
        assert torch.equal(together, alone)


def test_a_row_sees_the_same_wherever_its_prefill_ends() -> None:
    """The places of its last page that are computed grow with the rows behind it."""
    numerics, (k, v), table, rows = exact(), store().layer(0), [3, 4, 7], 2 * PAGE + 100
    qkv = torch.randn(rows, HEADS.queries + 2 * HEADS.kv, HEADS.width, generator=torch.Generator().manual_seed(2))
    seen = []
    for end in (2 * PAGE + 1, 2 * PAGE + 40, 2 * PAGE + 100):
        into = torch.zeros(rows, HEADS.queries * HEADS.width)
        RowsOfOne(0, 0, end, table, HEADS, numerics).attend(qkv, k, v, Look(0.25), into)
        seen.append(into[: 2 * PAGE + 1])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_places_of_pages() -> None:
    assert [filled(position) for position in (0, 31, 32, PAGE - 1, PAGE, 3 * PAGE + 64)] == [32, 32, 64, PAGE, 32, 96]
    assert runs(np.array([128, 128, 32, 32, 0, 64])) == [(0, 2, 128), (2, 4, 32), (5, 6, 64)]
    assert runs(np.array([32, 64, 32, 96, 32])) == [(0, 5, 96)]

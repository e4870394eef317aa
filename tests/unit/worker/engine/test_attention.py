"""A row sees what exact arithmetic says, the same bit by bit whatever is computed beside it, wherever its pages lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.batch import Batches, Turn
from sllm_runtime.worker.engine.ours.kv import KvShape, KvStore
from sllm_runtime.worker.engine.ours.numerics import FAST
from sllm_runtime.worker.engine.ours.pages import PAGE, pages_for
from tests.fixtures.examples import examples

HEADS = Heads(6, 2, 24)
"""Neither a group nor a width that vectors divide."""
PAGES = 12
LOOKS = [Look(0.25), Look(0.25, window=40), Look(0.25, window=PAGE + 9, cap=2.0), Look(0.25, cap=30.0)]


@dataclass(frozen=True)
class Rows:
    """See ``batch.Part``: neighbouring rows of one sequence."""

    start: int
    count: int
    pages: Sequence[int]
    samples: bool = True

    @property
    def tokens(self) -> Sequence[int]:
        return [0] * self.count


def store(heads: Heads = HEADS) -> KvStore:
    """Every place holds something: what is not left out would be seen."""
    made = KvStore(KvShape(1, heads.kv, heads.width), PAGES)
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(1)))
    return made


def numbers(count: int, seed: int, heads: Heads = HEADS) -> torch.Tensor:
    """q, k and v of rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads.queries + 2 * heads.kv, heads.width, generator=generator)


def seen(
    kv: KvStore, parts: list[Rows], qkv: torch.Tensor, look: Look, heads: Heads = HEADS, turn: Turn | None = None
) -> torch.Tensor:
    return Batches(kv, heads, FAST).make(parts).view.see(0, qkv.clone(), look, turn).clone()


def exactly(
    kv: KvStore, table: Sequence[int], position: int, q: torch.Tensor, look: Look, heads: Heads
) -> torch.Tensor:
    """In float64, by the formula."""
    k = kv.data[0, 0, list(table)].view(len(table), heads.kv, heads.width, PAGE).double()
    v = kv.data[0, 1, list(table)].view(len(table), heads.kv, PAGE, heads.width).double()
    k, v = k.permute(1, 2, 0, 3).flatten(2), v.transpose(0, 1).flatten(1, 2)
    scores = torch.einsum("hgw,hwp->hgp", q.view(heads.kv, heads.group, heads.width).double(), k) * look.scale
    scores = torch.tanh(scores / look.cap) * look.cap if look.cap else scores
    places = torch.arange(len(table) * PAGE)
    away = (places > position) | ((places <= position - look.window) if look.window else False)
    return (scores.masked_fill(away, float("-inf")).softmax(-1) @ v).flatten().float()


@pytest.mark.parametrize("look", LOOKS, ids=str)
@pytest.mark.parametrize("heads", [HEADS, Heads(4, 4, 32), Heads(3, 1, 7), Heads(2, 1, 80)], ids=str)
def test_a_row_sees_what_the_formula_says(heads: Heads, look: Look) -> None:
    kv, table = store(heads), [7, 2, 9]
    parts = [Rows(2 * PAGE + 3, 1, table), Rows(5, 30, table[:1]), Rows(PAGE - 2, 4, table[:2])]
    qkv = numbers(35, 3, heads)
    found = seen(kv, parts, qkv, look, heads)
    places = [(part, part.start + at) for part in parts for at in range(part.count)]
    for row, (part, position) in enumerate(places):
        wanted = exactly(kv, part.pages, position, qkv[row, : heads.queries], look, heads)
        torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(40))
@given(st.data())
def test_a_row_is_the_same_beside_any_others(data: st.DataObject) -> None:
    """Decode rows and pieces of prefills of several sequences in one step, then row by row, at other pages."""
    starts = data.draw(st.lists(st.integers(0, 3 * PAGE - 1), min_size=1, max_size=4))
    counts = [data.draw(st.integers(1, min(40, 3 * PAGE - start))) for start in starts]
    look = data.draw(st.sampled_from(LOOKS))
    order = data.draw(st.permutations(range(PAGES)))
    tables = [[3 * number + at for at in range(3)] for number in range(len(starts))]
    parts = [Rows(start, count, table) for start, count, table in zip(starts, counts, tables, strict=True)]
    parts.sort(key=lambda part: part.count > 1)
    qkv = numbers(sum(counts), 5)
    together, alone = store(), store()
    alone.data[:, :, list(order)] = together.data[:, :, :PAGES]
    found, row = seen(together, parts, qkv, look), 0
    for part in parts:
        table = [order[page] for page in part.pages]
        for at in range(part.count):
            position = part.start + at
            single = Rows(position, 1, table[: pages_for(position + 1)])
            assert torch.equal(seen(alone, [single], qkv[row : row + 1], look)[0], found[row])
            row += 1
    assert torch.equal(alone.data[:, :, list(order)], together.data[:, :, :PAGES])


def test_a_row_with_nan_is_nan_and_no_other() -> None:
    kv, qkv = store(), numbers(3, 7)
    parts = [Rows(9, 1, [0]), Rows(40, 1, [1]), Rows(3, 1, [2])]
    clean = seen(store(), parts, qkv, LOOKS[0])
    qkv[1] = float("nan")
    found = seen(kv, parts, qkv, LOOKS[0])
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("half", [1, 8, 12])
def test_the_first_numbers_of_queries_and_keys_are_turned(half: int) -> None:
    """What is seen, and what is in the pages, is what it would be of rows that had been turned before."""
    parts, qkv, width = [Rows(20, 3, [4])], numbers(3, 9), HEADS.width
    angles = torch.arange(20, 23).unsqueeze(1) * torch.linspace(1, 0.01, half)
    cos, sin = torch.ones(3, 1, width), torch.zeros(3, 1, width)
    cos[:, 0, : 2 * half] = angles.cos().repeat(1, 2)
    sin[:, 0, : 2 * half] = torch.cat((-angles.sin(), angles.sin()), 1)
    here, before = store(), store()
    found = seen(here, parts, qkv, LOOKS[0], turn=Turn(half, cos, sin))
    x = qkv[:, : HEADS.queries + HEADS.kv].double()
    swapped = torch.cat((x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]), -1)
    qkv[:, : HEADS.queries + HEADS.kv] = (x * cos + swapped * sin).float()
    torch.testing.assert_close(found, seen(before, parts, qkv, LOOKS[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(here.data, before.data, rtol=1e-6, atol=1e-6)

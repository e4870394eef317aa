"""Attention of the fast mode over pages: what a row sees, and which blocks it is looked for in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention import flex_attention as flex

from sllm_runtime.worker.engine.ours.gpu.fast import FastAttention, Flex, sight_of
from sllm_runtime.worker.engine.ours.pages import PAGE
from tests.fixtures.paged import Scene, scenes


class ByIndex:
    """Fills pages."""

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        k_pages[slots // PAGE, :, slots % PAGE] = k
        v_pages[slots // PAGE, :, slots % PAGE] = v


def _check(scene: Scene, device: str = "cpu", by: Flex | None = None) -> None:
    there = scene.on(device, ByIndex(), 0.0)
    found = FastAttention(by).attend(*there, *scene.look).cpu().double()
    wanted, size = scene.reference()
    slack = (2 * torch.finfo(scene.dtype).eps + 1e-4) * size
    assert ((found - wanted).abs() <= slack + 1e-6).all()


@settings(max_examples=30)
@given(scenes([torch.float32, torch.bfloat16]))
def test_attention_is_that_of_float64(scene: Scene) -> None:
    _check(scene)


@settings(max_examples=30)
@given(scenes([torch.float32]))
def test_what_a_row_sees_is_in_the_blocks_it_visits(scene: Scene) -> None:
    there = scene.on("cpu", ByIndex(), 0.0)
    mask = sight_of(there.tables, there.of, there.positions, scene.window, scene.pages, scene.kv).blocks()
    rows, keys = mask.seq_lengths
    head, row, key = torch.arange(scene.kv), torch.arange(rows), torch.arange(keys)
    seen = mask.mask_mod(head.view(-1, 1, 1), head, row.view(-1, 1), key)
    visible = [min(here + 1, scene.window or here + 1) for _, here in scene.positions]
    assert (seen.sum(2) == torch.tensor(visible)).all()
    for number in range(scene.kv):
        visited = mask.kv_indices[number, 0, 0, : int(mask.kv_num_blocks[number, 0, 0])]
        assert set((seen[number].any(0).nonzero().view(-1) // PAGE).tolist()) <= set(visited.tolist())


LOOKS = pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (150, 20.0)])


def _long(dtype: torch.dtype, window: int, cap: float) -> Scene:
    """Rows of two blocks of queries, one of them a prefill's."""
    return Scene(2, 2, 64, dtype, window, cap, lengths=(290, 140), rows=((1, 139, 1), (0, 120, 170)))


@pytest.mark.slow
@LOOKS
def test_flex_attention_takes_the_mask(window: int, cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uncompiled, and without compiling that which is not.
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    _check(_long(torch.float32, window, cap), by=flex.flex_attention)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@LOOKS
def test_on_a_gpu(window: int, cap: float) -> None:
    _check(_long(torch.bfloat16, window, cap), "cuda")

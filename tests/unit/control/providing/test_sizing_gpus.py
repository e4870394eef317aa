"""A pool whose nodes have other accelerators than its settings say. No I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sllm_runtime.control.placement import unsatisfiable
from sllm_runtime.control.providing.provider import Offer
from sllm_runtime.control.providing.sizing import SetDesired, need_at
from sllm_runtime.protocol.node import Gpu
from tests.unit.control.providing.supply import Supplied
from tests.unit.control.world import GIB, deployed, manifest

KEY = ("chat", 1)


class Equipped(Supplied):
    """``gpu``: what each of its nodes reports."""

    gpu = Gpu(index=0, kind="L4", memory=0)

    def offer(self) -> Offer:
        made = super().offer()
        return replace(made, shape=replace(made.shape, gpus=(Gpu(index=0, kind="L4", memory=24 * GIB),)))

    def hear(self, name: str) -> None:
        self.nodes[name].gpus = (self.gpu,)
        super().hear(name)


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(Gpu(index=0, kind="L4", memory=0), id="nobody says its memory"),
        pytest.param(Gpu(index=0, kind="L4", memory=22 * GIB), id="less memory"),
        pytest.param(Gpu(index=0, kind="A10G", memory=24 * GIB), id="another kind"),
    ],
)
def test_a_start_that_fits_no_node_that_came_has_no_more_made_and_is_refused_in_words(gpu: Gpu) -> None:
    world = Equipped(most=8, boot=20.0)
    world.gpu = gpu
    world.view = deployed(world.view, manifest("chat", cpu=1.0, gpu=["L4"], gpu_memory=24 * GIB))
    world.supply()
    world.wait_for(KEY, 1)
    world.live_for(40)
    assert "no node can run it" in unsatisfiable(need_at(world.view, KEY), world.view)
    world.live_for(600)
    assert [action.nodes for _, action in world.actions if isinstance(action, SetDesired)] == [1]

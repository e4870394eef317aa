"""A pool whose nodes run functions in containers. No I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sllm_runtime.control.providing.provider import Offer
from sllm_runtime.control.providing.settings import ProviderSettings
from sllm_runtime.control.providing.sizing import SetDesired
from tests.unit.control.providing.supply import Supplied
from tests.unit.control.world import deployed, manifest


class Contained(Supplied):
    """Of the shape that the controller's settings say."""

    def offer(self) -> Offer:
        made = super().offer()
        return replace(made, shape=replace(made.shape, drivers=ProviderSettings.load().shape.drivers))


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"SLLM_NODE_PROVIDER": "processes", "SLLM_SANDBOX": "podman"}, id="of this machine"),
        pytest.param({"SLLM_NODE_PROVIDER": "aws", "SLLM_NODES_SANDBOX": "docker"}, id="of a cloud"),
    ],
)
def test_a_function_that_needs_a_container_has_a_node_made(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world = Contained()
    world.view = deployed(world.view, manifest("chat", cpu=2.0, requirements=["emoji==2.14.1"]))
    world.supply()
    world.wait_for(("chat", 1), 1)
    world.live_for(10)
    assert [action.nodes for _, action in world.actions if isinstance(action, SetDesired)] == [1]

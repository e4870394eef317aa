"""What a route tells gateways of its instances. No I/O."""

import msgspec
import pytest

from sllm_runtime.control.routes import route
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import FakeNode, World, deployed, manifest


@pytest.mark.parametrize(
    ("engine", "capabilities", "exact"),
    [
        (True, ("engine:ours", "exact_resume"), True),
        (True, ("engine:transformers", "seeded"), False),
        (False, (), True),
    ],
)
def test_an_engine_without_exactness_is_named(engine: bool, capabilities: tuple[str, ...], exact: bool) -> None:
    """A function without an engine has made no promise that could be missing."""
    world = World(FakeNode("n1", cpu=4.0, gpus=0))
    world.hear_all()
    key = ("chat", 1)
    world.view = deployed(world.view, manifest("chat", engine=engine, model="sha256:m" if engine else None))
    world.wait_for(key, 1)
    world.plan()
    (name,) = world.live(key)
    node = world.nodes["n1"]
    node.instances[name] = msgspec.structs.replace(
        node.instances[name], state=InstanceState.READY, capabilities=capabilities
    )
    world.hear("n1")
    found = route(world.view, key)
    assert found is not None
    assert [(entry.instance, entry.exact) for entry in found.entries] == [(name, exact)]

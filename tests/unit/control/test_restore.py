"""The view that a new controller makes of the store."""

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from sllm_runtime.control import changes, deletion, draining, registry, restore
from sllm_runtime.control.changes import Write
from sllm_runtime.control.placement import may_start
from sllm_runtime.control.plan import SendStart, SendStop
from sllm_runtime.control.reports import observe
from sllm_runtime.control.view import Instance, View
from sllm_runtime.platform.state import Records, StateStore
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.node import NodeRecord
from sllm_runtime.protocol.records import FunctionRecord, InstanceRecord
from sllm_runtime.protocol.states import InstanceState, VersionState
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.control.world import GIB, FakeNode, World, deployed, manifest, version

CHAT = FunctionRecord(function="chat", active=None, last_version=0)


class Many(Records):
    """So many that who reads them is not done before others had their turn."""

    turn = threading.Event()

    def list(self, prefix: str, type_: type[Any]) -> dict[str, Any]:
        assert self.turn.wait(GIVE_UP_S), "nobody else had a turn"
        return super().list(prefix, type_)


class Held:
    """A store with these records."""

    def __init__(self, found: dict[str, bytes]) -> None:
        self.found = found

    async def everything(self) -> Records:
        return Records(self.found)


class Store:
    async def everything(self) -> Records:
        return Many({"functions.chat": codec.to_json(CHAT)})


async def test_a_new_leader_renews_its_lease_while_it_reads_what_is_stored() -> None:
    reading = asyncio.create_task(restore.read(cast(StateStore, Store())))
    await asyncio.sleep(0)  # it has begun
    Many.turn.set()
    assert (await reading).functions == {"functions.chat": CHAT}


async def test_what_is_made_anew_and_cannot_be_read_keeps_nobody_from_leading(caplog: pytest.LogCaptureFixture) -> None:
    there = NodeRecord(node="n1")
    found = {"nodes.n1": codec.to_json(there), "nodes.n2": b'{"node":7}', "routes.chat.1": b"{}", "instances.i": b""}
    stored = await restore.read(cast(StateStore, Held(found)))
    assert stored.nodes["nodes.n1"] == there
    assert not stored.routes
    assert not stored.instances
    assert all(f"record {key} is left out" in caplog.text for key in ("nodes.n2", "routes.chat.1", "instances.i"))


async def test_a_node_whose_record_cannot_be_read_stays_out_of_use_until_somebody_says_otherwise() -> None:
    """An operator may have cordoned it: its first report says nothing of that."""
    stored = await restore.read(cast(StateStore, Held({"nodes.n1": b'{"node":7}'})))
    node = FakeNode("n1", cpu=4.0, gpus=0)
    view = observe(restore.repaired(restore.as_stored(stored, 0.0)), node.report(), 1.0, 1.0)
    assert view.nodes["n1"].record.cordoned
    assert not may_start(view, ("chat", 1), 1.0)(view.nodes["n1"])
    after = draining.cordon(view, "n1", cordoned=False, drain=False)
    assert changes.decided(view, after) == [Write("nodes.n1", after.nodes["n1"].record)], "and it is readable again"


async def test_an_instance_whose_record_cannot_be_read_leaves_the_store() -> None:
    there = InstanceRecord(instance="i", function="chat", version=1, node="n1", state=InstanceState.READY)
    found = {"functions.chat": codec.to_json(CHAT), "instances.i": codec.to_json(there), "instances.j": b"{}"}
    stored = await restore.read(cast(StateStore, Held(found)))
    view = restore.repaired(restore.as_stored(stored, 0.0))
    assert restore.unreferenced(stored, view) == [Write("instances.i", None), Write("instances.j", None)]


async def test_what_cannot_be_read_of_a_version_that_is_gone_leaves_the_store() -> None:
    """Of one that there is it is written anew: its callers are not to lose their route meanwhile."""
    chat = version(manifest("chat"), 1)
    function = FunctionRecord(function="chat", active=1, last_version=1)
    found = {"functions.chat": codec.to_json(function), "versions.chat.1": codec.to_json(chat)}
    found |= {f"{kind}.{name}.1": b"{}" for kind in ("routes", "proofs") for name in ("chat", "gone")}
    stored = await restore.read(cast(StateStore, Held(found)))
    view = restore.repaired(restore.as_stored(stored, 0.0))
    assert restore.unreferenced(stored, view) == [Write("proofs.gone.1", None), Write("routes.gone.1", None)]


@pytest.mark.parametrize("key", ["functions.chat", "versions.chat.1", "models.m"])
async def test_what_people_have_made_is_not_left_out(key: str) -> None:
    """What is not there would be removed for good."""
    with pytest.raises(ProtocolError, match=key):
        await restore.read(cast(StateStore, Held({key: b"{}"})))


def test_what_a_leader_before_has_begun_is_not_begun_again_by_the_next_one() -> None:
    """On which devices is in no record. Its node says whether it has it: where it does not, another one is started."""
    world = World(FakeNode("n1", cpu=4.0, gpus=1))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", gpu="L4"))
    world.wait_for(("chat", 1), 1)
    world.plan(deliver=False)
    (lost,) = world.live(("chat", 1))
    world.followed()
    world.wait_for(("chat", 1), 1)
    assert world.plan() == ()
    assert world.live(("chat", 1)) == [lost]
    world.hear_all()
    (start,) = world.plan()
    assert isinstance(start, SendStart)
    assert world.live(("chat", 1)) == [start.instance] != [lost]


def test_what_an_earlier_leader_had_ended_is_there_until_its_node_says_otherwise() -> None:
    """Its stop is told again before any node is heard, and a node takes that: calls of it may run there still."""
    world = World(FakeNode("n1", cpu=4.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", timeout=300))
    world.wait_for(("chat", 1), 1)
    world.plan()
    (name,), (node,) = world.live(("chat", 1)), world.nodes.values()
    node.set(name, InstanceState.READY, running=1)
    world.hear_all()
    world.view = deletion.leaving(world.view, "chat", force=False)
    world.plan()
    world.hear_all()
    assert node.instances[name].state is InstanceState.DRAINING
    world.followed()
    world.plan()
    assert deletion.gone(world.view, "chat") is None, "a call of it still runs"
    world.hear_all()
    world.plan()
    assert deletion.gone(world.view, "chat") is None
    node.set(name, InstanceState.STOPPED)
    world.hear_all()
    world.plan()
    assert deletion.gone(world.view, "chat")


def test_what_runs_of_a_deleted_function_is_not_taken_for_another_one_of_its_name() -> None:
    """Its node was cut off meanwhile: it is first heard by this leader with what it had before."""
    world = World(FakeNode("n1", cpu=4.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(("chat", 1), 1)
    world.plan()
    (old,) = world.live(("chat", 1))
    world.finish(old, InstanceState.READY)
    world.wait_for(("chat", 1), 0)
    view = registry.remove(replace(world.view, instances=world.view.instances.without([old])), "chat")
    again = msgspec.structs.replace(version(manifest("chat", memory=2 * GIB)), content="other")
    world.view = registry.activate(registry.create(view, again, None), ("chat", 1))
    world.followed()
    world.hear_all()
    assert not world.view.of(("chat", 1))
    actions = world.plan()
    assert [(action.instance, isinstance(action, SendStop)) for action in actions] == [(old, True)], "it is a stray"


def test_the_record_of_a_function_says_which_of_its_versions_is_active() -> None:
    """An activation is several records: a leader that dies between two of them leaves what only some of them say."""
    before = registry.create(deployed(View(), manifest("chat")), version(manifest("chat"), 2), None)
    function = before.functions["chat"]
    half = before.put_function(msgspec.structs.replace(function, active=2, last_version=2))
    assert _states(restore.repaired(half)) == {1: VersionState.RETIRED, 2: VersionState.ACTIVE}
    whole = registry.activate(before, ("chat", 2))
    back = whole.put_function(msgspec.structs.replace(whole.functions["chat"], active=1))
    assert _states(restore.repaired(back)) == {1: VersionState.ACTIVE, 2: VersionState.RETIRED}


def test_of_a_deployment_that_was_broken_off_nothing_is_taken_over() -> None:
    """Its trial is a stray of its node then."""
    before = registry.create(deployed(View(), manifest("chat")), version(manifest("chat"), 2), None)
    there = InstanceRecord(instance="i", function="chat", version=2, node="n1", state=InstanceState.READY)
    trial = Instance(record=there, manifest=manifest("chat"), placed=0.0)
    found = restore.repaired(before.put_instance(trial))
    assert _states(found) == {1: VersionState.ACTIVE}
    assert not found.instances


def _states(view: View) -> dict[int, VersionState]:
    return {record.version: record.state for record in view.versions.values()}

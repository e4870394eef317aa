"""Deleting a function: what others need of it stays."""

import asyncio
from typing import Any

import pytest

from sllm_gateway.leader import Leader
from sllm_runtime.control import deletion
from sllm_runtime.control.deploy import remove_bundles
from sllm_runtime.control.view import View
from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import Conflict, SllmError
from sllm_runtime.protocol.node import Ok
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, manifest
from tests.unit.control.world import deployed
from tests.unit.control.world import manifest as world_manifest


async def test_a_bundle_stays_that_a_deployment_under_way_needs(bench: Bench) -> None:
    """Functions of one file have one bundle; of one whose model is still made ready there is no version yet."""
    gateway = bench.gateway
    await gateway.deploy(manifest("one"), b"of one file")
    bench.node.prepared.clear()
    deploying = asyncio.create_task(gateway.deploy(manifest("other", model="/models/tiny"), b"of one file"))
    await until(lambda: bench.node.prepares, what="its model is made ready")
    assert (await gateway.ask("delete", ctl.Delete(function="one", force=True))).note == "deleted"
    bench.node.prepared.set()
    version = (await deploying).version
    assert version is not None
    assert await bundles.exists(gateway.bus, version.bundle)


async def test_whether_a_bundle_is_needed_is_asked_when_its_turn_has_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is deleted after the other: meanwhile deployments begin, and end with a version."""
    loop, delete, needed, deleted = bench.controller.loop, bundles.delete, set[str](), list[str]()
    first, begun, ended = [await bench.gateway.upload(data) for data in (b"first", b"begun", b"ended")]

    async def slow(bus: Bus, digest: str, *may: Any) -> None:
        needed.add(begun)
        await bench.gateway.deploy(manifest(), b"ended")
        deleted.append(digest)
        await delete(bus, digest, *may)

    monkeypatch.setattr(bundles, "delete", slow)
    await remove_bundles(loop, loop._bus, [first, begun, ended], needed.__contains__)
    assert deleted == [first]


@pytest.mark.parametrize("meanwhile", ["deposed", "needed", "deployed"])
async def test_whether_a_bundle_may_go_is_asked_again_once_it_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """A leader that was stopped just there goes on while another one leads, or a deployment has begun or ended."""
    loop, info, needed = bench.controller.loop, bundles._info, set[str]()
    digest = await bench.gateway.upload(b"found")

    async def then(*args: Any, **options: Any) -> Any:
        found = await info(*args, **options)
        monkeypatch.setattr(bundles, "_info", info)
        if meanwhile == "deposed":
            monkeypatch.setattr(loop, "_may_act", lambda: False)
        elif meanwhile == "needed":
            needed.add(digest)
        else:
            await bench.gateway.deploy(manifest(), b"found")
        return found

    monkeypatch.setattr(bundles, "_info", then)
    await remove_bundles(loop, loop._bus, [digest], needed.__contains__)
    assert await bundles.size(bench.gateway.bus, digest) == len(b"found")


async def test_a_deletion_takes_no_function_that_has_its_name_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted in its first trial: its name is free when what that has started has ended, not before."""
    node, loop, stopped = bench.node, bench.controller.loop, list[str]()
    node.behave = lambda command: InstanceState.STARTING
    deploying = asyncio.create_task(bench.gateway.deploy(manifest(), b"1"))
    await until(lambda: node.instances, what="its trial starts")
    (old,), put = node.instances, node.put

    def slowly(instance: str, state: InstanceState, **fields: Any) -> None:
        if instance == old:  # its sandbox takes a while to end
            stopped.append(instance)
        else:
            put(instance, state, **fields)

    monkeypatch.setattr(node, "put", slowly)
    deleting = asyncio.create_task(bench.gateway.ask("delete", ctl.Delete(function="chat")))
    with pytest.raises(SllmError):
        await deploying
    node.behave = lambda command: InstanceState.READY
    await until(lambda: stopped, what="its trial is ended")
    with pytest.raises(Conflict, match="being deleted"):
        await bench.gateway.deploy(manifest(), b"2")
    put(old, InstanceState.STOPPED)
    assert (await deleting).note == "deleted"
    assert "chat" not in loop.view.functions
    deployed = await bench.gateway.deploy(manifest(), b"2")
    assert deployed.version is not None
    assert loop.view.functions["chat"].active == deployed.version.version


async def test_what_has_its_name_while_its_bundles_go_is_deleted_for_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream elects: bundles take long. Who has asked for the first one is told that it is gone, and ends no other;
    the second one goes when somebody asks for that."""
    gateway, loop, remove = bench.gateway, bench.controller.loop, remove_bundles
    go_on, waits = asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any) -> None:
        waits.set()
        await go_on.wait()
        await remove(*args)

    monkeypatch.setattr(deletion, "remove_bundles", slowly)
    await gateway.deploy(manifest(), b"of one")
    one = asyncio.create_task(gateway.ask("delete", ctl.Delete(function="chat", force=True)))
    await asyncio.wait_for(waits.wait(), GIVE_UP_S)
    await gateway.deploy(manifest(), b"of another")
    asked = await gateway.ask("delete", ctl.Delete(function="chat", force=True, begun=True))
    assert asked.note == "deleted"
    assert not loop.view.functions["chat"].deleting
    two = asyncio.create_task(gateway.ask("delete", ctl.Delete(function="chat", force=True)))
    await until(lambda: "chat" not in loop.view.functions, what="the second one is removed too")
    go_on.set()
    assert [(await each).note for each in (one, two)] == ["deleted", "deleted"]


async def test_what_is_deleted_while_its_model_is_made_ready_is_not_said_to_be_deployed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its content is there already."""
    gateway, node, loop = bench.gateway, bench.node, bench.controller.loop
    await gateway.deploy(manifest(model="/models/tiny"))
    (name,), put, before = bench.live(), node.put, len(node.prepares)

    def slowly(instance: str, state: InstanceState, **fields: Any) -> None:
        if instance != name:  # a call of it still runs
            put(instance, state, **fields)

    monkeypatch.setattr(node, "put", slowly)
    node.prepared.clear()
    deploying = asyncio.create_task(gateway.deploy(manifest(model="/models/tiny")))
    await until(lambda: len(node.prepares) > before, what="its model is made ready")
    deleting = asyncio.create_task(gateway.ask("delete", ctl.Delete(function="chat")))
    await until(lambda: loop.view.functions["chat"].deleting, what="somebody else deletes it")
    node.prepared.set()
    with pytest.raises(Conflict, match="being deleted"):
        await deploying
    put(name, InstanceState.STOPPED)
    assert (await deleting).note == "deleted"


def test_what_has_a_name_by_now_is_not_removed_with_what_had_it() -> None:
    view = deployed(View(), world_manifest("chat"))
    assert deletion.removed(view, "chat") is view
    assert not deletion.removed(deletion.leaving(view, "chat", force=False), "chat").functions
    assert deletion.removed(View(), "chat") == View()


async def test_a_deletion_that_is_asked_again_ends_nothing_that_was_deployed_since(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was done, and its answer lost: its gateway was cut off for a while. Meanwhile somebody has deployed anew."""
    gateway, leader = bench.gateway, Leader(bench.gateway.bus)
    await gateway.deploy(manifest())
    call, done = gateway.bus.call, asyncio.Event()

    async def cut_off(*asked: Any, **options: Any) -> Any:
        answer = await call(*asked, **options)
        if not done.is_set():
            done.set()
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(gateway.bus, "call", cut_off)
    asked = ctl.Delete(function="chat", force=True)
    deleting = asyncio.create_task(leader.ask("delete", asked, Ok, timeout_s=GIVE_UP_S))
    try:
        await asyncio.wait_for(done.wait(), GIVE_UP_S)
        await gateway.deploy(manifest(), b"anew")
        leader._ask_again()  # as after every reconnect
        assert (await deleting).note == "deleted"
        assert "chat" in bench.controller.loop.view.functions
    finally:
        await leader.close()

"""A deployment that is called back: nothing of it is left, wherever it was; one that was active stays."""

import asyncio
import uuid
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from sllm_runtime.control import registry
from sllm_runtime.control.daemon import Controller
from sllm_runtime.control.deploy import KEEP_S, MOST_WITHDRAWN, WITHDRAW_S
from sllm_runtime.control.view import View
from sllm_runtime.platform import bundles
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import Cancelled, Unavailable
from sllm_runtime.protocol.records import FunctionRecord, Route, VersionRecord
from sllm_runtime.protocol.states import InstanceState, VersionState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, Gateway, controller_of, manifest
from tests.unit.control.scripted_node import ScriptedNode


async def begun(bench: Bench, data: bytes = b"new", **fields: Any) -> tuple[str, str, asyncio.Task[ctl.Deployed]]:
    """Request, bundle and poll of a deployment."""
    request, digest = uuid.uuid4().hex, await bench.gateway.upload(data)
    deploy = ctl.Deploy(
        request=request, manifest=manifest(**fields), bundle=digest, bundle_bytes=len(data), wait_s=10.0
    )
    return request, digest, asyncio.create_task(bench.gateway.ask("deploy", deploy))


async def withdraw(bench: Bench, request: str) -> ctl.Withdrawn:
    answer: ctl.Withdrawn = await bench.gateway.ask("withdraw", ctl.Withdraw(request=request))
    return answer


async def test_in_the_middle_of_its_trial(bench: Bench) -> None:
    bench.node.behave = lambda command: InstanceState.STARTING
    request, bundle, deploying = await begun(bench)
    await until(lambda: bench.node.starts)
    assert (await withdraw(bench, request)).version is None
    with pytest.raises(Cancelled, match="called back"):
        await deploying
    await bench.none_left()
    assert [stop.grace_s for stop in bench.node.stops][:1] == [0.0], "the start that goes on is ended at once"
    assert await bench.stored(subjects.function_key("chat"), FunctionRecord) is None
    assert await bench.stored(subjects.version_key("chat", 1), VersionRecord) is None
    assert await bench.stored(subjects.route_key("chat", 1), Route) is None
    assert not await bundles.exists(bench.gateway.bus, bundle)
    assert (await withdraw(bench, request)).version is None, "asked again"


async def test_of_a_function_that_runs_already_only_the_new_version_goes(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    bench.node.behave = lambda command: InstanceState.STARTING
    bench.node.starts.clear()
    request, _, deploying = await begun(bench)
    await until(lambda: bench.node.starts)
    await withdraw(bench, request)
    with pytest.raises(Cancelled):
        await deploying
    info: ctl.FunctionInfo = await bench.gateway.ask("function", ctl.FunctionRef(function="chat"))
    assert (info.record.active, [version.version for version in info.versions]) == (1, [1])
    bench.node.behave = lambda command: InstanceState.READY
    deployed = await bench.gateway.deploy(manifest(), b"new")
    assert deployed.version is not None
    assert deployed.version.version == 3, "a number is never used twice"


async def test_before_it_came_and_behind_another_one(bench: Bench) -> None:
    early = uuid.uuid4().hex
    assert (await withdraw(bench, early)).version is None
    digest = await bench.gateway.upload(b"late")
    late = ctl.Deploy(request=early, manifest=manifest(), bundle=digest, bundle_bytes=4, wait_s=1.0)
    with pytest.raises(Cancelled):
        await bench.gateway.ask("deploy", late)

    bench.node.behave = lambda command: InstanceState.STARTING
    _, _, first = await begun(bench, b"first")
    await until(lambda: bench.node.starts)
    request, _, second = await begun(bench, b"second")
    withdrawing = asyncio.create_task(withdraw(bench, request))
    bench.node.put(bench.node.starts[0].instance, InstanceState.READY)
    assert (await first).version is not None
    assert (await withdrawing).version is None
    with pytest.raises(Cancelled):
        await second
    assert len(bench.node.starts) == 1


async def test_those_that_never_come_are_forgotten(bench: Bench) -> None:
    """After a while, whether somebody deploys or not; and of many the oldest at once."""
    deployments, names = bench.controller.service._deployments, [f"{n:032x}" for n in range(MOST_WITHDRAWN + 10)]
    for name in (names[0], *names):
        await deployments.withdraw(ctl.Withdraw(request=name))
    assert list(deployments._withdrawn) == names[10:]
    deployments._withdrawn = {name: at - 2 * KEEP_S for name, at in deployments._withdrawn.items()}
    await deployments.withdraw(ctl.Withdraw(request=names[0]))
    assert list(deployments._withdrawn) == names[:1]


async def test_too_late(bench: Bench) -> None:
    request, bundle, deploying = await begun(bench)
    assert (await deploying).version is not None
    assert (await withdraw(bench, request)).version == 1
    assert await bundles.exists(bench.gateway.bus, bundle)
    info: ctl.FunctionInfo = await bench.gateway.ask("function", ctl.FunctionRef(function="chat"))
    assert info.record.active == 1


async def test_too_late_for_another_controller_than_the_one_that_gave_it_the_route(
    nats: Nats, node: ScriptedNode
) -> None:
    """It died before it answered: what it has stored says so, of a new version, of one that was there, and of the one
    that had the route already."""
    gateway, requests = Gateway(await nats.bus("gw")), [uuid.uuid4().hex for _ in range(5)]
    async with controller_of(nats):
        for request, data in zip(requests, (b"one", b"two", b"two", b"one", b"one"), strict=True):
            bundle = await gateway.upload(data)
            deploy = ctl.Deploy(request=request, manifest=manifest(), bundle=bundle, bundle_bytes=3, wait_s=15.0)
            assert (await gateway.ask("deploy", deploy)).version is not None
    async with controller_of(nats, "ctl2"):
        told = [await gateway.ask("withdraw", ctl.Withdraw(request=request)) for request in (*requests, "other")]
    assert [each.version for each in told] == [1, 2, 2, 1, 1, None]


def test_what_a_controller_of_before_has_stored_of_who_asked() -> None:
    record = VersionRecord(
        function="chat", version=1, manifest=manifest(), bundle="", bundle_bytes=0, content="", request="old"
    )
    view = View(functions={"chat": FunctionRecord(function="chat", active=1, last_version=1)})
    view = view.put_version(msgspec.structs.replace(record, state=VersionState.ACTIVE))
    assert registry.routed_by(view, "old") == 1
    for number in range(registry.KEEP_REQUESTS):
        assert registry.routed_by(view, "old") == 1
        view = registry.activate(view, ("chat", 1), f"r{number}")
    assert registry.routed_by(view, "old") is None, "the last few"
    assert registry.routed_by(view, "r0") == 1
    assert view.versions["chat", 1].request == f"r{registry.KEEP_REQUESTS - 1}"


async def test_while_it_is_stored_that_it_has_the_route(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it gets it is not known yet: the store may not take it, and then it has not got it."""
    await bench.gateway.deploy(manifest())
    bench.node.behave = lambda command: InstanceState.STARTING
    bench.node.starts.clear()
    request, _, deploying = await begun(bench)
    await until(lambda: bench.node.starts)
    storing, refuse = asyncio.Event(), asyncio.Event()

    async def stored(*_: Any) -> None:
        storing.set()
        await refuse.wait()
        raise Unavailable("the state cannot be stored now")

    with monkeypatch.context() as patched:
        patched.setattr(bench.controller.loop._ledger, "stored", stored)
        bench.node.put(bench.node.starts[0].instance, InstanceState.READY)
        await asyncio.wait_for(storing.wait(), GIVE_UP_S)
        withdrawing = asyncio.create_task(withdraw(bench, request))
        await asyncio.wait([withdrawing], timeout=2 * WITHDRAW_S)
        refuse.set()
        with pytest.raises(Unavailable):
            await deploying
    told = await asyncio.gather(withdrawing, return_exceptions=True)
    info: ctl.FunctionInfo = await bench.gateway.ask("function", ctl.FunctionRef(function="chat"))
    assert info.record.active == 1
    assert not (isinstance(told[0], ctl.Withdrawn) and told[0].version == 2), "it was said to be deployed"


@pytest.mark.parametrize("how", ["another controller", "long after"])
async def test_who_asks_again_for_what_was_deployed_takes_the_route_from_nobody(
    nats: Nats, node: ScriptedNode, how: str
) -> None:
    """Its answer was lost (its gateway was cut off, or stood still), and somebody has deployed since."""
    gateway, request, bundle = Gateway(await nats.bus("gw")), uuid.uuid4().hex, f"sha256:{sha256(b'one').hexdigest()}"
    first = ctl.Deploy(request=request, manifest=manifest(), bundle=bundle, bundle_bytes=3, wait_s=15.0)

    async def active(controller: Controller) -> int | None:
        told = await gateway.ask("deploy", first)
        assert told.version is not None
        assert told.version.version == 1
        return controller.loop.view.functions["chat"].active

    async with controller_of(nats) as controller:
        await gateway.upload(b"one")
        assert await active(controller) == 1
        await gateway.deploy(manifest(), b"two")
        assert await active(controller) == 2
        if how == "long after":
            for known in controller.service._deployments._known.values():
                known.ended -= 2 * KEEP_S
            assert await active(controller) == 2
    if how == "another controller":
        async with controller_of(nats, "ctl2") as controller:
            assert await active(controller) == 2


async def test_of_what_was_there_already_while_its_secrets_are_waited_for(bench: Bench) -> None:
    """Who called it back was told that it has not got the route: it does not get it later."""
    await bench.controller.service._vault.put("token", b"x")
    await bench.gateway.deploy(manifest(secrets=["token"]), b"one")
    await bench.gateway.deploy(manifest(secrets=["token"]), b"two")
    async with bench.controller.service._deployments.holding(("token",)):  # as another deployment that is stored
        request, bundle, deploying = await begun(bench, b"one", secrets=["token"])
        await asyncio.sleep(0.5)
        assert (await withdraw(bench, request)).version is None
    with pytest.raises(Cancelled, match="called back"):
        await deploying
    info: ctl.FunctionInfo = await bench.gateway.ask("function", ctl.FunctionRef(function="chat"))
    assert info.record.active == 2
    assert await bundles.exists(bench.gateway.bus, bundle), "another version has it"

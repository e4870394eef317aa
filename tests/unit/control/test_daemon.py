"""The controller itself: election, taking over, NATS restarts, events, the process."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sllm_runtime.control import remembering, spreading, sweeping, view
from sllm_runtime.control.daemon import ControllerSettings, lead
from sllm_runtime.control.migration import KEEP_S
from sllm_runtime.control.scheduling.policies import Preemption
from sllm_runtime.control.service import Service
from sllm_runtime.platform import bundles, state
from sllm_runtime.platform.state import StateStore
from sllm_runtime.platform.watch import Last, last_messages
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import StaleTerm, Unavailable
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.node import Storage
from sllm_runtime.protocol.records import FunctionRecord, InstanceRecord, LearnedRecord
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, Gateway, controller_of, has_events, manifest
from tests.unit.control.scripted_node import ScriptedNode, digest_of


async def test_a_new_controller_keeps_ready_functions_and_deposes_the_old(nats: Nats, node: ScriptedNode) -> None:
    gateway = Gateway(await nats.bus("gw"))
    async with lead(nats.settings("ctl"), "ctl") as old:
        stop = asyncio.Event()
        running = asyncio.create_task(old.run(stop))
        await gateway.deploy(manifest(min_instances=1))
        (name,) = old.loop.view.instances
        async with controller_of(nats, "ctl2") as new:
            await until(lambda: new.loop.view.instances[name].seen, what="the instance is heard of")
            assert new.term > old.term
            assert new.loop.view.instances[name].ready
            assert len({command.instance for command in node.starts}) == 1
            node.put(name, InstanceState.LOST)
            with pytest.raises(StaleTerm):
                await asyncio.wait_for(running, GIVE_UP_S)
            await until(lambda: len({command.instance for command in node.starts}) == 2, what="it is started anew")


async def test_a_node_that_was_lost_while_nobody_led_is_told_of(
    nats: Nats, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "LOST_AFTER_S", 1.0)
    gateway = Gateway(await nats.bus("gw"))
    async with controller_of(nats) as first:
        await gateway.deploy(manifest())
        await first.loop._ledger.settled(GIVE_UP_S)
    node.silent = True
    told: list[tuple[str, str | None]] = []
    async with controller_of(nats, "ctl2") as second:
        monkeypatch.setattr(second.loop, "_tell", lambda event: told.append((event.kind, event.node)))
        await until(lambda: ("node.lost", "n1") in told)
        (found,) = (await gateway.ask("nodes", ctl.Listing())).nodes
        assert not found.alive
        assert found.age_s >= 1.0
        node.silent = False
        await until(lambda: ("node.alive", "n1") in told)
        assert [event for event in told if event[0] == "node.lost"] == [("node.lost", "n1")], "once"


async def test_what_was_started_and_not_recorded_goes_on_under_the_next_controller(
    nats: Nats, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one dies between a start and its record; a call that was routed there has begun."""
    gateway = Gateway(await nats.bus("gw"))
    async with controller_of(nats) as first:
        await gateway.deploy(manifest(keep_alive=0))
        (old,) = first.loop.view.instances
        node.put(old, InstanceState.READY, idle_s=100.0)
        await until(lambda: not first.loop.view.instances)
        await first.loop._ledger.settled(GIVE_UP_S)
        node.stops.clear()
        put = first.loop._ledger._store.put

        async def no_instance(key: str, record: msgspec.Struct) -> None:
            if key.startswith("instances."):
                raise Unavailable("it dies before")
            await put(key, record)

        monkeypatch.setattr(first.loop._ledger._store, "put", no_instance)
        acquired = await gateway.acquire()
        assert acquired.route is not None
        (entry,) = acquired.route.entries
        node.put(entry.instance, InstanceState.READY, running=1)
    async with controller_of(nats, "ctl2") as second:
        await until(lambda: entry.instance in second.loop.view.instances, what="it is taken in")
        assert second.loop.view.instances[entry.instance].ready
        again = await gateway.acquire()
        assert again.route is not None
        assert [each.instance for each in again.route.entries] == [entry.instance]
        await second.loop._ledger.settled(GIVE_UP_S)
        store = await StateStore.open(gateway.bus, create=False)
        record = await store.get(subjects.instance_key(entry.instance), InstanceRecord)
        assert record is not None
        assert (record.state, record.fingerprint) == (InstanceState.READY, "cpu")
        assert not node.stops


async def test_a_server_that_lags_is_not_believed_by_a_new_controller(
    nats: Nats, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end what runs as nobody's, and write its older records over the newer ones."""
    gateway, read, lags = Gateway(await nats.bus("gw")), last_messages, 3
    async with controller_of(nats) as first:
        await gateway.deploy(manifest(min_instances=1))
        await first.loop._ledger.settled(GIVE_UP_S)
        (name,) = first.loop.view.instances

    async def lagging(*asked: Any) -> dict[str, Last]:
        nonlocal lags
        lags -= 1
        return {} if lags >= 0 else await read(*asked)

    monkeypatch.setattr(state, "last_messages", lagging)
    async with controller_of(nats, "ctl2") as second:
        assert set(second.loop.view.functions) == {"chat"}
        assert second.loop.view.instances[name].ready


async def test_a_deployment_that_was_broken_off_is_forgotten(nats: Nats, node: ScriptedNode) -> None:
    gateway = Gateway(await nats.bus("gw"))
    node.behave = lambda command: InstanceState.STARTING
    async with controller_of(nats) as first:
        digest = await gateway.upload(b"bundle")
        deploy = ctl.Deploy(request="r", manifest=manifest(), bundle=digest, bundle_bytes=6, wait_s=0.2)
        await gateway.ask("deploy", deploy)
        await until(lambda: first.loop.view.versions)
        await first.loop._ledger.settled(GIVE_UP_S)
    async with controller_of(nats) as second:
        assert not second.loop.view.functions
        await until(lambda: node.stops, what="its instance is ended")
        node.behave = lambda command: InstanceState.READY
        done: ctl.Deployed = await gateway.ask("deploy", msgspec.structs.replace(deploy, wait_s=15.0))
        assert done.version is not None
        assert done.version.version == 1


async def test_a_leader_sweeps_bundles_from_its_beginning(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks it to, and nobody else begins it."""
    monkeypatch.setattr(sweeping, "SWEEP_S", 0.05)
    gateway = Gateway(await nats.bus("gw"))
    async with controller_of(nats):
        digest = await gateway.upload(b"of no version")

        async def gone() -> bool:
            return not await bundles.exists(gateway.bus, digest)

        await until(gone, what="what no version reaches is collected")


async def test_a_leader_places_models_and_stores_what_it_learned_from_its_beginning(
    nats: Nats, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spreading, "SPREAD_S", 0.05)
    monkeypatch.setattr(remembering, "REMEMBER_S", 0.05)
    gateway, source = Gateway(await nats.bus("gw")), "s3://bucket/m"
    node.storage, node.remote = Storage(ssd_limit=8 * MIB), (digest_of(source),)
    async with controller_of(nats) as controller:
        await gateway.deploy(manifest(model=source, engine=True))
        await until(lambda: node.kept == (digest_of(source),), what="its node is told to keep what was started")

        async def stored() -> bool:
            found = await controller.loop._ledger._store.get(subjects.LEARNED_KEY, LearnedRecord)
            return found is not None and any(each.function == "chat" for each in found.imports + found.rest)

        await until(stored, what="what the start has taught is stored")


async def test_a_deletion_that_a_leader_began_is_ended_by_the_next_one(nats: Nats, node: ScriptedNode) -> None:
    gateway = Gateway(await nats.bus("gw"))
    async with controller_of(nats) as first:
        deployed = await gateway.deploy(manifest(timeout=300))
        (name,) = first.loop.view.instances
        node.put(name, InstanceState.READY, running=1)
        await until(lambda: first.loop.view.instances[name].running, what="it is known that a call runs")
        told = await gateway.ask("delete", ctl.Delete(function="chat"))
        assert told.note.startswith("draining")
        await first.loop._ledger.settled(GIVE_UP_S)
    async with controller_of(nats, "ctl2") as second:
        assert second.loop.view.functions["chat"].deleting
        node.put(name, InstanceState.STOPPED, running=0)
        await until(lambda: "chat" not in second.loop.view.functions, what="it is deleted, though nobody asks again")
        store = await StateStore.open(gateway.bus, create=False)
        assert await store.get(subjects.function_key("chat"), FunctionRecord) is None
        assert deployed.version is not None
        bundle = deployed.version.bundle

        async def gone() -> bool:
            return not await bundles.exists(gateway.bus, bundle)

        await until(gone, what="its bundle is gone")


async def test_nats_restarts_and_nothing_is_lost(bench: Bench, nats: Nats) -> None:
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    await nats.kill()
    await nats.start()
    await until(lambda: bench.controller.loop._bus.connected and bench.gateway.bus.connected)
    acquired: list[ctl.Acquired] = []

    async def answered() -> bool:
        with contextlib.suppress(Unavailable):  # both are connected; the server may not know yet who answers
            acquired.append(await bench.gateway.acquire())
        return bool(acquired)

    await until(answered)
    route = acquired[0].route
    assert route is not None
    assert [entry.instance for entry in route.entries] == [name]
    await bench.gateway.deploy(manifest(), b"other")
    assert len({command.instance for command in bench.node.starts}) == 2


async def test_state_changes_are_events(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    wanted = {"node.joined", "function.created", "version.preparing", "instance.ready", "version.active"}
    await until(lambda: has_events(bench, wanted), what=f"{wanted} are stored")


async def test_the_daemon_serves_and_ends(nats: Nats, tmp_path: Path) -> None:
    read, write = os.pipe()
    env = {**os.environ, **nats.env("ctl"), "SLLM_READY_FD": str(write)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sllm_runtime.control", env=env, pass_fds=[write]
    )
    os.close(write)
    try:
        said = await asyncio.wait_for(asyncio.to_thread(os.read, read, 16), GIVE_UP_S)
        assert said == b"READY\n"
        gateway = Gateway(await nats.bus("gw"))
        assert (await gateway.ask("ping", ctl.Nothing())).note == "leading"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), GIVE_UP_S) == 0
    finally:
        os.close(read)
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_every_verb_has_a_handler() -> None:
    service = Service(*[object()] * 3, *[_Any()] * 6)  # type: ignore[arg-type]
    assert service.handlers.keys() == ctl.VERBS.keys()


class _Any:
    def __getattr__(self, name: str) -> object:
        return name


def test_who_wants_calls_left_in_peace_for_longer_than_moves_are_remembered_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It holds for what is stopped, and controllers went by it."""
    ControllerSettings.load({"SLLM_SETTLED": f"{KEEP_S:g}"}).chosen_policy()
    assert not caplog.records
    policy = ControllerSettings.load({"SLLM_SETTLED": "300", "SLLM_POLICY": "preemption"}).chosen_policy()
    assert isinstance(policy, Preemption)
    assert policy._settled_s == 300
    assert "moved again after 60 s" in caplog.text

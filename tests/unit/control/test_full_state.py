"""The state's stream fills up: real JetStream with a small limit. What runs, and what makes room, is written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sllm_runtime.control.changes import Write
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.sealed_vault import SealedVault
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.state import StateStore
from sllm_runtime.platform.streams import STATE_STREAM
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import StoreFull, Unavailable
from sllm_runtime.protocol.limits import KIB
from sllm_runtime.protocol.records import FunctionRecord, Lease, ModelRecord
from sllm_runtime.protocol.subjects import LEASE_KEY
from tests.fixtures.nats import CONTROLLER, CONTROLLER_2, Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, manifest
from tests.unit.control.test_sealed_vault import OLD, keyring

LIMIT = 64 * KIB


def model(name: str, nbytes: int) -> ModelRecord:
    return ModelRecord(digest=name, uri="x" * nbytes, nbytes=1, partitions=(1,))


async def limit(bus: Bus, nbytes: int) -> None:
    config = (await bus.jetstream.stream_info(STATE_STREAM)).config
    await bus.jetstream.update_stream(config.evolve(max_bytes=nbytes))


async def full(nats: Nats) -> StateStore:
    """Of a leader; it takes no record more but a small one."""
    store = await nats.store()
    await store.elect(CONTROLLER)
    await limit(store._bus, LIMIT)
    with contextlib.suppress(StoreFull):
        for number in range(100):
            await store.put(f"models.m{number}", model(f"m{number}", 4 * KIB))
    return store


@contextlib.asynccontextmanager
async def running(ledger: Ledger) -> AsyncIterator[None]:
    task = asyncio.create_task(ledger.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_record_without_room_holds_up_no_other_and_is_written_when_there_is_some(nats: Nats) -> None:
    """A deletion behind it makes that room."""
    store = await full(nats)
    ledger = Ledger(store)
    large, small = model("large", 6 * KIB), FunctionRecord(function="f", active=None, last_version=0)
    async with running(ledger):
        ledger.take([Write("models.large", large)])
        await until(lambda: ledger._full, what="JetStream has refused it")
        with pytest.raises(Unavailable, match=r"cannot be stored now: models\.large was not written: KV_sllm_state"):
            await ledger.stored([Write("models.large", large)], 0.5)
        await ledger.stored([Write("functions.f", small)], GIVE_UP_S)
        assert ledger.waiting == 1
        await ledger.stored([Write("models.m0", None), Write("models.m1", None)], GIVE_UP_S)
        await ledger.settled(GIVE_UP_S)
    assert await store.get("models.large", ModelRecord) == large


async def test_a_record_without_room_is_written_once_the_stream_may_be_larger(nats: Nats) -> None:
    """Nobody has to write something else first."""
    store = await full(nats)
    ledger, large = Ledger(store), model("large", 6 * KIB)
    async with running(ledger):
        ledger.take([Write("models.large", large)])
        await until(lambda: ledger._full, what="JetStream has refused it")
        await limit(store._bus, 2 * LIMIT)
        await ledger.settled(GIVE_UP_S)
    assert await store.get("models.large", ModelRecord) == large


async def test_what_was_never_there_is_deleted_from_a_full_stream(nats: Nats) -> None:
    store = await full(nats)
    with contextlib.suppress(StoreFull):
        for number in range(1000):
            await store.put(f"functions.f{number}", FunctionRecord(function="f", active=None, last_version=0))
    await asyncio.wait_for(store.delete("models.never"), GIVE_UP_S)
    await store.delete("models.m0")
    assert await store.get("models.m0", ModelRecord) is None


async def test_versions_models_and_secrets_leave_room_for_what_runs(bench: Bench, tmp_path: Path) -> None:
    """Nothing of them is begun; terms, leases, starts and deletions have theirs."""
    gateway, store, bus = bench.gateway, bench.controller.loop._ledger._store, bench.controller.loop._bus
    vault = SealedVault(store, keyring(tmp_path, OLD))
    await vault.put("old", b"1")
    await gateway.deploy(manifest(keep_alive=0))
    (name,) = bench.live()
    await limit(bus, 4 * LIMIT)
    await store.put("models.large", model("large", 3 * LIMIT))
    for refused in (
        gateway.deploy(manifest(), b"other"),
        gateway.ask("register", ctl.RegisterModel(uri="/models/tiny", wait_s=10.0)),
        vault.put("new", b"1"),
    ):
        with pytest.raises(StoreFull, match=r"KV_sllm_state holds .* what is left is for what runs"):
            await refused
    assert not bench.node.prepares
    await vault.put("old", b"2")
    await store.put(LEASE_KEY, Lease(term=1, controller=CONTROLLER, beat=10**9))
    bench.node.put(name, bench.node.instances[name].state, idle_s=100.0)
    await bench.none_left()
    assert (await gateway.acquire()).route is not None
    await gateway.ask("delete", ctl.Delete(function="chat", force=True))
    other = await StateStore.open(bus, create=False)
    assert await other.elect(CONTROLLER_2) == bench.controller.term + 1
